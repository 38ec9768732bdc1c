"""Maps of networks too large for a notebook, and of networks that fail."""
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import timm
import torch
from torch import nn

from conftest import ROOT
from facenb.inside import (InsideError, attention_rollout, attentions_of, map_attention, occlusion_map, pair_saliency,
                           rank_correlation, rollout_map, window_mean)


def vit(**more):
    torch.manual_seed(0)
    settings = dict(img_size=32, patch_size=8, embed_dim=24, depth=3, num_heads=3, num_classes=5)
    return timm.models.vision_transformer.VisionTransformer(**settings | more).eval()


FACES = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_a_failing_network_comes_back_as_it_was():
    network = vit()
    network.head.register_forward_hook(lambda *_: 1 / 0)
    network.train(), network.blocks[0].eval()
    state = lambda: ([m.training for m in network.modules()], [m.fused_attn for m in network.modules() if hasattr(m, "fused_attn")],
                     sum(len(m._forward_hooks) for m in network.modules()))
    before = state()
    for look in (lambda: attentions_of(network, FACES), lambda: pair_saliency(network, FACES, FACES), lambda: occlusion_map(network, FACES, FACES)):
        with pytest.raises(ZeroDivisionError):
            look()
        assert state() == before


def test_registers_and_class_token_are_no_patches():
    network = vit(reg_tokens=4)
    attentions = attentions_of(network, FACES)
    assert attentions[0].shape == (2, 3, 21, 21)
    row = attention_rollout(attentions)[:, 0, 5:]
    assert torch.allclose(rollout_map(network, FACES).flatten(1), row / row.sum(1, keepdim=True), atol=1e-6)


def test_a_mean_of_patches_is_read_as_a_mean():
    network = vit(global_pool="avg", class_token=True)
    rows = attention_rollout(attentions_of(network, FACES))[:, 1:, 1:].mean(1)
    assert torch.allclose(rollout_map(network, FACES).flatten(1), rows / rows.sum(1, keepdim=True), atol=1e-6)


def test_a_planted_patch_is_found():
    """A network whose patches carry their brightness into the keys looks at the one bright patch."""
    network = vit(depth=1, num_heads=1, pos_embed="none")
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        network.patch_embed.proj.weight[0], network.patch_embed.proj.weight[1] = 1 / 192, -1 / 192
        network.cls_token[0, 0, 2:4] = torch.tensor([1.0, -1])
        network.blocks[0].norm1.weight.fill_(1)
        network.blocks[0].attn.qkv.weight[0, 2] = 4.0  # the query of the class token
        network.blocks[0].attn.qkv.weight[24, 0] = 4.0  # the key of brightness
    faces = torch.zeros(1, 3, 32, 32)
    faces[..., 8:16, 16:24] = 1
    assert rollout_map(network, faces)[0].flatten().argmax() == 1 * 4 + 2
    assert rollout_map(network, faces).max() > 0.5


def test_saliency_stays_in_the_receptive_field():
    network = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.Flatten(), nn.Linear(2 * 64, 4)).double()
    with torch.no_grad():
        network[2].weight.view(4, 2, 8, 8)[..., 4:] = 0  # the right half of the map is not read
    a, b = torch.rand(2, 1, 3, 8, 8, dtype=torch.float64)
    heat = pair_saliency(network, a, b)[0][0]
    assert (heat[:, :5] > 0).all() and (heat[:, 5:] == 0).all()
    fall = occlusion_map(network, a, b, patch=2, stride=2)[0][0]
    assert (fall[:, :4] != 0).all() and (fall[:, 6:].abs() < 1e-12).all()


def test_saliency_of_a_frozen_network():
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 4)).requires_grad_(False)
    a, b = torch.rand(2, 1, 3, 2, 2)
    with torch.no_grad():
        assert (pair_saliency(network, a, b)[0] > 0).all()


def test_constant_maps_have_no_rank_correlation():
    with pytest.warns(Warning):
        assert np.isnan(rank_correlation(torch.ones(1, 2, 2), torch.rand(1, 2, 2)))


