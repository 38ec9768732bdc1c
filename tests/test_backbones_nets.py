"""Face networks and networks of timm: files of weights, training steps, and numbers of other implementations."""
import json
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from facenb.backbones import BACKBONES, SmallFaceNet, multiply_adds
from facenb.benchmarks import pixels_of, read_lfw
from facenb.embed import embed, similarities
from facenb.iresnet import DEPTHS, IResNet
from facenb.mobilefacenet import MobileFaceNet
from facenb.pairs import PairSet
from facenb.timm_models import check_activation, timm_backbone
from facenb.zoo import build_backbone
from facenb.weights import WeightsError, load_weights, read_weights

SIZE, DIM = 20, 8
NETWORKS = {
    "iresnet": partial(IResNet, SIZE, DIM, blocks=(1, 2, 1, 1), widths=(8, 8, 12, 12)),
    "mobilefacenet": partial(MobileFaceNet, SIZE, DIM, blocks=(1, 1, 1, 1), scale=1),
    "timm convolutions": partial(timm_backbone, "test_convnext", 32, DIM),
    "timm transformer": partial(timm_backbone, "test_vit", SIZE, DIM),
    "timm own layer": partial(timm_backbone, "swiftformer_xs", 64, DIM),
}
every_network = pytest.mark.parametrize("make", NETWORKS.values(), ids=[name.replace(" ", "-") for name in NETWORKS])


def batch(net, images: int = 4, seed: int = 0, dtype=torch.float32):
    made = torch.rand(images, 3, net.image_size, net.image_size, generator=torch.Generator().manual_seed(seed))
    return (made * 2 - 1).to(dtype)


def built(make, seed: int = 0, **settings):
    torch.manual_seed(seed)
    return make(**settings)


# --- what every network does

@every_network
@pytest.mark.parametrize("kind", ["safetensors", "pth"])
def test_state_dict_round_trip(make, kind, tmp_path):
    net, path = built(make).eval(), tmp_path / f"net.{kind}"
    net(batch(net))
    save_file(net.state_dict(), path) if kind == "safetensors" else torch.save(net.state_dict(), path)
    again = built(make, seed=1, weights=path).eval()
    assert torch.equal(again(batch(net)), net(batch(net)))
    assert again.origin["file"] == path.name and net.origin is None


@every_network
def test_running_statistics_are_part_of_the_file(make, tmp_path):
    net = built(make).train()
    for seed in range(3):
        net(batch(net, seed=seed))
    torch.save(net.state_dict(), tmp_path / "net.pth")
    assert torch.equal(built(make, seed=1, weights=tmp_path / "net.pth").eval()(batch(net)), net.eval()(batch(net)))


@every_network
@pytest.mark.parametrize("views", [(), (0.4, 0.4)])
def test_gradients_reach_everything_that_learns(make, views):
    net = built(make).train()
    z = net(batch(net), views)
    (z * torch.randn(z.shape, generator=torch.Generator().manual_seed(5))).sum().backward()
    idle = [name for name, p in net.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.abs().sum() > 0)]
    # what stands before a batch normalisation may shift freely; such a gradient is zero but for rounding
    assert not [name for name in idle if not name.endswith(".bias")]
    assert all(torch.isfinite(p.grad).all() for p in net.parameters() if p.grad is not None)


@every_network
def test_a_training_step_is_deterministic(make):
    def step():
        net = built(make).train()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        for seed in range(2):
            optimizer.zero_grad()
            z = F.normalize(net(batch(net, seed=seed), (0.2, 0.2)))
            (z[0] @ z[1] - z[2] @ z[3]).backward()
            optimizer.step()
        return net.state_dict()
    first, second = step(), step()
    assert all(torch.equal(first[name], second[name]) for name in first)
    fresh = built(make).state_dict()
    assert any(not torch.equal(first[name], fresh[name]) for name in first)


@every_network
def test_double_precision_stays_and_agrees(make):
    net = built(make).eval()
    single = net(batch(net))
    double = net.double()(batch(net, dtype=torch.float64))
    assert double.dtype == torch.float64
    assert torch.allclose(single.double(), double, rtol=1e-3, atol=1e-4 * double.abs().max().item())


@every_network
def test_autocast_trains(make):
    net = built(make).train()
    with torch.autocast("cpu", torch.bfloat16):
        z = net(batch(net))
    z.float().square().sum().backward()
    assert torch.isfinite(z).all() and all(p.grad is None or p.grad.dtype == torch.float32 for p in net.parameters())
    with torch.no_grad():
        exact = net.eval()(batch(net))
        with torch.autocast("cpu", torch.bfloat16):
            rounded = net(batch(net)).float()
    assert F.cosine_similarity(exact, rounded).min() > 0.99


