"""Every parameter file whose network needs no download takes two steps here, few faces a step; TensorBoard's event files."""
import math

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from conftest import ROOT
from facenb.objects import write_objects
from facenb.params import read_train
from facenb.submit import notebook_defaults
from facenb.train import Experiment, open_experiment, train

FILES = [path for path in sorted((ROOT / "slurm").glob("*.yaml"))
         if not path.stem.startswith(("clip", "dinov2", "ijepa", "nearid"))]  # which begin with weights that are downloaded
TUPLES = sorted((ROOT / "slurm").glob("nearid*.yaml"))
HERE = {"data": "demo", "device": "cpu", "processes": 1, "workers": 0, "steps": 2, "threads": 1, "checkpoint": 10.0}


def experiment(values: dict) -> Experiment:
    return open_experiment(*read_train(notebook_defaults() | values))


def run(of: Experiment, folder):
    return train(of, folder, {}, of.accelerator(logs=folder if of.p.tensorboard else None))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_two_steps_of_every_experiment(path, tmp_path, monkeypatch):
    "Batches of 6 pairs or 3, chunks of as many faces; 112 pixels, except where files differ from infonce in sizes alone"
    values = yaml.safe_load(path.read_text())
    if path.stem == "demo_nearid":
        two_steps_of_tuples(values, tmp_path, monkeypatch)
        return
    pairs = 6 if values.get("chunk") else 3
    here = HERE | {"pairs": pairs}
    if "_b" in path.stem:
        here["image_size"] = 32
    if values.get("chunk"):  # as many chunks as with the real sizes, if there are not more than faces
        chunks = math.ceil(2 * values["pairs"] / values["processes"] / values["chunk"])
        here["chunk"] = max(2, 2 * pairs // chunks)
    of = experiment(values | here)
    done = run(of, tmp_path / "run")
    assert done.state == "done" and done.journal.step == 2 and done.history.loss.map(math.isfinite).all()
    was = dict(of.network().named_parameters())
    still = [name for name, now in done.network.named_parameters() if now.requires_grad and torch.equal(now, was[name])]
    assert still == [] and of.p.precision == values.get("precision", "fp32")


def two_steps_of_tuples(values: dict, tmp_path, monkeypatch):
    "On a few synthetic objects, by a head on the small network"
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    sources = values["sources"].split() if values.get("sources") not in (None, "", "recipe") else ["flux", "flux_1024", "qwen", "qwen_1328"]
    sources = ["flux", "sdxl", "qwen", "powerpaint"] if values.get("sources") == "recipe" else sources
    write_objects(tmp_path / "nearid", train=12, val=2, test=2, size=16, sources=tuple(sources), mtg=(8, 2))
    write_objects(tmp_path / "nearid_demo", train=12, val=2, test=2, size=16, mtg=(8, 2))
    here = {"backbone": "siglip2_tiny", "image_size": 64, "embedding_dim": 128, "pairs": 6, "steps": 2, "device": "cpu",
            "processes": 1, "workers": 0, "threads": 1}
    of = experiment(values | here)
    done = run(of, tmp_path / "run")
    assert done.state == "done" and done.journal.step == 2 and done.history.loss.map(math.isfinite).all()
    was = dict(of.network().named_parameters())
    learned = {name for name, now in done.network.named_parameters() if not torch.equal(now, was[name])}
    assert learned and all(name.startswith("vision.head.") for name in learned)
    assert {name for name, now in done.network.named_parameters() if now.requires_grad} - learned <= {"vision.head.attention.in_proj_bias"}
    return of


@pytest.mark.parametrize("path", TUPLES, ids=lambda path: path.stem)
def test_two_steps_of_every_table_of_nearid(path, tmp_path, monkeypatch):
    values = yaml.safe_load(path.read_text())
    of = two_steps_of_tuples(values, tmp_path, monkeypatch)
    repeats = [times for _, times in of.data.parts]
    assert repeats == ([] if values["data"] == "mtg" else [1]) + [values["mtg_repeats"]] * (values["mtg_repeats"] > 0)
    assert of.p.precision == "bf16" and of.p.masking == "0.5 0.2 0.6"


def test_tensorboard_has_every_epoch_and_survives_a_stop(tmp_path):
    values = HERE | {"image_size": 24, "embedding_dim": 16, "epochs": 3, "steps": 0, "evaluate_every": 1, "tensorboard": True,
                     "checkpoint": 0.0}
    whole, stopped = run(experiment(values | {"tensorboard": False}), tmp_path / "whole"), tmp_path / "run"
    of = experiment(values)
    for _ in range(7):  # in the second epoch
        stopped.mkdir(exist_ok=True)
        (stopped / "stop").touch()
        assert run(of, stopped).state == "stopped"
    (stopped / "stop").unlink()
    done = run(of, stopped)
    assert done.state == "done" and done.history.equals(whole.history) and done.evaluations.equals(whole.evaluations)
    assert all(torch.equal(a, b) for a, b in zip(done.network.parameters(), whole.network.parameters(), strict=True))
    folder = next(stopped.rglob("events.out.tfevents.*")).parent
    events = EventAccumulator(str(folder))
    events.Reload()
    rows = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert [step for step, _ in rows["loss"]] == done.history.step.tolist()
    for (_, logged), real in zip(rows["loss"], done.history.loss, strict=True):
        assert logged == pytest.approx(real, rel=1e-6)
    assert {"lr", "negatives", "images_per_second", "demo/eer"} <= rows.keys() and len(rows["demo/eer"]) == 3
    assert not list((tmp_path / "whole").rglob("events.out.tfevents.*"))
