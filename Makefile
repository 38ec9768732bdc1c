# make train  trains on real faces (LOSS=arcface, DATA=, SEED=, ARGS="-p epochs 20 -p name short")
# make test   runs every notebook and the tests
# make lab    opens JupyterLab;  make paper  re-runs the story notebooks;  make published  re-runs the published runs (an hour);  make studies  those of single questions (half an hour);  make nearid  those of the second question;  make speed  times data path, losses and networks (half an hour)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help train test lab paper speed published studies nearid export

LOSS ?= infonce
DATA ?= demo
SEED ?= 0
NAME ?= $(DATA)-$(LOSS)-seed$(SEED)
ARGS ?=
# .env is read as facenb.runs does, for the common ways of writing it: quotes, ~, a note behind, a relative folder.
DATA_DIR ?= $(shell sed -nE "s/^(export )?DATA_DIR=//p" .env 2>/dev/null | sed -E "s/ +\#.*//; s/^[\"']//; s/[\"']$$//; s|^~|$$HOME|; s|^([^/])|$(CURDIR)/\1|")
ifeq ($(strip $(DATA_DIR)),)
DATA_DIR := $(CURDIR)/data
endif
PYTHON ?= $(shell command -v python3.11 || command -v python3)

BIN := .venv/bin
LOCKED := .venv/.locked
READY := .venv/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
RUNS ?= $(DATA_DIR)/runs
RUN = $(RUNS)/$(NAME)
export DATA_DIR

help:
	@sed -n 's/^# //p' Makefile | head -3

# The environment is complete when its mark is there. A changed lock builds it anew, changed settings only reinstall
# the package, and an interrupted build starts over.
$(LOCKED): requirements.lock
	@[ ! -L .venv ] || { echo ".venv is a link and --clear would empty what it points to; remove the link, or update there"; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
	  echo "requirements.lock is made for Python 3.11; name one: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "building .venv (about 6 GB, a few minutes) ..."
	"$(PYTHON)" -m venv --clear .venv
	$(PIP) --no-deps -r requirements.lock
	@touch $@

$(READY): $(LOCKED) settings.ini setup.py pyproject.toml
	$(PIP) --no-deps --no-build-isolation -e .
	$(BIN)/python -m pip --disable-pip-version-check check
	@touch $@

train: $(READY)
	@mkdir -p "$(RUN)"
	@FACENB_LOG_EVERY=10 $(BIN)/python -m papermill nbs/train.ipynb "$(RUN)/.train.ipynb" -k python3 --log-output --no-progress-bar \
	  -r loss "$(LOSS)" -r data "$(DATA)" -p seed "$(SEED)" -r name "$(NAME)" -r runs "$(RUNS)" $(ARGS) < /dev/null 2>&1 \
	  | sed -u -E '/^(Executing|Ending) Cell|^(In|Out)put Notebook|^Executing notebook|^<Figure|^$$|IPKernelApp/d'
	@mv "$(RUN)/.train.ipynb" "$(RUN)/train.ipynb"

# Two processes with one thread each: notebooks one after the other in each, tests in the order of their files, the rest of a
# slower half taken over by the other.
test: export OMP_NUM_THREADS = 1
test: $(READY)
	$(BIN)/nbdev_test --n_workers 2 --do_print --timing
	$(BIN)/python -m pytest -q -n 2 --dist worksteal tests

lab: $(READY)
	$(BIN)/python -m jupyterlab nbs

paper: $(READY)
	$(BIN)/python -m nbconvert --to notebook --execute --inplace --ExecutePreprocessor.coalesce_streams=True nbs/5[1-9]*_*.ipynb nbs/index.ipynb
	$(BIN)/nbdev_clean
	$(BIN)/python tests/test_readme.py

# Measurements with their records: speed of data path, losses and networks, and where a network looks; not part of paper, because they differ from run to run.
speed: $(READY)
	for notebook in nbs/6*.ipynb; do \
	  $(BIN)/python -m nbconvert --to notebook --execute --inplace --ExecutePreprocessor.timeout=-1 $$notebook; \
	  $(BIN)/nbdev_clean --fname $$notebook; done

# The runs behind the published figures; their small records are tracked by git.
published: $(READY)
	for loss in $$($(BIN)/python -c "from facenb.registry import LOSSES; print(*LOSSES)"); do for seed in 0 1 2; do \
	  $(MAKE) --no-print-directory train LOSS=$$loss SEED=$$seed RUNS="$(CURDIR)/data/runs/published"; done; done

# The runs behind the stories of one question each: batch size, and evaluations of the published runs' weights.
studies: $(READY)
	for loss in infonce arcface; do for seed in 0 1 2; do for size in "15 0.01" "10 0.006667" "5 0.003333"; do set -- $$size; \
	  $(MAKE) --no-print-directory train LOSS=$$loss SEED=$$seed NAME=demo-$$loss-b$$1-seed$$seed \
	    ARGS="-p pairs $$1 -p lr $$2" RUNS="$(CURDIR)/data/runs/studies/batch_size"; done; done; done
	for loss in arcface hybrid infonce; do for seed in 0 1 2; do of=data/runs/published/demo-$$loss-seed$$seed; \
	  [ -e $$of/backbone.safetensors ] || $(MAKE) --no-print-directory train LOSS=$$loss SEED=$$seed RUNS="$(CURDIR)/data/runs/published"; \
	  compare=; [ $$loss = arcface ] || compare="-r compare data/runs/published/demo-arcface-seed$$seed"; \
	  $(BIN)/python -m papermill nbs/evaluate.ipynb data/runs/studies/.out.ipynb -k python3 --no-progress-bar \
	    -r model $$of $$compare -r runs data/runs/studies/evaluations < /dev/null; done; done

# The demo of the second question: frozen patches and four losses, three seeds each; half an hour.
nearid: $(READY)
	for seed in 0 1 2; do for run in "frozen nearid -r train frozen" "ignored clip_one" "denominator clip_one -p include_negatives True" \
	  "alpha01 nearid -p alpha 0.1" "nearid nearid"; do set -- $$run; name=$$1; loss=$$2; shift 2; \
	  $(MAKE) --no-print-directory train LOSS=$$loss DATA=nearid_demo SEED=$$seed NAME=nearid_demo-$$name-seed$$seed \
	    ARGS="-r device cpu $$*" RUNS="$(CURDIR)/data/runs/studies/nearid"; done; done
	for name in frozen ignored denominator nearid; do $(BIN)/python -c "import sys; from facenb.tuple_pictures import save_pictures; \
	  save_pictures(sys.argv[1])" data/runs/studies/nearid/nearid_demo-$$name-seed0; done

# After editing notebooks: write the package, tidy the notebooks, write README.
export: $(READY)
	$(BIN)/nbdev_export
	$(BIN)/nbdev_clean
	$(BIN)/python tests/test_readme.py
