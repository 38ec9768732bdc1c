"""Switches that make training cheaper, on small networks of every kind: what is learned must not depend on them."""
import copy
import os
import shutil

import pytest
import timm
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import CLIPVisionConfig, CLIPVisionModel, Dinov2Config, Dinov2Model, SiglipVisionConfig, SiglipVisionModel

from facenb.backbones import Backbone, SmallFaceNet
from facenb.cache import cached_backward
from facenb.efficiency import (EfficiencyError, Recomputed, checkpoint_blocks, compile_in_place, make_efficient, repeated_blocks,
                               synchronise_batchnorm, to_channels_last)
from facenb.interface import Loss, unit_norm
from facenb.iresnet import IResNet
from facenb.lora import set_training
from facenb.losses import InfoNCE
from facenb.processes import make_accelerator
from facenb.mobilefacenet import MobileFaceNet

SIZE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8)
FACES = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))
compiler = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler here")


class Net(Backbone):
    "A network of another library with a layer behind it"
    head = new_head = ("last",)

    def __init__(self, network, width, inside="vision"):
        super().__init__(image_size=32, embedding_dim=8)
        self.vision, self.inside = network, inside
        self.last = nn.Sequential(nn.Linear(width, 8), nn.BatchNorm1d(8))

    def extract(self, faces):
        out = self.vision(faces)
        return out if isinstance(out, torch.Tensor) else out.last_hidden_state.mean(1)

    def project(self, features):
        return self.last(features)


NETWORKS = {
    "small": lambda: SmallFaceNet(32, 8),
    "iresnet": lambda: IResNet(32, 8, blocks=(2, 2), widths=(8, 16), dropout=0.4),
    "mobilefacenet": lambda: MobileFaceNet(32, 8),
    "timm:vit": lambda: Net(timm.create_model("vit_tiny_patch16_224", embed_dim=48, depth=2, img_size=32, num_classes=0,
                                              drop_path_rate=0.3, proj_drop_rate=0.1), 48),
    "timm:convnext": lambda: Net(timm.create_model("convnext_atto", depths=(1, 1, 2, 1), dims=(8, 8, 16, 16), num_classes=0,
                                                   drop_path_rate=0.3), 16),
    "timm:resnet": lambda: Net(timm.create_model("resnet10t", num_classes=0), 512),
    "timm:efficientnet": lambda: Net(timm.create_model("efficientnet_lite0", num_classes=0, drop_path_rate=0.2), 1280),
    "clip": lambda: Net(CLIPVisionModel(CLIPVisionConfig(**SIZE, intermediate_size=64, attention_dropout=0.1)), 32),
    "dinov2": lambda: Net(Dinov2Model(Dinov2Config(**SIZE, mlp_ratio=2, drop_path_rate=0.3)), 32),
    "siglip2": lambda: Net(SiglipVisionModel(SiglipVisionConfig(**SIZE, intermediate_size=64, attention_dropout=0.1)), 32),
}
NORMALISED = [name for name in NETWORKS if name not in ("timm:vit", "timm:convnext", "clip", "dinov2", "siglip2")]


def build(name):
    torch.manual_seed(0)
    return NETWORKS[name]()


def outcome(net, faces=FACES, views=(), autocast=False):
    net.zero_grad()
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        z = net(faces, views)
    target = torch.randn(z.shape, generator=torch.Generator().manual_seed(2))
    (z.float() * target).sum().backward() if z.dtype != torch.float64 else (z * target).sum().backward()
    return [z.detach(), *(p.grad for p in net.parameters() if p.grad is not None), *net.buffers(), torch.get_rng_state()]


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


def gap(a, b):
    a, b = (torch.cat([t.double().flatten() for t in result[:-1]]) for result in (a, b))
    return ((a - b).norm() / b.norm()).item()


