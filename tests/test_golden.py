"""Losses and verification against numbers that other implementations gave."""
import json

import numpy as np
import pytest
import torch

from facenb.circle import Circle
from facenb.contrastive import NTXent, SupCon
from facenb.hybrid import Hybrid
from facenb.losses import InfoNCE, info_nce
from facenb.margin import ArcFace, CosFace
from facenb.triplet import Triplet
from facenb.verify import verify


def relative(found, wanted) -> float:
    found = found.detach().numpy() if torch.is_tensor(found) else found
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def head(kind, weight, *settings):
    loss = kind(*weight.shape, *settings).double()
    loss.load_state_dict({"weight": weight})
    return loss


@pytest.mark.parametrize("temperature", [0.07, 0.2])
def test_info_nce(golden, temperature):
    stored = np.load(golden / "losses_visible.npz")
    z = torch.tensor(stored["z"], requires_grad=True)
    loss = info_nce(z, temperature)
    loss.backward()
    assert relative(loss, stored[f"infonce_t{temperature}_loss"]) < 1e-6
    assert relative(z.grad, stored[f"infonce_t{temperature}_gz"]) < 1e-6


@pytest.mark.parametrize("kind, scale, margin", [(ArcFace, 32, 0.2), (ArcFace, 64, 0.5), (CosFace, 64, 0.35)])
def test_margin_losses(golden, kind, scale, margin):
    stored = np.load(golden / "losses_visible.npz")
    z, key = torch.tensor(stored["z"], requires_grad=True), f"{kind.__name__.lower()}_s{scale}_m{margin}"
    loss_of = head(kind, torch.tensor(stored["W"]), scale, margin)
    loss, _ = loss_of(z, torch.tensor(stored["labels"]))
    loss.backward()
    for found, name in [(loss, "loss"), (z.grad, "gz"), (loss_of.weight.grad, "gW")]:
        assert relative(found, stored[f"{key}_{name}"]) < 1e-6


@pytest.mark.parametrize("make, key, gradient, unique", [
    (lambda: InfoNCE(0.07), "infonce_t0.07_loss", "infonce_t0.07_gz", True),
    (lambda: NTXent(0.07), "ntxent_unique_t0.07_loss", "ntxent_unique_t0.07_gz", True),
    (lambda: SupCon(0.1), "supcon_t0.1_loss", "supcon_t0.1_gz", False),
    (lambda: Circle(gamma=64, margin=0.25), "circle_m0.25_g64_loss", "circle_gz", False),
    (lambda: Triplet(0.2, "semi-hard"), "triplet_semihard_m0.2_loss", "triplet_semihard_gz", False),
], ids=["infonce", "ntxent", "supcon", "circle", "triplet"])
def test_contrastive_losses(golden, make, key, gradient, unique):
    stored = np.load(golden / "losses_visible.npz")
    z, labels = torch.tensor(stored["z"], requires_grad=True), torch.tensor(stored["labels"])
    loss, _ = make()(z, torch.arange(len(z)) // 2 if unique else labels)
    (on_the_sphere,) = torch.autograd.grad(loss, z)
    assert relative(loss, stored[key]) < 1e-6
    wanted = torch.tensor(stored[gradient])  # a loss takes directions: what points along z has no effect
    along = (wanted * z).sum(1, keepdim=True) * z
    assert relative(on_the_sphere, (wanted - along).detach().numpy()) < 1e-6


def test_hybrid(golden):
    stored = np.load(golden / "losses_visible.npz")
    z = torch.tensor(stored["z"], requires_grad=True)
    arcface = head(ArcFace, torch.tensor(stored["W"]), 32, 0.2)
    loss, _ = Hybrid(arcface, InfoNCE(0.07, mask=False), 0.5)(z, torch.tensor(stored["labels"]))
    loss.backward()
    assert relative(loss, stored["hybrid_s32_m0.2_lam0.5_t0.07_loss"]) < 1e-6
    assert relative(z.grad, stored["hybrid_gz"]) < 1e-6
    assert relative(arcface.weight.grad, stored["hybrid_gW"]) < 1e-6


@pytest.mark.parametrize("model", ["mfn", "xxs"])
@pytest.mark.parametrize("benchmark", ["LFW", "FF", "FP"])
def test_verification(golden, benchmark, model):
    stored = np.load(golden / "verification.npz")
    wanted = json.loads((golden / "verification.json").read_text())[f"{benchmark}_{model}_single"]
    found = verify(stored[f"{benchmark}_{model}_single"], stored[f"{benchmark}_same"], stored[f"{benchmark}_fold"])
    for part, numbers in [(found.accuracy_at_far, wanted["accuracy_at_far_1e3"]),
                          (found.accuracy_best, wanted["accuracy_best_train_threshold"])]:
        assert part.folds == pytest.approx(numbers["folds"], abs=1e-12)
        assert (part.mean, part.sd) == pytest.approx((numbers["mean"], numbers["sd_ddof0"]), abs=1e-12)
    assert found.accuracy_at_far.thresholds == wanted["accuracy_at_far_1e3"]["thresholds"]
    assert {far: found.tar[far] for far in (1e-1, 1e-2, 1e-3)} == {float(far): tar for far, tar in wanted["tar_at_far"].items()}
    assert found.eer == pytest.approx(wanted["eer"], abs=1e-3)
    assert found.auc == pytest.approx(wanted["auc"], abs=1e-12)
