"""Losses of tuples: several processes learn what one would, whatever they hold; the demo of the second question, end to end."""
import json
import math
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist

from conftest import papermill
from facenb.cards import read_run
from facenb.margins import margins
from facenb.nearid import open_nearid
from facenb.nearid_hub import load_head
from facenb.nearid_losses import SLOTS, TUPLE_LOSSES, NearID, nearid_loss
from facenb.objects import write_objects
from facenb.registry import build_loss
from facenb.scorers import nearid_scorer, score_tuples
from facenb.weights import WeightsError
from facenb.zoo import build_backbone
from ranks import run_ranks

LOSSES = {name: {} for name in TUPLE_LOSSES} | {
    "nearid cohesion": {"beta": 0.3}, "nearid repo": {"pool": "repo"}, "nearid alpha 0": {"alpha": 0.0},
    "clip_one all": {"include_negatives": True, "oracle_weight": 0.5}, "circle_ext paper": {"tier": "paper"}}


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    "Seven rows with holes, float64, and their labels"
    draw = torch.Generator().manual_seed(seed)
    valid = torch.rand(7, SLOTS, generator=draw) < 0.6
    valid[:, :2] = True
    valid[2, 1:3] = False  # no positive
    valid[4, 3:] = False  # no distractor
    place, slot = valid.nonzero().T
    margin = torch.rand(len(slot), generator=draw, dtype=torch.float64) * (slot > 2)
    labels = torch.stack([place, slot, torch.ones_like(slot), margin], 1).double()
    return torch.randn(len(slot), 16, generator=draw, dtype=torch.float64), labels


def gradients(rank: int, group, shares: list[int], names: list[str]) -> dict:
    "Loss, and gradient of a weight that all ranks share, averaged as DistributedDataParallel does"
    torch.manual_seed(0)
    images, labels = batch()
    first = sum(shares[:rank])
    mine = (labels[:, 0] >= first) & (labels[:, 0] < first + shares[rank])
    own = labels[mine] - torch.tensor([first, 0, 0, 0])
    found = {}
    for name in names:
        loss = build_loss(name.split()[0], 2, 16, **LOSSES[name])
        if group is not None:
            loss.gather_over(group, [SLOTS * rows for rows in shares])
        weight = torch.eye(16, dtype=torch.float64) + 0.1 * torch.randn(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        weight.requires_grad_()
        for _ in range(2):  # clip_one draws anew
            value, seen = loss(images[mine] @ weight, own)
        value.backward()
        gradient = weight.grad
        if group is not None:
            dist.all_reduce(gradient, group=group)
            gradient = gradient / len(shares)
        found[name] = {"value": value.detach(), "gradient": gradient, "seen": seen}
    return found


@pytest.mark.parametrize("shares", [[4, 3], [2, 5], [3, 2, 2]], ids=str)
def test_ranks_learn_what_one_process_would(shares):
    names = list(LOSSES)
    alone = gradients(0, None, [7], names)
    for rank, together in enumerate(run_ranks(gradients, len(shares), shares, names)):
        for name in names:
            one, here = alone[name], together[name]
            assert abs(one["value"] - here["value"]) < 1e-12, (name, rank)
            assert (one["gradient"] - here["gradient"]).abs().max() < 1e-12 * max(1, one["gradient"].abs().max()), (name, rank)
            assert one["gradient"].abs().max() > 1e-6, name
            for key in one["seen"].keys() - {"zeros"}:
                assert torch.equal(one["seen"][key], here["seen"][key]) or abs(one["seen"][key] - here["seen"][key]) < 1e-12, (name, key)


def test_ranks_compare_with_all_of_each_other():
    "A mutation that must be noticed: with its own rows only, a rank has another loss"
    images, labels = batch()
    whole = NearID()(images, labels)[0]
    part = labels[:, 0] < 4
    assert abs(NearID()(images[part], labels[part])[0] - whole) > 0.01


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, 1e4])
def test_padded_slots_have_no_say(rubbish):
    draw = torch.Generator().manual_seed(2)
    shapes = (5, 8), (5, 2, 8), (5, 3, 8)
    anchor, positive, negative = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    masks = torch.rand(5, 2, generator=draw) < 0.5, torch.rand(5, 3, generator=draw) < 0.5
    clean = nearid_loss(anchor, positive, negative, *masks)
    dirty = [x.masked_fill(~mask[..., None], rubbish).requires_grad_() for x, mask in zip((positive, negative), masks)]
    loss = nearid_loss(anchor, *dirty, *masks)
    loss.backward()
    assert loss == clean and all(x.grad.isfinite().all() and not x.grad[~m].any() for x, m in zip(dirty, masks))