@every_network
def test_channels_last_gives_the_same(make):
    net = built(make).eval()
    wanted = net(batch(net))
    found = net.to(memory_format=torch.channels_last)(batch(net).to(memory_format=torch.channels_last))
    assert torch.allclose(found, wanted, atol=1e-4 * wanted.abs().max().item())


@every_network
def test_only_the_head_learns(make):
    net = built(make)
    net.learns = net.head
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net.train()(batch(net))
    changed = {name for name, value in net.state_dict().items() if not torch.equal(value, before[name])}
    assert net.head and all(name.startswith(tuple(f"{part}." for part in net.head)) for name in changed)


@every_network
def test_meta_device(make, tmp_path):
    net = built(make).eval()
    torch.save(net.state_dict(), tmp_path / "net.pth")
    with torch.device("meta"):
        shapes = make()
    assert all(p.is_meta for p in shapes.parameters())
    with sdpa_kernel(SDPBackend.MATH):  # the counter knows no other attention of the CPU
        assert multiply_adds(shapes) == multiply_adds(net)
    load_weights(shapes, tmp_path / "net.pth")
    assert not any(p.is_meta for p in shapes.parameters())
    assert {n: p.requires_grad for n, p in shapes.named_parameters()} == {n: p.requires_grad for n, p in net.named_parameters()}


# --- InsightFace

def made_up(shapes: dict, like=None) -> dict:
    "The weights of golden/README.md"
    state = {}
    for j, key in enumerate(sorted(shapes)):
        w = torch.sin(0.37 * torch.arange(torch.Size(shapes[key]).numel(), dtype=torch.float64) + j).reshape(shapes[key])
        if key.endswith("num_batches_tracked"):
            state[key] = torch.zeros((), dtype=torch.long)
        elif key.endswith("running_var"):
            state[key] = 1 + 0.1 * w.square()
        elif key.endswith(("running_mean", "bias")):
            state[key] = 0.01 * w
        else:
            state[key] = w * (2 * len(w) / w.numel()) ** 0.5 if w.ndim > 1 else 1 + 0.1 * w
    return state


INSIGHTFACE = {"r18": "iresnet18", "r34": "iresnet34", "r50": "iresnet50", "r100": "iresnet100", "mbf": "mobilefacenet"}
# convolutions and linear layers of one 112 x 112 face; r50: 12.62 G flops
WORK = {"r18": 2_609_954_816, "r34": 4_459_642_880, "r50": 6_309_330_944, "r100": 12_089_606_144, "mbf": 437_520_896}


@pytest.mark.parametrize("name", INSIGHTFACE)
def test_names_shapes_and_size_of_insightface(golden, name):
    stored = json.loads((golden / "insightface_backbones.json").read_text())
    with torch.device("meta"):
        net = BACKBONES[INSIGHTFACE[name]].build(image_size=112, embedding_dim=512)
    assert [(key, list(value.shape)) for key, value in net.state_dict().items()] == list(stored["state_dict_shapes"][name].items())
    assert sum(p.numel() for p in net.parameters()) == stored["deterministic_forward"][name]["parameters"]
    assert multiply_adds(net) == WORK[name]


@pytest.mark.parametrize("name", ["r18", "r50", "mbf"])
def test_output_of_insightface(golden, name, tmp_path):
    stored = json.loads((golden / "insightface_backbones.json").read_text())
    wanted = stored["deterministic_forward"][name]
    torch.save(made_up(stored["state_dict_shapes"][name]), tmp_path / "backbone.pth")
    with torch.device("meta"):
        net = BACKBONES[INSIGHTFACE[name]].build(image_size=112, embedding_dim=512).double()
    load_weights(net, tmp_path / "backbone.pth")
    x = torch.sin(0.01 * torch.arange(2 * 3 * 112 * 112, dtype=torch.float64)).reshape(2, 3, 112, 112)
    with torch.no_grad():
        z = net.eval()(x)
    for found, key in [(z.norm(dim=1), "norm"), (z.mean(1), "mean"), (z[:, :8], "first8")]:
        assert torch.allclose(found, torch.tensor(wanted[key], dtype=torch.float64), rtol=0, atol=1e-8), key


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("nest", [lambda s: s, lambda s: {"state_dict_backbone": s, "epoch": 3, "state_optimizer": {"state": {}}},
                                  lambda s: OrderedDict((f"module.{k}", v) for k, v in s.items())], ids=["plain", "checkpoint", "ddp"])
