"""Every way through the scripts of slurm/, with programs that stand in for papermill and Slurm."""
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from dotenv import dotenv_values

from conftest import ROOT

pytestmark = pytest.mark.skipif(not (ROOT / ".venv" / "bin" / "python").exists(), reason="the scripts use .venv, which make builds")

# Does what its parameter `act` says, in the run's folder; what it was called with lies there too.
PAPERMILL = """
import json, os, sys, time
from pathlib import Path
words = sys.argv[1:]
given = {words[i + 1]: words[i + 2] for i, word in enumerate(words) if word in ("-p", "-r")}
run = Path(given["runs"]) / given["name"]
(run / "called.json").write_text(json.dumps({"given": given, "words": words, "staged": os.environ.get("FACENB_STAGED")}))
act = given.get("act", "finish")
if act in ("wait", "evaluate"):  # training, or deaf to the stop file
    limit = time.time() + 20
    while time.time() < limit and not (run / "stop").exists():
        time.sleep(0.02)
if act == "wait":
    (run / "stop").unlink()
    (run / "status.json").write_text('{"state": "stopped"}')
    for step in given.get("saved", "").split():
        (run / "checkpoints" / f"step-{int(step):08d}").mkdir(parents=True)
if act in ("finish", "evaluate"):
    (run / "record.json").write_text("{}")
sys.exit(3 if act == "fail" else 0)
"""