def test_order_of_rows_and_slots_does_not_matter():
    draw = torch.Generator().manual_seed(3)
    anchor, positive, negative = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((6, 8), (6, 2, 8), (6, 3, 8)))
    masks = torch.rand(6, 2, generator=draw) < 0.7, torch.rand(6, 3, generator=draw) < 0.7
    loss, rows = nearid_loss(anchor, positive, negative, *masks), torch.randperm(6, generator=draw)
    moved = nearid_loss(anchor[rows], positive[rows], negative[rows], *(mask[rows] for mask in masks))
    swapped = nearid_loss(anchor, positive.flip(1), negative.flip(1), *(mask.flip(1) for mask in masks))
    assert abs(moved - loss) < 1e-12 and abs(swapped - loss) < 1e-12


def test_two_processes_train_what_one_does(tmp_path, monkeypatch):
    "Heads on frozen patches, batches of 7 rows on two ranks (3 + 4), a last batch of 5"
    from facenb.params import read_train
    from facenb.submit import notebook_defaults
    from facenb.train import open_experiment, train
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    write_objects(tmp_path / "nearid_demo", train=12, val=2, test=2, size=16, mtg=(7, 2))
    found = []
    for processes in (1, 2):
        values = {"loss": "nearid", "data": "nearid_demo", "pairs": 7, "steps": 6, "device": "cpu", "threads": 1, "processes": processes,
                  "masking": "0.5 0.2 0.6", "optimizer": "sgd", "lr": 0.1}  # AdamW divides rounding by rounding where a gradient is 0
        of = open_experiment(*read_train(notebook_defaults() | values))
        (tmp_path / str(processes)).mkdir()
        found.append(train(of, tmp_path / str(processes), {}, of.accelerator() if processes == 1 else None))
    one, two = ({name: p.detach() for name, p in of.network.named_parameters() if p.requires_grad} for of in found)
    assert one.keys() == two.keys() and max((one[name] - two[name]).abs().max() for name in one) < 1e-6
    assert np.allclose(found[0].history.loss, found[1].history.loss, atol=1e-6)
    start = dict(of.network().named_parameters())
    assert max((one[name] - start[name]).abs().max() for name in one) > 1e-3


def test_demo_runs_from_one_command(tmp_path):
    "papermill with nothing but a loss and a data set"
    write_objects(tmp_path / "data" / "nearid_demo", train=40, val=4, test=8, mtg=(8, 4))
    done = papermill(tmp_path / "out.ipynb", "-p", "loss", "nearid", "-p", "data", "nearid_demo", "-p", "epochs", "2", "-r", "device", "cpu",
                     capture_output=True, text=True, timeout=300, env=os.environ | {"DATA_DIR": str(tmp_path / "data"), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads(next((tmp_path / "data" / "runs").glob("*/record.json")).read_text())
    assert record["parameters"]["backbone"] == "siglip2_tiny" and record["parameters"]["train"] == "head"
    assert {"ssr", "pa", "pa_pub", "unseen_ssr", "sdxl_ssr", "mtg_mo", "cosine_distractor"} <= set(record["metrics"])
    folder = next((tmp_path / "data" / "runs").glob("*/record.json")).parent
    torch.manual_seed(record["parameters"]["seed"])  # the frozen weights are random: those of the run
    start, trained = build_backbone("siglip2_tiny", train="head"), read_run(folder)
    told = load_head(start, folder)["facts"]
    with pytest.raises(WeightsError, match="this network has"):
        load_head(build_backbone("siglip2_tiny", train="head"), folder)
    assert all(torch.equal(a, b) for a, b in zip(start.vision.head.parameters(), trained.vision.head.parameters(), strict=True))
    assert told["loss"] == "nearid" and told["alpha"] == 0.5 and told["fingerprint"] == record["parameters"]["fingerprint"]
    scorer = nearid_scorer(folder)
    tuples = open_nearid(tmp_path / "data" / "nearid_demo", ("sdxl",), "test")
    table = score_tuples(scorer, tuples, "sdxl")
    again = margins(table[["sim_01", "sim_02", "sim_12"]].to_numpy(), table[[f"cross_{d}{d}" for d in range(3)]].to_numpy())
    assert again["ssr"] == record["metrics"]["sdxl_ssr"] and abs(again["pa"] - record["metrics"]["sdxl_pa"]) < 1e-9
    assert record["counts"]["test_rows"] == 8 and record["counts"]["network_parameters_trained"] > 1000
