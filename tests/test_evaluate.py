"""The evaluation notebook as a user runs it: any kind of model on any kind of set."""
import ast
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from conftest import ROOT, evaluate, train
from facenb.evaluate import EVALUATE
from facenb.load import load_backbone
from facenb.onnx_models import export_onnx
from facenb.runs import file_hash, read_record
from facenb.store import FaceStore, write_store
from facenb.demo import demo_store
from facenb.embed import unit_rows
from facenb.verify import metrics, verify


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    "A short run of ArcFace"
    folder = tmp_path_factory.mktemp("trained")
    done = train(folder, "-p", "loss", "arcface")
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "demo-arcface-seed0"


@pytest.fixture(scope="module")
def judged(trained, tmp_path_factory) -> Path:
    "That run evaluated, against its own stored embeddings"
    folder = tmp_path_factory.mktemp("judged")
    done = evaluate(folder, "-r", "model", str(trained), "-r", "compare", str(trained / "embeddings.safetensors"))
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "runs" / "evaluate-demo-arcface-seed0-demo"


def test_parameters_cell_agrees_with_what_is_checked():
    cells = json.loads((ROOT / "nbs" / "evaluate.ipynb").read_text())["cells"]
    cell, = [cell for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
    given = {}
    for line in filter(None, "".join(cell["source"]).splitlines()):
        name, value, comment = re.fullmatch(r"(\w+) = (.+?)  # (.+)", line).groups()
        given[name] = EVALUATE[name].check(name, ast.literal_eval(value))
        assert all(choice in comment for choice in EVALUATE[name].choices), name
    assert list(given) == list(EVALUATE)


def test_evaluation_gives_the_numbers_of_the_run(trained, judged):
    run, record = read_record(trained / "record.json"), read_record(judged / "record.json")
    for name, value in record["metrics"].items():
        key = name.removeprefix("demo_")
        if key in ("accuracy_best", "accuracy_at_far", "eer", "auc", "tar_at_far_0.01", "tar_at_far_0.001"):
            assert value == pytest.approx(run["metrics"][key], abs=1e-12), name
            assert record["metrics"][f"{name}_low"] <= value <= record["metrics"][f"{name}_high"]
    assert record["parameters"].items() >= {"loss": "arcface", "data": "demo", "seed": 0, "verify": "demo", "backbone": "small"}.items()
    assert record["counts"]["images_embedded"] == 100 and record["counts"]["images_in_pairs"] == 9900
    assert set(record["units"]) == set(record["metrics"]) and "demo_uniformity_people" in record["metrics"]


def test_stored_embeddings_of_the_run_make_no_difference(judged):
    numbers = read_record(judged / "record.json")["metrics"]
    gaps = {name: value for name, value in numbers.items() if re.fullmatch(r"demo_minus_(accuracy|eer|auc|tar).*", name)}
    assert len(gaps) >= 15 and max(map(abs, gaps.values())) < 1e-6


def test_classifier_and_centroids_are_both_asked(judged):
    record = read_record(judged / "record.json")
    assert record["metrics"]["demo_head_centers"] == record["metrics"]["demo_centroid_centers"] == 30
    assert record["counts"]["center_images"] == 300
    assert 0 <= record["metrics"]["demo_head_same_center"] <= 1


def test_scores_and_report_are_whole(judged):
    record, scores = read_record(judged / "record.json"), pd.read_csv(judged / "scores.csv")
    result = verify(scores.similarity, scores.same.astype(bool), scores.fold)
    assert len(scores) == 4950 and metrics(result)["eer"] == pytest.approx(record["metrics"]["demo_eer"])
    page = (judged / "report.html").read_text()
    assert "demo-arcface-seed0 on demo" in page and page.count("data:image/png;base64,") >= 5 and "src=\"http" not in page
    assert f"{record['metrics']['demo_eer']:.4g}" in page and "0 people of demo, by name or file, are in it" in page
    assert record["parameters"]["weights_sha256"] in page and "flip_test" in page and str(judged.parent) not in page
    folds = pd.read_csv(judged / "folds_demo.csv")
    assert folds[folds.protocol == "best"].accuracy.mean() == pytest.approx(record["metrics"]["demo_accuracy_best"])
    for name, facts in record["files"].items():
        assert file_hash(judged / name) == facts["sha256"], name
    text = (judged / "record.json").read_text()
    assert str(ROOT) not in text and str(judged) not in text


def test_onnx_on_a_verification_file(trained, tmp_path):
    if not (data := os.environ.get("FACENB_DATA")):
        pytest.skip("FACENB_DATA is not set: it names the folder with bins/")
    pytest.importorskip("onnxruntime")
    binary = sorted(Path(data, "bins").glob("*.bin"))[0]
    export_onnx(load_backbone(trained), tmp_path / "small.onnx")
    done = evaluate(tmp_path, "-r", "model", str(tmp_path / "small.onnx"), "-r", "verify", f"'{binary}'")
    assert done.returncode == 0, done.stderr[-3000:]
    record = read_record(tmp_path / "runs" / f"evaluate-small-{binary.stem}" / "record.json")
    name = binary.stem
    assert record["counts"][f"{name}_pairs_same"] + record["counts"][f"{name}_pairs_different"] == 400
    page = next((tmp_path / "runs").glob("*/report.html")).read_text()
    assert "guessed from same pairs" in page and "not checked" in page and f"{name}_head_centers" not in record["metrics"]


def test_embeddings_on_held_out_people_of_a_store(tmp_path):
    demo = demo_store(tmp_path / "demo.lmdb")
    images = [(encoded, int(label)) for encoded, label in zip(demo.read(range(400)), demo.labels)]
    store = FaceStore(write_store(tmp_path / "own.lmdb", images, [f"p{i}" for i in range(40)], {}))
    people = np.random.default_rng(0).normal(size=(40, 32))
    rows = unit_rows(people[store.labels] + np.random.default_rng(1).normal(size=(400, 32)) * 0.5).astype(np.float32)
    np.savez(tmp_path / "mine.npz", embeddings=rows)
    done = evaluate(tmp_path, "-r", "model", str(tmp_path / "mine.npz"), "-r", "verify", f"store:{tmp_path}/own.lmdb", "-r", "name", "x")
    assert done.returncode == 0, done.stderr[-3000:]
    record = read_record(tmp_path / "runs" / "x" / "record.json")
    assert record["metrics"]["held_out_auc"] > 0.99 and record["parameters"]["backbone"] == "file"


def test_people_who_trained_are_named_in_every_set(trained, tmp_path):
    "A store with pairs of training people, given by its path; and a run whose own store is not told"
    from facenb.pairs import all_pairs, pair_arrays
    demo = demo_store(tmp_path / "demo.lmdb")
    chosen = np.flatnonzero(np.isin(demo.labels, [0, 1, 2, 33]))
    labels = np.unique(demo.labels[chosen], return_inverse=True)[1]
    names = [f"Person {letter}{letter}" for letter in "ABCD"]
    pairs = all_pairs(labels, np.arange(len(chosen)), "leak")
    images = list(zip(demo.read(chosen), labels.tolist()))
    write_store(tmp_path / "leak.lmdb", images, names, {}, extras=pair_arrays(pairs))
    many = np.flatnonzero(demo.labels < 12)  # the first three of the four train, or are held out
    write_store(tmp_path / "mine.lmdb", list(zip(demo.read(many), demo.labels[many].tolist())), [f"Person {letter}{letter}" for letter in "ABCEFGHIJKLM"], {})
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    record = json.loads((run / "record.json").read_text())
    record["parameters"]["data"] = "store:mine.lmdb"
    (run / "record.json").write_text(json.dumps(record))
    done = evaluate(tmp_path, "-r", "model", str(run), "-r", "verify", f"{tmp_path}/leak.lmdb", "-r", "name", "moved")
    assert done.returncode == 0, done.stderr[-2000:]
    page = (tmp_path / "runs" / "moved" / "report.html").read_text()
    assert "leak: not checked for people who trained" in page and "store:mine.lmdb" in page and str(tmp_path) not in page
    done = evaluate(tmp_path, "-r", "model", str(run), "-r", "data", f"store:{tmp_path}/mine.lmdb", "-r", "verify", f"{tmp_path}/leak.lmdb",
                    "-r", "name", "seen", "-p", "centers", "False")
    assert done.returncode == 0, done.stderr[-2000:]
    page = (tmp_path / "runs" / "seen" / "report.html").read_text()
    assert re.search("leak: [1-3] people of store:mine.lmdb", page) and "flatter" in page and str(tmp_path) not in page


@pytest.mark.parametrize("arguments, message", [
    (["-r", "model", "/none/such.pth"], "nothing at"),
    (["-p", "verify", "agedb_30"], "prepare bin --source agedb_30.bin"),
    (["-r", "compare", "/none/such.pth"], "nothing at"),
    (["-p", "level", "2.0"], "level=2.0 must lie in"),
    (["-p", "metric", "eer"], "unknown parameter metric"),
    (["-p", "data", "imagenet"], "data='imagenet' must match")])
def test_what_cannot_be_evaluated_is_said(tmp_path, arguments, message):
    done = evaluate(tmp_path, *arguments)
    assert done.returncode != 0 and message in done.stderr, done.stderr[-2000:]
