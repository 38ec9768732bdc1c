"""Adapters beside networks of the published classes: they learn, travel through files, merge, and leave the base alone."""
import copy
import json
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (CLIPVisionConfig, CLIPVisionModel, CLIPVisionModelWithProjection, Dinov2Config, Dinov2Model,
                          IJepaConfig, IJepaModel, SiglipVisionConfig, SiglipVisionModel)

from facenb.backbones import Backbone, SmallFaceNet
from facenb.lora import (AdapterError, AdapterWatch, adapter_files, adapter_tensors, adapters, describe_training, find_targets,
                         load_adapter, merge, save_adapter, set_training, trained_share)
from facenb.optimise import Recipe, build_optimizer
from facenb.losses import info_nce
from facenb.zoo import backbone_entry

SIZE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8)
NETWORKS = {
    "clip": lambda: CLIPVisionModel(CLIPVisionConfig(**SIZE, intermediate_size=64)),
    "clip_projected": lambda: CLIPVisionModelWithProjection(CLIPVisionConfig(**SIZE, intermediate_size=64, projection_dim=24)),
    "dinov2": lambda: Dinov2Model(Dinov2Config(**SIZE, mlp_ratio=2)),
    "dinov2_swiglu": lambda: Dinov2Model(Dinov2Config(**SIZE, mlp_ratio=2, use_swiglu_ffn=True)),
    "ijepa": lambda: IJepaModel(IJepaConfig(**SIZE, intermediate_size=64), add_pooling_layer=False),
    "siglip2": lambda: SiglipVisionModel(SiglipVisionConfig(**SIZE, intermediate_size=64)),
    "timm:vit": lambda: timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32, num_classes=0),
    "timm:convnext": lambda: timm.create_model("convnext_atto", depths=(1, 1, 1, 1), ls_init_value=1.0, num_classes=0),
}
TRANSFORMERS = [name for name in NETWORKS if not name.startswith("timm")]
FACES = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1


class Net(Backbone):
    """A backbone around a network, with a projection to 16 numbers when `width`, that of its features, is given."""
    def __init__(self, name="clip", seed=0, network=None, width=0):
        super().__init__(image_size=32, embedding_dim=16 if width else 32)
        torch.manual_seed(seed)
        self.name, self.inside, self.vision = name, "vision", network or NETWORKS[name]()
        if width:
            self.projection = nn.Sequential(nn.Linear(width, 16), nn.BatchNorm1d(16))
            self.head = self.new_head = ("projection",)

    def extract(self, faces):
        out = self.vision(faces)
        if isinstance(out, torch.Tensor):
            return out
        for name in ("image_embeds", "pooler_output"):
            if out.get(name) is not None:
                return out[name]
        return out.last_hidden_state.mean(1)

    def project(self, features):
        return self.projection(features) if self.head else features


def train(backbone, count=2, lr=0.5, seed=1):
    """Steps of InfoNCE, watched."""
    torch.manual_seed(seed)
    backbone.train()
    watch, optimizer = AdapterWatch(backbone), build_optimizer([backbone], Recipe(1, lr, weight_decay=1e-3))
    for _ in range(count):
        optimizer.zero_grad()
        info_nce(F.normalize(backbone(FACES), dim=1)).backward()
        watch.look()
        optimizer.step()
    return watch


def plain_state(backbone):
    return {name.replace(".base_layer.", "."): tensor.clone() for name, tensor in backbone.state_dict().items()
            if ".lora_" not in name}


