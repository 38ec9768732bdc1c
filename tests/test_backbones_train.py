"""Backbones through the training notebook: other networks, other starts, other parts that learn."""
import json
import re

import nbformat
import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import ROOT, train
from facenb.demo import demo_split, demo_store
from facenb.embed import embed
from facenb.faces import FaceDataset
from facenb.load import load_backbone
from facenb.runs import file_hash
from facenb.zoo import build_backbone


def only_run(folder):
    records = list((folder / "runs").rglob("record.json"))
    assert len(records) == 1
    return records[0].parent, json.loads(records[0].read_text())


def finished(folder, *arguments):
    done = train(folder, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return *only_run(folder), (folder / "out.ipynb").read_text()


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("small"), "-p", "loss", "infonce")


def stored_and_again(run, folder, image_size, flip):
    "Embeddings in the run folder, and those of its backbone when it is loaded anew"
    store = demo_store(folder / "demo.lmdb")
    pixels = FaceDataset(store, image_size, demo_split(store)[1].images).all_pixels()
    return load_file(run / "embeddings.safetensors")["embeddings"], torch.from_numpy(embed(load_backbone(run), pixels, flip))


@pytest.mark.parametrize("more", [
    ["-p", "backbone", "iresnet18", "-p", "loss", "arcface", "-p", "image_size", "32"],
    ["-p", "backbone", "mobilefacenet", "-p", "image_size", "32", "-p", "checkpointing", "True", "-p", "channels_last", "True"],
    ["-p", "backbone", "timm:test_vit", "-p", "train", "lora", "-p", "pairs", "10", "-p", "flip_test", "False"],
    ["-p", "train", "frozen", "-p", "flip_test", "False"],
], ids=["iresnet18-arcface", "mobilefacenet-checkpointed", "timm-lora", "frozen"])
def test_a_run_and_its_backbone_again(tmp_path, more):
    run, record, said = finished(tmp_path, *more)
    given = dict(zip(more[1::3], more[2::3]))
    assert {key: str(record["parameters"][key]) for key in given} == given
    trained, whole = record["counts"]["network_parameters_trained"], record["counts"]["network_parameters"]
    assert f"{trained:,} of {whole:,}" in said
    mode = given.get("train", "scratch")
    assert (trained == 0) == (mode == "frozen") and (trained < whole) == (mode != "scratch" or "iresnet" in given.get("backbone", "")), said
    assert ("training_loss" in record["metrics"]) == (mode != "frozen")
    stored, again = stored_and_again(run, tmp_path, record["parameters"]["image_size"], record["parameters"]["flip_test"])
    assert stored.shape[1] == record["parameters"]["embedding_dim"]
    assert (stored - again).abs().max() < 1e-5


def test_only_the_head_moves(tmp_path):
    run, record, _ = finished(tmp_path, "-p", "train", "head")
    torch.manual_seed(0)
    before, after = build_backbone("small", 24, 16), load_backbone(run)
    first, last = before.state_dict(), after.state_dict()
    moved = {name.split(".")[0] for name in first if not torch.equal(first[name], last[name])}
    assert moved == set(before.head)


def test_a_trained_network_is_a_start(tmp_path, small_run):
    "Fine-tuning a released model on other people: the weights are a file, the record says which"
    source = small_run[0] / "backbone.safetensors"
    run, record, _ = finished(tmp_path, "-r", "weights", str(source), "-p", "train", "frozen")
    assert record["parameters"]["weights"] == f"backbone.safetensors@{file_hash(source)[:12]}"
    assert record["metrics"]["eer"] == small_run[1]["metrics"]["eer"]
    assert record["metrics"] | {"training_loss": 0} == small_run[1]["metrics"] | {"training_loss": 0}
    assert str(tmp_path) not in (run / "record.json").read_text()


def test_switches_of_efficiency_leave_the_result(tmp_path, small_run):
    run, record, _ = finished(tmp_path, "-p", "channels_last", "True", "-p", "checkpointing", "True")
    assert record["parameters"]["channels_last"] is record["parameters"]["checkpointing"] is True
    first, second = (load_file(folder / "backbone.safetensors") for folder in (small_run[0], run))
    assert first.keys() == second.keys()
    assert all(torch.allclose(first[name].double(), second[name].double(), atol=1e-3) for name in first)


@pytest.mark.parametrize("arguments, message", [
    (["-p", "backbone", "iresnet5"], "did you mean iresnet50?"),
    (["-p", "backbone", "clip_vit_b32"], "facenb prepare weights clip_vit_b32"),
    (["-p", "train", "lora"], "small has no such layers"),
])
def test_wrong_choices_stop_the_run(tmp_path, arguments, message):
    done = train(tmp_path, *arguments)
    assert done.returncode != 0 and message in done.stderr
    assert not list(tmp_path.rglob("record.json"))


@pytest.mark.parametrize("choice, message", [
    ({"backbone": "timm:vit_tinny_patch16_224"}, "vit_tiny_patch16_224"),
    ({"train": "Lora"}, "choose one of scratch, frozen, lora, head"),
    ({"lora_rank": 0}, "lora_rank=0 must lie in 1..4096"),
    ({"lora_alpha": "big"}, "lora_alpha must be a number"),
    ({"compile": "true"}, "compile must be True or False"),
    ({"image_size": 4}, "image_size=4 must lie in 8..1024"),
])
def test_wrong_choices_are_named(choice, message):
    from facenb.params import ParameterError, read_train
    with pytest.raises(ParameterError, match=re.escape(message)):
        read_train(cell_of_train() | choice)


def cell_of_train():
    "The parameters of the notebook with their defaults"
    notebook = nbformat.read(ROOT / "nbs" / "train.ipynb", as_version=4)
    source = next(cell.source for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    values = {}
    exec(source, values)
    return {name: value for name, value in values.items() if not name.startswith("__")}


@pytest.mark.parametrize("choice, message", [
    ({"name": "timm:vit_base_patch32_clip_224.openai", "weights": "pretrained"}, "quickgelu"),
    ({"name": "small", "weights": "nowhere.pth"}, "nowhere.pth"),
    ({"name": "small", "weights": "pretrained"}, "no published weights"),
    ({"name": "dinov2_vit_b14", "weights": "random", "train": "head", "config": None}, "choose embedding_dim"),
])
def test_impossible_starts_are_named(choice, message):
    choice = {key: value for key, value in choice.items() if value is not None}
    with torch.device("meta"), pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        build_backbone(**choice)


def test_weights_of_another_network_are_refused_by_name(tmp_path):
    save_file({"weight": torch.zeros(85742, 512)}, tmp_path / "head.safetensors")
    done = train(tmp_path, "-r", "weights", str(tmp_path / "head.safetensors"))
    assert done.returncode != 0 and "head.safetensors" in done.stderr and "classifier" in done.stderr