@pytest.fixture
def place(tmp_path):
    "Folders and programs that stand in: scontrol and srun write down what they were asked"
    (tmp_path / "python" / "papermill").mkdir(parents=True)
    (tmp_path / "python" / "papermill" / "__init__.py").touch()
    (tmp_path / "python" / "papermill" / "__main__.py").write_text(PAPERMILL)
    (tmp_path / "x.yaml").write_text("loss: infonce  # of all\ndata: 'ms1m'\n")
    (tmp_path / "spool").mkdir()
    shutil.copy(ROOT / "slurm" / "train.sbatch", tmp_path / "spool" / "slurm_script")
    programs = {"scontrol": f'echo "$@" >> {tmp_path}/scontrol\nkill -TERM $PPID',
                "srun": f'echo "$@" >> {tmp_path}/srun\nwhile [ "${{1#--}}" != "$1" ]; do shift; done\n"$@" && "$@"'}
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def start(place: Path, *arguments: str, script: Path = ROOT / "slurm" / "train.sbatch", **environment: str):
    "The script with a YAML file, as a process"
    environment = {"PATH": f"{place}/bin:/usr/bin:/bin", "HOME": str(place), "DATA_DIR": str(place),
                   "PYTHONPATH": str(place / "python"), **environment}
    return subprocess.Popen(["bash", str(script), str(place / "x.yaml"), *arguments], cwd=place, env=environment,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def queued(place: Path, *arguments: str, **environment: str):
    "The same from the copy that Slurm would run"
    return start(place, *arguments, script=place / "spool" / "slurm_script", SLURM_SUBMIT_DIR=str(ROOT),
                 SLURM_JOB_ID="7", **environment)


def end(process) -> tuple[int, str]:
    output = process.communicate(timeout=30)[0]
    return process.returncode, output


def until(happens):
    limit = time.monotonic() + 20
    while not happens():
        assert time.monotonic() < limit
        time.sleep(0.02)


def called(place: Path, name: str = "x-seed0") -> dict:
    return json.loads((place / "runs" / name / "called.json").read_text())


def test_finishes_and_names_the_run_by_file_and_seed(place):
    code, output = end(start(place, "-p", "lr", "0.1", SEED="3", SLURM_RESTART_COUNT="2"))
    assert code == 0, output
    call = called(place, "x-seed3")
    assert call["given"] == {"lr": "0.1", "seed": "3", "name": "x-seed3", "runs": str(place / "runs")}
    assert call["words"][:2] == ["nbs/train.ipynb", str(place / "runs" / "x-seed3" / "out.2.ipynb")]
    assert call["words"][call["words"].index("-f") + 1] == str(place / "x.yaml") and call["staged"] is None


def test_the_array_counts_seeds_and_what_is_given_wins(place):
    assert end(queued(place, SLURM_ARRAY_TASK_ID="2"))[0] == 0
    assert called(place, "x-seed2")["given"]["seed"] == "2"
    code, output = end(queued(place, "-p", "seed", "1", SLURM_ARRAY_TASK_ID="2"))
    assert code == 2 and "leave one of them out" in output
    assert end(start(place, "-p", "seed", "5", "-r", "runs", str(place / "other"), FACENB_NAME="stem"))[0] == 0
    assert json.loads((place / "other" / "stem-seed5" / "called.json").read_text())["given"]["seed"] == "5"
    assert end(start(place, "-r", "name", "own"))[0] == 0 and called(place, "own")["given"]["name"] == "own"


def test_a_finished_run_is_left_alone(place):
    run = place / "runs" / "x-seed0"
    run.mkdir(parents=True)
    (run / "record.json").write_text("{}")
    code, output = end(queued(place))
    assert code == 0 and "is finished" in output and not (run / "called.json").exists()


def test_requeued_when_the_time_is_nearly_over(place):
    run = place / "runs" / "x-seed0"
    run.mkdir(parents=True)
    (run / "stop").touch()  # left over: the run must not stop at once
    process = queued(place, "-p", "act", "wait", SLURM_JOB_NUM_NODES="2")
    until(lambda: (run / "called.json").exists())
    assert not (run / "stop").exists() and called(place)["given"]["nodes"] == "2"
    process.send_signal(signal.SIGUSR1)
    code, output = end(process)
    assert (place / "scontrol").read_text() == "requeue 7\n" and code, output
    assert end(queued(place))[0] == 0


def test_only_the_own_task_of_an_array_is_requeued(place):
    "One task has the number of the whole array, which would mean all of them"
    process = queued(place, "-p", "act", "wait", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="2")
    until(lambda: (place / "runs" / "x-seed2" / "called.json").exists())
    process.send_signal(signal.SIGUSR1)
    end(process)
    assert (place / "scontrol").read_text() == "requeue 7_2\n"


def stopped_by_slurm(place: Path, name: str, *arguments: str) -> tuple[int, str]:
    "A start that is asked to stop while it trains"
    called = place / "runs" / name / "called.json"
    called.unlink(missing_ok=True)
    process = queued(place, "-r", "name", name, "-p", "act", "wait", *arguments)
    until(called.exists)
    process.send_signal(signal.SIGUSR1)
    return end(process)


def test_a_run_that_never_gets_on_is_given_up(place):
    for step in range(1, 5):
        stopped_by_slurm(place, "a", "-p", "saved", str(step))
        assert len((place / "scontrol").read_text().splitlines()) == step
    code, output = stopped_by_slurm(place, "a", "-p", "saved", "5")
    assert code == 1 and "five times in a row" in output and len((place / "scontrol").read_text().splitlines()) == 4
    for step in (10, 11, 12, 13, 100, 101):  # a start that gets on begins the count anew
        stopped_by_slurm(place, "b", "-p", "saved", str(step))
    assert len((place / "scontrol").read_text().splitlines()) == 10


def test_asked_before_it_began_it_does_not_begin(place):
    (place / "ms1m.lmdb").write_bytes(b"faces")
    (place / "disk").mkdir()
    (place / "bin" / "cp").write_text(f"#!/bin/sh\ntouch {place}/copies\nsleep 1\n/bin/cp \"$@\"\n")
    (place / "bin" / "cp").chmod(0o755)
    process = queued(place, SLURM_TMPDIR=str(place / "disk"))
    until((place / "copies").exists)
    process.send_signal(signal.SIGUSR1)
    code, output = end(process)
    assert (place / "scontrol").read_text() == "requeue 7\n" and not (place / "runs" / "x-seed0" / "called.json").exists()


def test_asked_while_modules_are_loaded_it_does_not_die(place):
    module = f"module() {{ touch {place}/loads; sleep 1; }}; export -f module"
    (place / "profile").write_text(module)
    process = queued(place, BASH_ENV=str(place / "profile"))
    until((place / "loads").exists)
    process.send_signal(signal.SIGUSR1)
    end(process)
    assert (place / "scontrol").read_text() == "requeue 7\n"


def test_stopping_during_evaluation_is_finishing(place):
    process = queued(place, "-p", "act", "evaluate")
    until(lambda: (place / "runs" / "x-seed0" / "called.json").exists())
    process.send_signal(signal.SIGUSR1)
    assert end(process)[0] == 0 and not (place / "scontrol").exists()
    assert not (place / "runs" / "x-seed0" / "stop").exists()


@pytest.mark.parametrize("how", [queued, start])
def test_stopped_by_hand_waits_for_the_user(place, how):
    process = how(place, "-p", "act", "wait")
    until(lambda: (place / "runs" / "x-seed0" / "called.json").exists())
    (place / "runs" / "x-seed0" / "stop").touch()
    code, output = end(process)
    assert code == 0 and "the same command continues it" in output and not (place / "scontrol").exists()


def test_without_slurm_the_signal_only_stops(place):
    process = start(place, "-p", "act", "wait", SLURM_JOB_ID="7")  # in somebody's interactive job
    until(lambda: (place / "runs" / "x-seed0" / "called.json").exists())
    process.send_signal(signal.SIGUSR1)
    code, output = end(process)
    assert code == 0 and "the same command continues it" in output and not (place / "scontrol").exists()


def test_ending_the_script_ends_the_run(place):
    process = start(place, "-p", "act", "wait")
    until(lambda: (place / "runs" / "x-seed0" / "called.json").exists())
    process.terminate()
    assert end(process)[0] == 143  # communicate() returns when nobody holds the output: papermill is gone


@pytest.mark.parametrize("act, code", [("fail", 3), ("silent", 1)])
def test_without_a_record_it_never_ends_well(place, act, code):
    run = place / "runs" / "x-seed0"
    run.mkdir(parents=True)
    (run / "status.json").write_text('{"state": "stopped"}')  # of a start before
    ended, output = end(queued(place, "-p", "act", act))
    assert ended == code and "without a record" in output


def test_stages_the_store_on_every_node(place):
    (place / "ms1m.lmdb").write_bytes(b"faces")
    (place / "disk").mkdir()
    assert end(queued(place, SLURM_TMPDIR=str(place / "disk"), SLURM_JOB_NUM_NODES="2"))[0] == 0
    assert called(place)["staged"] == str(place / "disk") and (place / "disk" / "ms1m.lmdb").read_bytes() == b"faces"
    assert "--ntasks=2" in (place / "srun").read_text() and len(list((place / "disk").iterdir())) == 1


def test_stages_what_is_given_and_goes_on_without(place):
    (place / "my faces.lmdb").write_bytes(b"faces")
    (place / "disk").mkdir()
    given = ["-r", "data", f"store:{place}/my faces.lmdb", "-r", "name"]
    assert end(queued(place, *given, "a", SLURM_TMPDIR=str(place / "disk")))[0] == 0
    assert called(place, "a")["staged"] == str(place / "disk") and (place / "disk" / "my faces.lmdb").exists()
    (place / "bin" / "cp").write_text("#!/bin/sh\nexit 1\n")
    (place / "bin" / "cp").chmod(0o755)
    code, output = end(queued(place, *given, "b", SLURM_TMPDIR=str(place / "disk"), FACENB_STAGED="/before"))
    assert code == 0 and "could not be copied" in output and called(place, "b")["staged"] is None


def test_evaluation_judges_the_run_of_the_file(place):
    script = ROOT / "slurm" / "evaluate.sbatch"
    (place / "x.yaml").write_text("data: 'store:/my faces.lmdb'\nflip_test: false\ndevice: cpu\n")
    code, output = end(start(place, "-r", "verify", "lfw agedb_30", script=script, SLURM_ARRAY_TASK_ID="1"))
    assert code == 2 and "no finished run" in output
    run = place / "runs" / "x-seed1"
    run.mkdir(parents=True)
    (run / "record.json").touch()
    code, output = end(start(place, "-r", "verify", "lfw agedb_30", script=script, SLURM_ARRAY_TASK_ID="1"))
    assert code == 0, output
    call = called(place, "evaluate-x-seed1-lfw-agedb_30")
    assert call["words"][0] == "nbs/evaluate.ipynb"
    assert call["given"] == {"model": str(run), "verify": "lfw agedb_30", "data": "store:/my faces.lmdb", "flip_test": "False",
                             "device": "cpu", "seed": "1", "name": "evaluate-x-seed1-lfw-agedb_30", "runs": str(place / "runs")}


def test_evaluation_judges_any_other_model(place):
    "The set of the file did not train it; names of paths are made fit for a folder"
    script = ROOT / "slurm" / "evaluate.sbatch"
    (place / "x.yaml").write_text("data: 'store:/my faces.lmdb'\n")
    code, output = end(start(place, "-r", "model", "/models/b.onnx", "-p", "centers", "False", "-r", "verify", "'/my sets/a.bin' lfw", script=script))
    assert code == 0, output
    given = called(place, "evaluate-b.onnx-my-sets-a.bin-lfw")["given"]
    assert given["model"] == "/models/b.onnx" and given["centers"] == "False" and "data" not in given
    assert end(start(place, "-r", "model", "/models/b.onnx", "-r", "name", "mine", script=script))[0] == 0
    assert called(place, "mine")["given"]["name"] == "mine"


def test_a_wrong_file_or_folder_is_named(place):
    code, output = end(start(place, script=place / "spool" / "slurm_script", SLURM_SUBMIT_DIR=str(place)))
    assert code == 2 and "in the checkout" in output
    (place / "x.yaml").unlink()
    code, output = end(start(place))
    assert code == 2 and "x.yaml" in output


@pytest.mark.parametrize("text", ["DATA_DIR=/a/b", "DATA_DIR='/a b' # note", 'export DATA_DIR="/a/b"', "DATA_DIR = /a/b # note",
                                  "DATA_DIR=~/faces", "DATA_DIR=faces", "# DATA_DIR=/c", "DATA_DIR=", "DATA_DIR=/a\nDATA_DIR=/b"])
def test_places_are_read_as_python_reads_them(tmp_path, text):
    (tmp_path / ".env").write_text(text + "\n")
    (tmp_path / "slurm").mkdir()
    shutil.copy(ROOT / "slurm" / "environment.sh", tmp_path / "slurm")
    said = subprocess.run(["bash", "-c", ". slurm/environment.sh; echo $DATA_DIR"], cwd=tmp_path, text=True, capture_output=True,
                          env={"PATH": "/usr/bin:/bin", "HOME": "/somewhere/me"}, check=True).stdout.strip()
    value = dotenv_values(tmp_path / ".env").get("DATA_DIR") or "data"
    assert said == os.path.normpath(tmp_path / value.replace("~", "/somewhere/me"))


@pytest.mark.parametrize("modules, code, loaded", [("", 0, "StdEnv/2023 python/3.11"), ("a b", 0, "a b"), ("none", 0, ""), ("missing", 2, "missing")])
def test_modules_are_loaded_where_there_are_any(tmp_path, modules, code, loaded):
    script = 'module() { echo "${@:2}"; [ "$2" != missing ]; }; . slurm/environment.sh'
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, text=True, capture_output=True,
                          env={"PATH": "/usr/bin:/bin", "HOME": "/", "FACENB_MODULES": modules})
    assert (done.returncode, done.stdout.strip()) == (code, loaded)
    assert ("FACENB_MODULES" in done.stderr) == bool(code)