@pytest.mark.parametrize("targets", ["feed-forward", "attention", "all"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_whole_way(name, targets, tmp_path):
    backbone = Net(name)
    if name == "timm:convnext" and targets != "feed-forward":
        if targets == "attention":
            with pytest.raises(AdapterError, match="It offers .*mlp.fc1"):
                set_training(backbone, "lora", targets=targets)
        return
    start = backbone.eval()(FACES).detach()
    before, names = plain_state(backbone), list(backbone.state_dict())
    set_training(backbone, "lora", rank=4, alpha=6, targets=targets)
    assert torch.equal(backbone.eval()(FACES), start)
    watch = train(backbone, 3)
    assert not watch.waiting and watch.looks == 2
    assert all(t.any() for t in adapter_tensors(backbone).values())
    after = plain_state(backbone)
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert all((p.grad is not None) == p.requires_grad for p in backbone.parameters())
    trained = backbone.eval()(FACES).detach()
    assert (trained - start).abs().max() > 1e-3

    save_adapter(backbone, tmp_path)
    fresh = load_adapter(Net(name), tmp_path)
    assert torch.equal(fresh.eval()(FACES), trained)
    assert describe_training(fresh) == describe_training(backbone)
    merged = merge(fresh)
    assert (merged.eval()(FACES) - trained).abs().max() < 1e-5
    assert list(merged.state_dict()) == names and not adapters(merged)
    assert not any("peft" in type(module).__module__ for module in merged.modules())
    with pytest.raises(AdapterError, match="no adapters to merge"):
        merge(merged)

    exact = load_adapter(Net(name), tmp_path).double().eval()
    before = exact(FACES.double()).detach()
    assert (merge(exact)(FACES.double()) - before).abs().max() < 1e-12


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_peft_reads_the_files(name, tmp_path):
    backbone = set_training(Net(name), "lora", rank=3, alpha=12, targets="all")
    train(backbone)
    save_adapter(backbone, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", FutureWarning)
        plain = Net(name)
        wrapped = PeftModel.from_pretrained(plain.vision, tmp_path)
    assert torch.allclose(plain.eval()(FACES), backbone.eval()(FACES), atol=1e-6)
    plain.vision = wrapped.merge_and_unload()
    assert torch.allclose(plain(FACES), backbone(FACES), atol=1e-5)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["bias"], config["target_modules"]) == (3, 12, "none", list(adapters(backbone)))
    wrapped = PeftModel.from_pretrained(Net(name).vision, tmp_path)  # and facenb reads what peft writes
    wrapped.save_pretrained(tmp_path / "theirs")
    with pytest.warns(UserWarning, match="does not say which weights"):
        again = load_adapter(Net(name), tmp_path / "theirs")
    assert torch.equal(again.eval()(FACES), backbone(FACES))


TINY = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, patch_size=8, image_size=32)
FOUNDATION = {"clip_vit_b32": TINY | {"intermediate_size": 48, "projection_dim": 24}, "dinov2_vit_b14": TINY,
              "ijepa_vit_h14": TINY | {"intermediate_size": 48}, "siglip2_so400m": TINY | {"intermediate_size": 48}}


@pytest.mark.parametrize("name", [*FOUNDATION, "timm:vit_tiny_patch16_224", "iresnet18"])
def test_backbones_of_facenb(name, tmp_path):
    def build(seed=0):
        torch.manual_seed(seed)
        options = {"config": FOUNDATION[name]} if name in FOUNDATION else {}
        backbone = backbone_entry(name).build(image_size=32, embedding_dim=16, weights=None, **options)
        backbone.name, backbone.new_head = name, backbone.head[-1:]
        return backbone
    targets = r"layer\d\.\d\.conv1" if name == "iresnet18" else "feed-forward"
    backbone = build()
    before = plain_state(backbone)
    start, names, fixed = backbone.eval()(FACES).detach(), list(before), [p.requires_grad for p in backbone.parameters()]
    if name in FOUNDATION:
        assert all("." in key and not key.startswith("vision.") for key in find_targets(backbone, targets))
    set_training(backbone, "lora", targets=targets)
    assert torch.equal(backbone.eval()(FACES), start)
    assert not train(backbone, 3, lr=0.05).waiting
    after = plain_state(backbone)
    changed = {key for key in names if not torch.equal(before[key], after[key])}
    assert changed and all(key.startswith(backbone.new_head) for key in changed)
    first, second = backbone.train()(FACES, (0.4, 0.4)).chunk(2)
    assert first.shape == (8, 16) and not torch.equal(first, second)
    trained = backbone.eval()(FACES).detach()
    save_adapter(backbone, tmp_path)
    fresh = load_adapter(build(), tmp_path)
    assert torch.equal(fresh.eval()(FACES), trained)
    assert (merge(fresh)(FACES) - trained).abs().max() < 1e-5 * max(1, trained.abs().max())
    assert list(fresh.state_dict()) == names and [p.requires_grad for p in fresh.parameters()] == fixed
    if name in FOUNDATION:
        plain = build()
        PeftModel.from_pretrained(plain.vision, tmp_path)
        plain.load_state_dict(load_file(tmp_path / "adapter_head.safetensors"), strict=False)
        assert torch.allclose(plain.eval()(FACES), trained, atol=1e-5)


def test_a_new_head_is_trained_stored_and_kept():
    backbone = Net("dinov2", width=32)
    head = {key: p.clone() for key, p in backbone.projection.state_dict().items()}
    set_training(backbone, "lora")
    assert {key.split(".")[0] for key, p in backbone.named_parameters() if p.requires_grad} == {"vision", "projection"}
    train(backbone)
    assert backbone.projection.training and not backbone.vision.training
    assert all(not torch.equal(p, head[key]) for key, p in backbone.projection.state_dict().items())
    assert set(adapter_files(backbone)) == {"adapter_config.json", "adapter_model.safetensors", "adapter_head.safetensors"}


def test_a_new_head_loads_over_another(tmp_path):
    backbone = Net("dinov2", width=32)
    train(set_training(backbone, "lora"))
    save_adapter(backbone, tmp_path)
    fresh = Net("dinov2", width=32)
    nn.init.zeros_(fresh.projection[0].weight)
    assert torch.equal(load_adapter(fresh, tmp_path).eval()(FACES), backbone.eval()(FACES))
    with pytest.raises(AdapterError, match="new head"):
        load_adapter(Net("dinov2"), tmp_path)
    save_adapter(set_training(Net("dinov2"), "lora"), tmp_path)  # over it: the head's file goes
    assert not (tmp_path / "adapter_head.safetensors").exists()
    load_adapter(Net("dinov2"), tmp_path)


def test_published_head_stays():
    backbone = Net("siglip2")
    backbone.head = ("vision.head",)
    set_training(backbone, "lora", targets="all")
    assert not any("vision.head" in key for key, p in backbone.named_parameters() if p.requires_grad)
    assert not any(key.startswith("head") for key in adapters(backbone))


def test_convolutions_leave_statistics_alone(tmp_path):
    backbone = SmallFaceNet(image_size=32, embedding_dim=16)
    backbone.name = "small"
    with pytest.raises(AdapterError, match=r"It offers features.N.N \(3 times\), features.N.first.N \(2 times\)"):
        set_training(backbone, "lora")
    targets = r"features\.\d+(\.(first|second))?\.0"
    with pytest.raises(AdapterError, match="no gradient after two steps: features.2.first"):  # their blocks are zero,
        train(set_training(copy.deepcopy(backbone), "lora", rank=4, targets=targets))  # and stay so when frozen
    for block in (backbone.features[2], backbone.features[4]):
        nn.init.ones_(block.second[1].weight)
    before = plain_state(backbone)
    set_training(backbone, "lora", rank=4, targets=targets)
    assert len(adapters(backbone)) == 7
    train(backbone, 4, lr=0.01)
    after = plain_state(backbone)
    assert any(key.endswith("running_mean") for key in before)
    assert all(torch.equal(before[key], after[key]) for key in before)
    trained = backbone.eval()(FACES).detach()
    fresh = SmallFaceNet(image_size=32, embedding_dim=16)
    fresh.load_state_dict(before)
    fresh.name = "small"
    load_adapter(fresh, save_adapter(backbone, tmp_path))
    assert torch.equal(fresh.eval()(FACES), trained)
    exact = fresh.double()(FACES.double()).detach()
    assert (merge(fresh)(FACES.double()) - exact).abs().max() < 1e-12


def test_same_seed_same_adapters():
    def run(seed):
        torch.manual_seed(seed)
        backbone = Net("clip")
        torch.manual_seed(seed)
        train(set_training(backbone, "lora", dropout=0.3))
        return adapter_files(backbone)["adapter_model.safetensors"]
    assert run(5) == run(5) != run(6)


def test_dropout_is_of_the_adapters_alone():
    backbone = set_training(Net("clip"), "lora", dropout=0.5)
    train(backbone, lr=1.0)
    assert not torch.equal(backbone.train()(FACES), backbone(FACES))
    assert torch.equal(backbone.eval()(FACES), backbone(FACES))


class Cut(Net):
    """Its first block is detached and half of its second never runs."""
    def extract(self, faces):
        first, second = self.vision
        x = first(faces.flatten(1)[:, :32]).detach()
        return x + second.mlp.fc1(x)


def test_adapters_that_cannot_learn_are_listed():
    def block():
        part = nn.Module()
        part.mlp = nn.Sequential()
        part.mlp.add_module("fc1", nn.Linear(32, 32)), part.mlp.add_module("fc2", nn.Linear(32, 32))
        part.forward = lambda x: x + part.mlp(x)
        return part
    backbone = set_training(Cut("cut", network=nn.ModuleList([block(), block()])), "lora")
    with pytest.raises(AdapterError) as raised:
        train(backbone)
    listed = str(raised.value).split(": ")[1].split(". Their")[0].split(", ")
    assert sorted(listed) == sorted(f"{name}.{part}" for name in ("0.mlp.fc1", "0.mlp.fc2", "1.mlp.fc2")
                                    for part in ("lora_A", "lora_B"))


def test_another_alpha_is_told_and_not_used(tmp_path):
    backbone = set_training(Net("ijepa"), "lora", rank=2, alpha=16)
    train(backbone)
    save_adapter(backbone, tmp_path)
    with pytest.warns(UserWarning, match="alpha is 16, not 8.*targets is 'feed-forward', not 'all'"):
        fresh = load_adapter(Net("ijepa"), tmp_path, alpha=8, rank=2, targets="all")
    assert torch.equal(fresh.eval()(FACES), backbone.eval()(FACES))


def test_another_base_is_refused_and_untouched(tmp_path):
    save_adapter(set_training(Net("dinov2"), "lora"), tmp_path)
    for other in (Net("dinov2", seed=1), Net("ijepa"), SmallFaceNet()):
        names = {key: (id(p), p.requires_grad) for key, p in other.named_parameters()}
        with pytest.raises(AdapterError, match="holds adapters for dinov2 with"):
            load_adapter(other, tmp_path)
        assert names == {key: (id(p), p.requires_grad) for key, p in other.named_parameters()}


def test_a_merged_network_is_another_base(tmp_path):
    backbone = Net("clip")
    backbone.origin = {"repository": "some/where", "revision": "abc", "sha256": "11"}
    train(set_training(backbone, "lora"))
    save_adapter(backbone, tmp_path)
    merge(backbone)
    assert set(backbone.origin) == {"repository", "revision", "sha256", "merged"}
    with pytest.raises(AdapterError, match="'merged': '"):
        load_adapter(backbone, tmp_path)


def test_checkpoints_that_are_not_reentrant():
    def gradients(**options):
        backbone = set_training(Net("timm:vit"), "lora", targets="all")
        for block in backbone.vision.blocks if options else ():
            block.forward = partial(checkpoint, block.forward, **options)
        backbone.train()(FACES).square().sum().backward()
        return torch.cat([p.grad.flatten() for p in backbone.parameters() if p.requires_grad])
    assert torch.allclose(gradients(), gradients(use_reentrant=False), atol=1e-6)
    with pytest.raises(RuntimeError, match="does not require grad"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gradients(use_reentrant=True)


def test_only_what_learns_reaches_the_optimizer():
    backbone = set_training(Net("siglip2"), "lora", rank=2)
    optimizer = build_optimizer([backbone], Recipe(1, 0.1))
    assert sum(p.numel() for group in optimizer.param_groups for p in group["params"]) == trained_share(backbone)[0]
    assert trained_share(backbone)[0] == 2 * 2 * 2 * (32 + 64)


def test_targets_by_hand():
    backbone = Net("siglip2")
    assert find_targets(backbone, "layers.0.mlp.fc1") == ["encoder.layers.0.mlp.fc1"]
    assert find_targets(backbone, "head.mlp.fc1,q_proj") == [f"encoder.layers.{i}.self_attn.q_proj" for i in (0, 1)] + ["head.mlp.fc1"]
    with pytest.raises(AdapterError, match="head.attention.out_proj: nn.MultiheadAttention reads its weights"):
        find_targets(backbone, "out_proj")
    for wrong in ("fc3", "q_proj,fc3", "layer_norm1", "mlp", "", ".*nothing.*"):
        with pytest.raises(AdapterError, match="It offers"):
            find_targets(backbone, wrong)
    with pytest.raises(AdapterError, match="regular expression"):
        find_targets(backbone, "q_proj|(")


def test_importing_does_not_wait_for_peft():
    code = "import sys, facenb.lora; print('peft' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_dead_adapters_are_told_after_two_steps_and_a_rate_of_zero_later():
    "Also when all of them are dead, behind a normalisation whose frozen scale is zero"
    from facenb.zoo import build_backbone
    def steps(targets, lr, count):
        net = build_backbone("small", 24, 16, train="lora", targets=targets).train()
        watch, optimizer = AdapterWatch(net, patience=5), torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr)
        for _ in range(count):
            optimizer.zero_grad()
            net(torch.rand(4, 3, 24, 24)).square().sum().backward()
            watch.look(), optimizer.step()
    with pytest.raises(AdapterError, match="no gradient after two steps: features.2.second.0.lora_A"):
        steps("features.2.second.0,features.4.second.0", 0.1, 2)
    with pytest.raises(AdapterError, match="is the learning rate 0"):
        steps("features.0.0", 0.0, 5)
    steps("features.0.0", 0.1, 3)