def no_dropout(net):
    for module in net.modules():
        for name in ("p", "drop_prob", "dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return net


# ---- checkpointing

@pytest.mark.parametrize("options", [{}, {"views": (0.4, 0.2)}, {"autocast": True}], ids=["plain", "views", "bf16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_checkpointing_changes_no_bit(name, options):
    net, cheap = build(name), make_efficient(build(name), checkpointing=True)
    runs = []
    first = next(iter(repeated_blocks(cheap).values()))
    assert len(repeated_blocks(cheap)) > 1 and isinstance(first, Recomputed)
    leaf = next(module for module in first.modules() if next(module.children(), None) is None)
    leaf.register_forward_hook(lambda *_: runs.append(1))
    for _ in range(2):  # a second step starts from statistics that the first one left
        wanted = outcome(net, **options)
        runs.clear()
        assert same(outcome(cheap, **options), wanted)
        assert len(runs) == 2, "the block must have been run again"
    assert list(cheap.state_dict()) == list(net.state_dict())
    assert same([copy.deepcopy(cheap).eval()(FACES)], [net.eval()(FACES)])


@pytest.mark.parametrize("name", ["timm:vit", "clip", "siglip2", "dinov2"])
def test_checkpointing_of_a_frozen_base_with_adapters(name):
    net = set_training(build(name), "lora", 2, 2)
    net.train()
    cheap = make_efficient(copy.deepcopy(net), checkpointing=True).train()
    blocks = repeated_blocks(cheap)
    assert all(type(block).__name__ != "Linear" for block in blocks.values()) and len(blocks) == 2
    assert same(outcome(cheap), outcome(net))
    assert 0 < sum(p.grad is not None for p in cheap.parameters()) < len(list(cheap.parameters()))


def test_the_switch_of_transformers_does_nothing_for_a_base_in_evaluation_mode():
    runs = {}
    for own in (True, False):
        net = set_training(build("clip"), "lora", 2, 2).train()
        if own:
            checkpoint_blocks(net)
        else:
            net.vision._set_gradient_checkpointing()
        runs[own] = []
        first = next(iter(repeated_blocks(net).values()))
        first.layer_norm1.register_forward_hook(lambda *_: runs[own].append(1))
        outcome(net)
    assert (len(runs[True]), len(runs[False])) == (2, 1)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["small", "iresnet", "timm:resnet", "clip"])
@pytest.mark.parametrize("keep", [0, 1, 3])
def test_checkpointing_inside_gradient_caching(name, keep, autocast):
    def step(net):
        loss_of = lambda z: ((unit_norm(z) @ unit_norm(z).T).square().sum(), {})
        def embed(chunk):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return net(chunk, (0.4,))
        torch.manual_seed(1)
        loss, _ = cached_backward(net, FACES.split(2), loss_of, keep=keep, embed=embed)
        return [loss, *(p.grad for p in net.parameters() if p.grad is not None), *net.buffers(), torch.get_rng_state()]
    net = build(name)
    assert same(step(make_efficient(copy.deepcopy(net), checkpointing=True)), step(net))


def test_statistics_count_each_batch_once_also_when_the_graph_is_used_twice():
    net = make_efficient(build("iresnet"), checkpointing=True)
    z = net(FACES)
    z.sum().backward(retain_graph=True), z.square().sum().backward()
    assert {int(m.num_batches_tracked) for m in net.modules() if isinstance(m, _BatchNorm)} == {1}


def test_cumulative_statistics():
    net = build("iresnet")
    for module in net.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = None
    assert same(outcome(make_efficient(copy.deepcopy(net), checkpointing=True)), outcome(net))


# ---- channels last

@pytest.mark.parametrize("name", NETWORKS)
def test_channels_last_to_rounding(name):
    net = no_dropout(build(name)).double()
    last = make_efficient(copy.deepcopy(net), channels_last=True)
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in last.parameters() if p.ndim == 4)
    assert gap(outcome(last, FACES.double()), outcome(net, FACES.double())) < 1e-10


def test_a_network_without_convolutions_says_so():
    net = Net(nn.Flatten(), 3 * 32 * 32)
    with pytest.warns(UserWarning, match="channels_last changes nothing: Net has no convolutions"):
        make_efficient(net, channels_last=True)
    with pytest.raises(EfficiencyError, match="Net has no repeated blocks"):
        make_efficient(net, checkpointing=True)
    net.last = nn.Linear(3 * 32 * 32, 8)
    with pytest.warns(UserWarning, match="sync_batchnorm changes nothing: Net has no batch normalisation"):
        make_efficient(net, sync_batchnorm=True)


# ---- compilation

@pytest.mark.parametrize("backend, checkpointing", [("eager", False), ("aot_eager", True)])
@pytest.mark.parametrize("name", ["iresnet", "clip"])
def test_compiled_to_rounding(name, backend, checkpointing):
    torch.compiler.reset()
    net = build(name).double()
    quick = make_efficient(copy.deepcopy(net), checkpointing=checkpointing)
    compile_in_place(quick, backend)
    assert list(quick.state_dict()) == list(net.state_dict())
    for faces in (FACES.double(), FACES[:5].double()):  # the last batch may be smaller
        assert gap(outcome(quick, faces), outcome(net, faces)) < 1e-10
    assert (quick.eval()(FACES.double()) - net.eval()(FACES.double())).abs().max() < 1e-10


@compiler
def test_inductor_with_dropout_checkpointing_and_gradient_caching():
    torch.compiler.reset()
    net = IResNet(16, 8, blocks=(1, 1), widths=(4, 8), dropout=0.4).double()  # blocks of two shapes
    quick = make_efficient(copy.deepcopy(net), checkpointing=True, compile=True)
    def step(net):
        loss_of = lambda z: ((unit_norm(z) @ unit_norm(z).T).square().sum(), {})
        torch.manual_seed(1)
        loss, _ = cached_backward(net, FACES[:5, :, :16, :16].double().tensor_split(2), loss_of)
        return [loss[None], *(p.grad for p in net.parameters() if p.grad is not None), *net.buffers(), torch.get_rng_state()]
    assert gap(step(quick), step(net)) < 1e-10


# ---- batch normalisation over ranks

@pytest.mark.parametrize("name", NORMALISED)
def test_synchronised_in_one_process_is_plain_batch_normalisation(name):
    net = build(name)
    for _ in range(2):
        synced = make_efficient(make_efficient(copy.deepcopy(net), sync_batchnorm=True), sync_batchnorm=True)
        assert all(isinstance(m, nn.SyncBatchNorm) for m in synced.modules() if isinstance(m, _BatchNorm))
        assert [p.requires_grad for p in synced.parameters()] == [p.requires_grad for p in net.parameters()]
        assert same(outcome(synced), outcome(copy.deepcopy(net)))
        net.eval()


def _ranks_without_gpu(rank, group):
    if torch.cuda.is_available():
        return "GPU"
    try:
        make_efficient(SmallFaceNet(16, 8), sync_batchnorm=True)
    except EfficiencyError as error:
        return str(error)
    return "no error"


def test_ranks_without_a_gpu_are_told_what_to_do():
    said = run_ranks(_ranks_without_gpu, 2)
    if said[0] == "GPU":
        pytest.skip("there is a GPU here")
    assert all("2 ranks without a GPU" in text and "choose sync_batchnorm=False" in text for text in said)


# ---- files

@pytest.mark.parametrize("name", ["iresnet", "timm:efficientnet", "clip"])
def test_a_file_of_one_setting_loads_into_every_other(name, tmp_path):
    plain, cheap = build(name), make_efficient(build(name), channels_last=True, checkpointing=True,
                                               sync_batchnorm=name != "clip")
    outcome(cheap)
    tensors = {key: value.contiguous() for key, value in cheap.state_dict().items()}
    save_file(tensors, tmp_path / "a.safetensors")
    plain.load_state_dict(load_file(tmp_path / "a.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), tensors.values()))
    cheap.load_state_dict(build(name).state_dict())
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in cheap.parameters() if p.ndim == 4)


# ---- half precision

class Watch(Loss):
    "InfoNCE that notes what reaches it"
    def __init__(self):
        super().__init__()
        self.inner, self.kinds = InfoNCE(), []

    def compute(self, embeddings, labels):
        self.kinds += [embeddings.dtype, (embeddings @ embeddings.T).dtype]
        return self.inner.compute(embeddings, labels)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["small", "iresnet"])
def test_the_loss_computes_in_float32_and_gradients_are_finite(name, precision):
    if precision == "fp16" and not torch.cuda.is_available():
        pytest.skip("fp16 needs a GPU: CPUs have no autocast of it that trains")
    accelerator = make_accelerator(0, precision=precision, threads=1)
    net = make_efficient(build(name), channels_last=True, checkpointing=True)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net, optimizer = accelerator.prepare(net, optimizer)
    watch, halves = Watch(), []
    convolution = next(module for module in net.modules() if isinstance(module, nn.Conv2d))
    convolution.register_forward_hook(lambda module, args, out: halves.append(out.dtype))
    with accelerator.autocast():
        z = net(FACES.to(accelerator.device))
        loss, _ = watch(z, torch.arange(6) // 2)
    accelerator.backward(loss)
    assert halves[0] == (torch.bfloat16 if precision == "bf16" else torch.float16)
    assert watch.kinds == [torch.float32, torch.float32] and loss.dtype == torch.float32
    assert all(p.grad.isfinite().all() for p in net.parameters() if p.grad is not None)
    accelerator.unwrap_model(net, keep_fp32_wrapper=False)