def test_files_as_they_are_found(nest, half, tmp_path):
    make = NETWORKS["iresnet"]
    net = built(make).eval()
    state = {name: value.half() if half and value.is_floating_point() else value for name, value in net.state_dict().items()}
    torch.save(nest(state), tmp_path / "backbone.pth")
    again = built(make, seed=1, weights=tmp_path / "backbone.pth").eval()
    assert torch.allclose(again(batch(net)), net(batch(net)), rtol=1e-2 if half else 0, atol=5e-3 if half else 0)
    assert all(p.dtype == torch.float32 for p in again.parameters())


@pytest.mark.parametrize("net, changed, says", [
    (IResNet, {"image_size": 32}, "another image_size"), (IResNet, {"embedding_dim": 16}, "an embedding_dim"),
    (IResNet, {"widths": (16, 16, 24, 24)}, "another width"), (IResNet, {"blocks": (1, 2, 2, 1)}, "another depth"),
    (MobileFaceNet, {"image_size": 64}, "another image_size"), (MobileFaceNet, {"embedding_dim": 16}, "an embedding_dim"),
    (MobileFaceNet, {"scale": 2}, "another width"), (MobileFaceNet, {"blocks": (1, 2, 1, 1)}, "another depth"),
])
def test_weights_of_another_variant(net, changed, says, tmp_path):
    usual = {"image_size": 48, "embedding_dim": DIM}
    usual |= {"blocks": (1, 2, 1, 1), "widths": (8, 8, 12, 12)} if net is IResNet else {"blocks": (1, 1, 1, 1), "scale": 1}
    torch.save(net(**{**usual, **changed}).state_dict(), tmp_path / "other.pth")
    with pytest.raises(WeightsError, match=f"other.pth is not for this {net.__name__}.*{says}"):
        net(**usual, weights=tmp_path / "other.pth")


def test_iresnet_is_trained_with_fixed_scale():
    net = built(NETWORKS["iresnet"]).train()
    net(batch(net)).square().sum().backward()
    assert net.features.weight.grad is None and torch.equal(net.features.weight, torch.ones(DIM))
    assert [round(c.weight.std().item(), 2) for c in (IResNet(16, 8).layer4[1].conv1, IResNet(16, 8).layer3[0].conv2)] == [0.1, 0.1]


def test_dropout_drops_in_training_only():
    net = built(NETWORKS["iresnet"], dropout=0.5)
    x = batch(net)
    assert not torch.equal(net.train()(x), net(x)) and torch.equal(net.eval()(x), net(x))


@pytest.mark.parametrize("name", ["iresnet18", "mobilefacenet"])
def test_registered_for_the_demo(name):
    entry = BACKBONES[name]
    assert (entry.image_size, entry.embedding_dim, entry.demo["image_size"]) == (112, 512, 56)
    with torch.device("meta"):
        net = entry.build(image_size=56, embedding_dim=128)
    assert net.eval()(torch.zeros(2, 3, 56, 56, device="meta")).shape == (2, 128)


# --- files that are refused

class Trap:
    "A pickle that makes a folder when it is loaded"

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("form", ["pickle", "zip", "legacy", "safetensors", "bin"])
def test_code_in_a_file_is_named_and_not_run(tmp_path, protocol, form):
    content = {"conv1.weight": torch.ones(2), "bias": Trap(tmp_path / "owned")}
    path = tmp_path / f"evil.{form if form in ('safetensors', 'bin') else 'pth'}"
    if form in ("zip", "legacy"):
        torch.save(content, path, _use_new_zipfile_serialization=form == "zip", pickle_protocol=protocol)
    else:
        path.write_bytes(pickle.dumps({"bias": content["bias"]}, protocol))
    with pytest.raises(WeightsError) as raised:
        read_weights(path)
    assert str(path) in str(raised.value)
    if form != "safetensors":
        assert "mkdir, which is no tensor; it was not run" in str(raised.value)
    assert not (tmp_path / "owned").exists()