def test_setup_builds_with_a_python_outside_the_environment(tmp_path):
    (tmp_path / "slurm").mkdir()
    for name in ("setup.sh", "environment.sh"):
        shutil.copy(ROOT / "slurm" / name, tmp_path / "slurm")
    inside, outside = tmp_path / ".venv" / "bin", tmp_path / "bin"
    for folder in (inside, outside):  # an environment of before is there
        folder.mkdir(parents=True)
        for name in ("python", "python3.11", "make", "facenb"):
            (folder / name).write_text('#!/bin/sh\necho "$0 $*"\n')
            (folder / name).chmod(0o755)
    (inside / "make").unlink()
    command = ["bash", str(tmp_path / "slurm" / "setup.sh")]
    environment = {"PATH": f"{outside}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=True)
    assert done.stdout.splitlines()[0] == f"{outside}/make .venv/.ready PYTHON={outside}/python3.11"
    assert "SBATCH_ACCOUNT" in done.stdout
    (inside / "facenb").write_text("#!/bin/sh\nexit 1\n")
    done = subprocess.run(command, env=environment, text=True, capture_output=True)
    assert done.returncode == 1 and "does not start" in done.stderr


def test_make_never_empties_an_environment_behind_a_link(tmp_path):
    for name in ("Makefile", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").touch()
    (tmp_path / ".venv").symlink_to(tmp_path / "other")
    done = subprocess.run(["make", ".venv/.ready"], cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode and "is a link" in done.stdout and (tmp_path / "other" / "precious").exists()
