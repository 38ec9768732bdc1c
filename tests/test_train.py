"""The training notebook as a user runs it: through papermill, in a process of its own."""
import json
import os
import subprocess
import sys

import nbformat
import numpy as np
import pandas as pd
import pytest
import torch

from conftest import ROOT, SHORT, papermill, train
from facenb.zoo import build_backbone
from facenb.loop import fit
from facenb.optimise import Recipe
from facenb.processes import make_accelerator
from facenb.registry import LOSSES, build_loss, loss_settings
from facenb.runs import file_hash, load_runs
from facenb.sampler import PairSampler


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "One short run with everything it leaves"
    folder = tmp_path_factory.mktemp("train")
    done = train(folder, "-p", "loss", "infonce", fresh=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_leaves_a_record_with_everything(run):
    folder = run / "runs" / "demo-infonce-seed0"
    record = json.loads((folder / "record.json").read_text())
    assert record["parameters"]["loss"] == "infonce" and record["parameters"]["epochs"] == 1
    assert record["counts"]["training_people"] == 30 and record["counts"]["pairs_different"] == 4500
    assert record["counts"]["negatives_per_anchor"] == 58
    assert set(record["units"]) == set(record["metrics"]) and "tar_at_far_0.001" in record["metrics"]
    assert record["metrics"]["pixels_auc"] > 0.8 and record["metrics"]["pca_auc"] > 0.8
    assert record["git"].keys() == {"commit", "dirty"} and record["packages"]["torch"]
    assert record["parameters"]["device"] in ("cpu", "cuda")
    assert set(record["seconds"]) == {"data", "train", "evaluate", "total"}
    assert {"backbone.safetensors", "embeddings.safetensors", "verification.txt", "roc.png", "errors.png"} <= set(record["files"])
    for name, facts in record["files"].items():
        assert file_hash(folder / name) == facts["sha256"]
    text = (folder / "record.json").read_text()
    assert str(ROOT) not in text and str(run) not in text and os.uname().nodename not in json.dumps(record["host"])


def test_weights_and_embeddings_load(run):
    import torch
    from safetensors.torch import load_file
    from facenb.zoo import build_backbone
    folder = run / "runs" / "demo-infonce-seed0"
    build_backbone("small", 24, 16).load_state_dict(load_file(folder / "backbone.safetensors"))
    embeddings = load_file(folder / "embeddings.safetensors")["embeddings"]
    assert embeddings.shape == (100, 16)
    assert torch.allclose(embeddings.norm(dim=1), torch.ones(100), atol=1e-5)


def test_executed_notebook_is_small_and_shows_pictures(run):
    notebook = nbformat.read(run / "out.ipynb", as_version=4)
    assert (run / "out.ipynb").stat().st_size < 500_000
    pictures = [out for cell in notebook.cells for out in cell.get("outputs", []) if "image/png" in out.get("data", {})]
    assert len(pictures) == 4


def weights(folder):
    record = json.loads(next((folder / "runs").rglob("record.json")).read_text())
    return record["files"]["backbone.safetensors"]["sha256"]


def test_same_command_same_weights_other_seed_others(run, tmp_path):
    "In interpreters of their own; every loss does the same within one process, see below"
    for name, seed, fresh in [("again", 0, True), ("other", 1, False)]:
        done = train(tmp_path / name, "-p", "seed", str(seed), fresh=fresh)
        assert done.returncode == 0, done.stderr
    assert weights(run) == weights(tmp_path / "again") != weights(tmp_path / "other")


@pytest.mark.parametrize("arguments, message", [
    (["-p", "batchsize", "512"], "unknown parameter batchsize"),
    (["-p", "learning_rate", "0.1"], "possible: loss, data, verify, failures, sources, mtg_repeats, masking, backbone"),
    (["-p", "lr", "abc"], "lr must be a number, got 'abc'"),
    (["-p", "epochs", "1.5"], "epochs must be a whole number, got 1.5"),
    (["-p", "loss", "tripplet"], "choose one of coreface, hybrid"),
    (["-p", "loss", "infonce+arcface"], "must join a margin loss"),
    (["-p", "loss", "arcface", "-p", "temperature", "0.1"], "arcface has no temperature; its settings: scale, margin"),
    (["-p", "loss", "triplet", "-p", "mining", "hardest"], "semi-hard"),
    (["-p", "loss", "arcface", "-p", "easy_margin", "true"], "easy_margin must be True or False"),
    (["-p", "loss", "coreface", "-p", "chunk", "20"], "choose chunk=0"),
    (["-p", "pairs", "31"], "30 people have two images or more"),
    (["-p", "_batch_size", "512"], "unknown parameter _batch_size"),
    (["-p", "loss", "hybrid", "-p", "hybrid_weight", "inf"], "hybrid_weight=inf must lie in"),
    (["-p", "name", "../outside"], "name='../outside' must match"),
    (["-p", "precision", "fp16", "-p", "device", "cpu"], "precision=fp16 needs a GPU"),
])
def test_wrong_parameters_stop_the_run(tmp_path, arguments, message):
    done = train(tmp_path, *arguments)
    assert done.returncode != 0 and message in done.stderr
    assert not list(tmp_path.rglob("record.json"))


@pytest.fixture(scope="module")
def demo_faces(tmp_path_factory):
    from facenb.demo import demo_split, demo_store
    from facenb.faces import FaceDataset
    store = demo_store(tmp_path_factory.mktemp("demo") / "demo.lmdb")
    return FaceDataset(store, 24, demo_split(store)[0], keep=True)


@pytest.mark.parametrize("loss", [*LOSSES, "cosface+supcon", "adaface+triplet"])
def test_every_loss_trains_on_the_demo_and_the_same_way_twice(demo_faces, loss):
    def run():
        accelerator = make_accelerator(0, "cpu", threads=1)
        network = build_backbone("small", 24, 32)
        criterion = build_loss(loss, len(demo_faces.people), 32, **loss_settings(loss, demo=True))
        history = fit(network, criterion, demo_faces, PairSampler(demo_faces.labels, 30, 0), Recipe(3, 0.02), accelerator)
        return history, torch.cat([p.detach().flatten() for p in (*network.parameters(), *criterion.parameters())])
    history, weights = run()
    assert np.isfinite(history.loss).all() and weights.isfinite().all()
    assert torch.equal(run()[1], weights)
    if loss != "triplet":  # the mean over those still wrong does not fall when the easy ones drop out
        assert history.loss.iloc[-1] < history.loss.iloc[0]
    assert ("negatives" in history) == (LOSSES[loss].family != "margin" if loss in LOSSES else True)


@pytest.mark.parametrize("loss, more", [
    ("coreface", ["-p", "dropout", "0.2"]),
    ("cosface+triplet", ["-p", "margin", "0.1", "-p", "contrastive_margin", "0.3", "-p", "mining", "batch-hard"]),
    ("infonce", ["-p", "learn_temperature", "True", "-p", "chunk", "20"]),
])
def test_settings_of_a_loss_reach_it_and_its_record(tmp_path, loss, more):
    done = train(tmp_path, "-p", "loss", loss, *more)
    assert done.returncode == 0, done.stderr
    row = load_runs(tmp_path / "runs").iloc[0]
    given = dict(zip(more[1::3], more[2::3]))
    assert {key: str(row[key]) for key in given} == given
    assert row.negatives_per_anchor > 50 if "triplet" not in loss else row.negatives_per_anchor > 0
    assert set(loss_settings(loss)) <= set(row.index)
    history = pd.read_csv(tmp_path / "runs" / row.folder / "history.csv")
    assert {"epoch", "loss", "lr", "negatives"} <= set(history.columns)


def test_taken_name_is_refused_and_kept(run):
    before = (run / "runs" / "demo-infonce-seed0" / "record.json").read_bytes()
    done = train(run, "-p", "lr", "0.5")
    assert done.returncode != 0 and "lr: was 0.02, now 0.5" in done.stderr and "-p name NAME" in done.stderr
    assert (run / "runs" / "demo-infonce-seed0" / "record.json").read_bytes() == before


def test_without_output_path_papermill_prints_the_notebook(tmp_path):
    done = subprocess.run([sys.executable, "-m", "papermill", "nbs/train.ipynb", "-p", "loss", "infonce", *SHORT,
                           "-r", "runs", str(tmp_path)], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["nbformat"] == 4
    assert load_runs(tmp_path).loss.tolist() == ["infonce"]


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    "The demo faces as a folder, with a note in it, and as a record file with one damaged image"
    from facenb.demo import demo_store
    from facenb.records import write_records
    folder = tmp_path_factory.mktemp("people")
    store = demo_store(folder / "demo.lmdb")
    for number, (image, label) in enumerate(store[i] for i in range(len(store))):
        place = folder / "set" / f"p{label}" / f"{number}.pgm"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(image)
    (folder / "set" / "p3" / "note.txt").write_text("not a face")
    images = [as_jpeg(store[i][0]) for i in range(len(store))]
    write_records(folder / "rec", images, store.labels)
    write_records(folder / "damaged", [*images[:7], b"\xff\xd8 no image", *images[8:]], store.labels)
    return folder


def as_jpeg(image: bytes) -> bytes:
    import io
    from PIL import Image
    file = io.BytesIO()
    Image.open(io.BytesIO(image)).save(file, "JPEG")
    return file.getvalue()


@pytest.mark.parametrize("kind, extra, counts", [
    ("folder:{}/set", [], {"training_people": 36, "files_skipped": 1, "images_failed": 0}),
    ("rec:{}/rec", ["-p", "workers", "2"], {"training_people": 36, "training_images": 360}),
    ("rec:{}/damaged", ["-p", "failures", "count"], {"images_failed": 1}),
    ("store:{}/demo.lmdb", ["-p", "loss", "arcface"], {"training_people": 36, "overlap_checked": 1}),
])
def test_trains_on_any_source(people, tmp_path, kind, extra, counts):
    done = train(tmp_path, "-r", "data", kind.format(people), "-p", "pairs", "12", *extra)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads(next((tmp_path / "runs").glob("*/record.json")).read_text())
    assert {name: record["counts"][name] for name in counts} == counts
    assert record["counts"]["pairs_same"] == record["counts"]["pairs_different"] > 0
    assert str(people) not in json.dumps(record) and record["parameters"]["fingerprint"]


def test_other_data_under_the_same_name_is_another_run(people, tmp_path):
    first = train(tmp_path, "-r", "data", f"rec:{people}/rec", "-p", "pairs", "12", "-p", "name", "mine")
    assert first.returncode == 0, first.stderr[-2000:]
    other = train(tmp_path, "-r", "data", f"rec:{people}/damaged", "-p", "pairs", "12", "-p", "name", "mine")
    assert other.returncode != 0 and "damaged" not in [path.name for path in (tmp_path / "runs").iterdir()]


def test_trains_on_cfp_and_leaves_lfw_people_out(tmp_path):
    data = os.environ.get("FACENB_DATA")
    if not data:
        pytest.skip("FACENB_DATA is not set: it names the folder with faces/cfp.zip and faces/lfw.zip")
    for name in ("cfp", "lfw"):
        subprocess.run([sys.executable, "-c", "import sys; from facenb.command import main; sys.exit(main())", "prepare",
                        name, "--source", f"{data}/faces/{name}.zip", "--out", str(tmp_path)], check=True, capture_output=True)
    done = papermill(tmp_path / "out.ipynb", *SHORT, "-p", "data", "cfp", "-p", "verify", "cfp_fp cfp_ff lfw", "-p", "pairs", "100",
                     "-r", "runs", str(tmp_path / "runs"), capture_output=True, text=True, timeout=300,
                     env={**os.environ, "DATA_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "runs" / "cfp-infonce-seed0" / "record.json").read_text())
    counts = record["counts"]
    assert (counts["training_people"], counts["people_left_out"], counts["overlap_checked"]) == (277, 123, 3)
    assert counts["pairs_asked"] == 1400 and counts["folds"] == 2 and "lfw_accuracy_best" in record["metrics"]


def test_every_loss_is_named_where_a_user_reads():
    notebook = nbformat.read(ROOT / "nbs" / "train.ipynb", as_version=4)
    text = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert [name for name in LOSSES if f"`{name}`" not in text] == []
    assert len(LOSSES) == 19 and "nineteen losses" in (ROOT / "README.md").read_text(encoding="utf-8")