def test_code_hidden_behind_a_memo(tmp_path):
    "The module's name comes from the memo, where a reader of opcodes does not see it"
    stream = b"\x80\x04\x8c\x05posix\x94\x8c\x05mkdir\x94h\x00h\x01\x93\x8c" + bytes([len(str(tmp_path / "owned"))])
    stream += str(tmp_path / "owned").encode() + b"\x85R."
    (tmp_path / "evil.pth").write_bytes(stream)
    with pytest.raises(WeightsError, match="evil.pth"):
        read_weights(tmp_path / "evil.pth")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("content, says", [
    (b"", "is empty"), (b"\n\n", "is empty"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n", "git lfs pull"),
    (b"<!doctype html><html>", "web page"), (b"\xef\xbb\xbf <HTML>", "web page"), (b"<?xml version='1.0'?><Error/>", "web page"),
    (b"PK\x03\x04 and no more", "damaged or of another kind"), (b"\x89PNG\r\n\x1a\n" * 20, "damaged or of another kind"),
    (b"hello", "damaged or of another kind"), (b"\xff" * 4096, "damaged or of another kind"),
    (b"\x80\x02}q\x00.", "damaged or of another kind"),
])
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_what_is_no_weights(tmp_path, content, says, suffix):
    path = tmp_path / f"file.{suffix}"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=says) as raised:
        read_weights(path)
    assert str(path) in str(raised.value)


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.pth"):
        read_weights(tmp_path / "none.pth")
    with pytest.raises(WeightsError, match="is a folder"):
        read_weights(tmp_path)


@pytest.mark.parametrize("content, says", [
    ([torch.ones(2)], "holds one list"), ({}, "holds no tensors"), ({"model": {}}, "holds no tensors"),
    ({"w": 3}, "'w' is int, not a tensor"), ({"w": torch.tensor(float("inf"))}, "'w' holds NaN or infinity"),
    ({"epoch": 3, "state_optimizer": {}}, "checkpoint of training without a network"),
    ({"model": {"w": torch.ones(1)}, "network": {"w": torch.ones(1)}}, "several networks: model, network"),
    (nn.Linear(2, 2), "torch.nn.modules.linear.Linear"), (nn.Linear(2, 2).half().state_dict, "names "),
])
def test_torch_files_that_hold_something_else(tmp_path, content, says):
    torch.save(content, tmp_path / "file.pth")
    with pytest.raises(WeightsError, match=says):
        read_weights(tmp_path / "file.pth")


def test_every_cut_of_a_file_is_refused(tmp_path):
    save_file({"a": torch.ones(30), "b": torch.ones(7)}, tmp_path / "net.safetensors")
    torch.save({"a": torch.ones(30), "b": torch.ones(7)}, tmp_path / "net.pth")
    for whole in (tmp_path / "net.safetensors", tmp_path / "net.pth"):
        data = whole.read_bytes()
        for length in range(0, len(data), 7):
            cut = tmp_path / f"cut{whole.suffix}"
            cut.write_bytes(data[:length])
            with pytest.raises(WeightsError, match="cut"):
                read_weights(cut)


def test_other_types_of_pickles_of_numpy(tmp_path):
    torch.save({"state_dict": {"w": torch.ones(2)}, "best": np.float64(0.5)}, tmp_path / "best.pth")
    with pytest.raises(WeightsError, match="names numpy.*not run"):
        read_weights(tmp_path / "best.pth")


def test_classifier_beside_and_alone(tmp_path):
    net = built(NETWORKS["iresnet"])
    torch.save({"weight": torch.zeros(85742, DIM)}, tmp_path / "softmax.pth")
    torch.save({**net.state_dict(), "fc7.weight": torch.zeros(85742, DIM)}, tmp_path / "both.pth")
    for name, says in [("softmax", "a classifier instead of a network: weight is of 85742"), ("both", "a classifier beside a network: fc7.weight")]:
        with pytest.raises(WeightsError, match=says):
            load_weights(net, tmp_path / f"{name}.pth")


def test_nothing_is_loaded_when_something_does_not_fit(tmp_path):
    net, other = SmallFaceNet(16, 4), SmallFaceNet(16, 8)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    torch.save(other.state_dict(), tmp_path / "other.pth")
    with pytest.raises(WeightsError):
        load_weights(net, tmp_path / "other.pth")
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_buffers_outside_the_state_dict_are_left_alone(tmp_path):
    net = timm_backbone("test_vit", SIZE, DIM, statistics="timm")
    shift = net.shift.clone()
    save_file(net.network.state_dict(), tmp_path / "net.safetensors")
    again = timm_backbone("test_vit", SIZE, DIM, tmp_path / "net.safetensors", statistics="timm")
    assert torch.equal(again.shift, shift) and "shift" not in again.state_dict()


# --- timm

def quickgelu_twins() -> list[str]:
    return [name for name in timm.list_pretrained("*quickgelu*")]


def test_every_clip_with_quickgelu_is_refused_under_its_gelu_name():
    assert len(quickgelu_twins()) > 10
    for right in quickgelu_twins():
        wrong = right.replace("quickgelu_", "")
        for local in (True, False):
            with pytest.raises(ValueError, match=f"trained with QuickGELU; take timm:{right}$"):
                check_activation(wrong, local)
            check_activation(right, local)