@pytest.mark.parametrize("look", [attentions_of, rollout_map, map_attention])
def test_a_network_without_attention_is_refused(look):
    with pytest.raises(InsideError):
        look(nn.Sequential(nn.Flatten(), nn.Linear(12, 4)), torch.rand(1, 3, 2, 2))


def test_a_real_network_looks_at_the_face():
    """EdgeFace-XXS on 40 pairs: gradient and occlusion agree, and both prefer the middle."""
    if not (data := os.environ.get("FACENB_DATA")):
        pytest.skip("FACENB_DATA is not set: it names the folder with models/ and faces/")
    from facenb.faces import normalise
    from facenb.images import decode
    from facenb.weights import read_weights
    network = timm.create_model("edgenext_xx_small", num_classes=512)
    network.load_state_dict(read_weights(Path(data) / "models" / "edgeface_xxs.safetensors"))
    with zipfile.ZipFile(Path(data) / "faces" / "lfw.zip") as archive:
        lines = archive.read("lfw/pairs.txt").decode().splitlines()[1:41]
        read = lambda name, number: decode(archive.read(f"lfw/{name}/{name}_{int(number):04d}.jpg"))
        sides = zip(*[(read(name, i), read(name, j)) for name, i, j in map(str.split, lines)])
        a, b = (normalise(torch.from_numpy(np.stack(side)).permute(0, 3, 1, 2)) for side in sides)
    middle = lambda heat: heat[:, 28:84, 28:84].sum((1, 2)) / heat.sum((1, 2))
    heat, fall = pair_saliency(network, a, b)[0], occlusion_map(network, a, b, patch=28, stride=28)[0]
    assert middle(heat).min() > 1 / 3 and middle(fall.clamp(min=0)).mean() > 0.5
    assert rank_correlation(window_mean(heat, 29), fall).mean() > 0.3


def record_of(name):
    return json.loads((ROOT / "data" / "runs" / "benchmarks" / name / "record.json").read_text())


def test_the_figure_of_all_backbones_is_its_record():
    from facenb.zoo import BACKBONES  # all notebooks of networks are imported there
    rows, record = pd.read_csv(ROOT / "figures" / "53_backbones.csv", index_col=0), record_of("speed-backbones")
    assert set(rows.index) == {name for name, entry in BACKBONES.items() if not entry.toy}
    assert not record["git"]["dirty"] and (ROOT / "figures" / "53_backbones.png").exists()
    for name, row in rows.iterrows():
        assert row.images_per_second == pytest.approx(record["metrics"][f"{name}_speed"], rel=1e-4)
        assert row.parameters == record["metrics"][f"{name}_parameters"] and row.commit == record["git"]["commit"]


def test_the_mean_maps_are_their_record():
    rows, record = pd.read_csv(ROOT / "figures" / "61_inside.csv"), record_of("inside")
    assert len(rows) == 49 and (ROOT / "figures" / "61_inside.png").exists() and not record["git"]["dirty"]
    for column in rows.columns.drop(["row", "column"]):
        assert rows[column].sum() == pytest.approx(1, abs=1e-3)
        for row in rows.itertuples():
            assert getattr(row, column) == pytest.approx(record["metrics"][f"{column}_row{row.row}_column{row.column}"], rel=1e-4)


def small_vit(**options):
    import timm
    return timm.models.vision_transformer.VisionTransformer(img_size=32, patch_size=16, embed_dim=24, depth=2, num_heads=2, num_classes=5, **options).eval()


def test_prefix_tokens_are_not_patches():
    "Four patches, a class token and four registers are nine tokens, but no map of three by three"
    from facenb.inside import rollout_map
    assert rollout_map(small_vit(reg_tokens=4), torch.rand(2, 3, 32, 32)).shape == (2, 2, 2)


@pytest.mark.parametrize("pool", ["map", "max"])
def test_pools_that_a_rollout_cannot_read_are_refused(pool):
    from facenb.inside import InsideError, rollout_map
    with pytest.raises(InsideError, match=f"pools by '{pool}'"):
        rollout_map(small_vit(global_pool=pool, class_token=False), torch.rand(2, 3, 32, 32))
