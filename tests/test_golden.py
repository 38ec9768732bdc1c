"""Losses and verification against numbers that other implementations gave."""
import json

import numpy as np
import pytest
import torch

from facenb.losses import ArcFace, Hybrid, InfoNCE, info_nce
from facenb.verify import verify


def relative(found, wanted) -> float:
    found = found.detach().numpy() if torch.is_tensor(found) else found
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def arcface(weight, scale, margin):
    head = ArcFace(*weight.shape, scale, margin).double()
    head.load_state_dict({"weight": weight})
    return head


@pytest.mark.parametrize("temperature", [0.07, 0.2])
def test_info_nce(golden, temperature):
    stored = np.load(golden / "losses_visible.npz")
    z = torch.tensor(stored["z"], requires_grad=True)
    loss = info_nce(z, temperature)
    loss.backward()
    assert relative(loss, stored[f"infonce_t{temperature}_loss"]) < 1e-6
    assert relative(z.grad, stored[f"infonce_t{temperature}_gz"]) < 1e-6


@pytest.mark.parametrize("scale, margin", [(32, 0.2), (64, 0.5)])
def test_arcface(golden, scale, margin):
    stored = np.load(golden / "losses_visible.npz")
    z, key = torch.tensor(stored["z"], requires_grad=True), f"arcface_s{scale}_m{margin}"
    head = arcface(torch.tensor(stored["W"]), scale, margin)
    loss = head(z, torch.tensor(stored["labels"]))
    loss.backward()
    for found, name in [(loss, "loss"), (z.grad, "gz"), (head.weight.grad, "gW")]:
        assert relative(found, stored[f"{key}_{name}"]) < 1e-6


def test_hybrid(golden):
    stored = np.load(golden / "losses_visible.npz")
    z = torch.tensor(stored["z"], requires_grad=True)
    head = arcface(torch.tensor(stored["W"]), 32, 0.2)
    loss = Hybrid(head, InfoNCE(0.07), 0.5)(z, torch.tensor(stored["labels"]))
    loss.backward()
    assert relative(loss, stored["hybrid_s32_m0.2_lam0.5_t0.07_loss"]) < 1e-6
    assert relative(z.grad, stored["hybrid_gz"]) < 1e-6
    assert relative(head.weight.grad, stored["hybrid_gW"]) < 1e-6


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
    assert found.tar == {float(far): tar for far, tar in wanted["tar_at_far"].items()}
    assert found.eer == pytest.approx(wanted["eer"], abs=1e-3)
    assert found.auc == pytest.approx(wanted["auc"], abs=1e-12)