@pytest.mark.parametrize("name", ["vit_base_patch32_clip_224.laion2b", "vit_tiny_patch16_224", "resnet18.a1_in1k",
                                  "vit_base_patch16_siglip_224.webli", "edgenext_xx_small"])
def test_other_names_are_free(name):
    check_activation(name, True), check_activation(name, False)


def test_a_clip_file_without_a_tag_must_say_which(tmp_path):
    with pytest.raises(ValueError, match="say which: timm:vit_base_patch32_clip_224.TAG"):
        timm_backbone("vit_base_patch32_clip_224", weights=tmp_path / "clip.pth")
    check_activation("vit_base_patch32_clip_224", False)  # its default is not OpenAI's


@pytest.mark.parametrize("name, says", [
    ("vit_tiny_patch16_225", "it has vit_tiny_patch16_224"), ("resnet18.nonsense", "published, but"), ("", "has no ''"),
    ("hf-hub:timm/resnet18", "has no"), ("../x", "has no")])
def test_unknown_names(name, says):
    with pytest.raises(ValueError, match=says):
        timm_backbone(name, 32, DIM)


def test_published_weights_without_network(monkeypatch, tmp_path):
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="facenb prepare weights timm:test_vit.r160_in1k"):
        build_backbone("timm:test_vit.r160_in1k", 32, 8, "pretrained")


FAMILIES = ["test_vit", "test_convnext", "test_efficientnet", "test_byobnet", "test_resnet", "resnetv2_18", "mobilenetv3_small_050",
            "levit_128", "efficientvit_m0", "crossvit_9_240", "repvit_m0_9", "edgenext_xx_small", "swiftformer_xs"]


@pytest.mark.parametrize("name", FAMILIES)
def test_two_steps_are_the_whole_network(name):
    torch.manual_seed(0)
    net = timm_backbone(name, 64, DIM).eval()
    for parameter in net.state_dict().values():  # fresh normalisation does nothing, and would hide that it is left out
        if parameter.ndim == 1:
            parameter.add_(0.1 * torch.rand(parameter.shape))
    faces = batch(net, 2)
    sized = faces if net.input_size == (64, 64) else F.interpolate(faces, net.input_size, mode="bicubic", antialias=True)
    with torch.no_grad():
        whole = net.network(sized)
        whole = whole if net.embedding is None else net.embedding(whole)
        assert torch.allclose(net(faces), whole, atol=1e-5 * (1 + whole.abs().max().item()))


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "mobilenetv3_small_050", "levit_128"])
@pytest.mark.parametrize("size", [0, None])
def test_own_features(name, size):
    net = timm_backbone(name, 64, size).eval()
    assert net(batch(net, 2)).shape == (2, net.embedding_dim) and net.head == ()


def test_resize_passes_gradients_to_the_pixels():
    net = timm_backbone("test_vit", 24, DIM).eval()
    faces = batch(net, 1).requires_grad_()
    net(faces).square().sum().backward()
    assert net.input_size != (24, 24) and (faces.grad.abs().amax(1) > 0).all()


def test_edgeface_gives_the_similarities_of_timm_alone(golden):
    data = golden.parent / "data"
    path, bench = data / "models" / "edgeface_xxs.safetensors", read_lfw(data / "faces" / "lfw.zip")
    net, pairs, few = timm_backbone("edgenext_xx_small", 112, 512, path), bench.pairs[0], 60
    images, place = np.unique(np.r_[pairs.a[300 - few // 2:300 + few // 2], pairs.b[300 - few // 2:300 + few // 2]], return_inverse=True)
    names = [bench.names[i] for i in pairs.images[images]]
    pixels = torch.from_numpy(np.stack([pixels_of(bench.crop(name)[0], name) for name in names])).permute(0, 3, 1, 2)
    part = PairSet("lfw", np.arange(len(images)), place[:few], place[few:], np.ones(few, bool), np.zeros(few, int))
    found = similarities(embed(net, pixels, flip=False), part)
    wanted = np.load(golden / "verification.npz")["LFW_xxs_single"][300 - few // 2:300 + few // 2]
    assert np.abs(found - wanted).max() < 1e-3
    alone = timm.create_model("edgenext_xx_small", num_classes=512).eval()
    alone.load_state_dict(load_file(path))
    with torch.no_grad():
        assert torch.equal(net.eval()(batch(net, 2)), alone(batch(net, 2)))
