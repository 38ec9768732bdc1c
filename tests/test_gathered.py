"""Contrastive losses over several ranks: value and gradients of one process with all faces."""
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F

from facenb.circle import Circle
from facenb.contrastive import NTXent, SupCon
from facenb.coreface import CoReFace
from facenb.gather import ContrastiveLoss
from facenb.hybrid import ArcFaceInfoNCE
from facenb.losses import InfoNCE, info_nce
from facenb.pairwise import NPair, SigLIP
from facenb.triplet import Triplet
from ranks import run_ranks


class PlainInfoNCE(ContrastiveLoss):
    "Every image picks its partner out of all others; the loss that table 3.12 was measured with"

    def contrast(self, z, labels):
        logits = (z @ z.T / 0.07).fill_diagonal_(-torch.inf)
        return F.cross_entropy(logits, torch.arange(len(z)) ^ 1), {}


LOSSES = {  # a new contrastive loss is tested by a line here
    "plain": PlainInfoNCE,
    "infonce": InfoNCE,
    "infonce, learned": lambda: InfoNCE(0.2, learn_temperature=True),
    "infonce, small temperature": lambda: InfoNCE(0.01),
    "supcon": SupCon,
    "ntxent": NTXent,
    "npair": NPair,
    "siglip": lambda: SigLIP(scale=5.0, bias=-2.0),
    "semi-hard": Triplet,
    "batch-all": lambda: Triplet(mining="batch-all"),
    "batch-hard": lambda: Triplet(mining="batch-hard"),
    "circle": lambda: Circle(gamma=16.0),
}
ROWS = {2: ([24, 24], [30, 18]), 4: ([12, 12, 12, 12], [20, 2, 16, 10])}  # pairs stay whole
CASES = [(name, world, counts) for world in ROWS for counts in ROWS[world] for name in LOSSES]


def faces() -> tuple[torch.Tensor, torch.Tensor]:
    "Input of the backbone, and who is seen: 24 pairs of 16 people, who come back on other ranks"
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(16, (24,), generator=random).repeat_interleave(2)
    people = torch.randn(16, 10, dtype=torch.float64, generator=random)
    return people[labels] + torch.randn(48, 10, dtype=torch.float64, generator=random), labels


def learn(name: str, rows: slice, group=None, counts=None) -> dict[str, torch.Tensor]:
    "Loss, what was seen, and the gradients of backbone and loss, for one process and its rows"
    images, labels = faces()
    backbone = torch.nn.Linear(10, 6, dtype=torch.float64)
    with torch.no_grad():
        backbone.weight.copy_(torch.randn(6, 10, generator=torch.Generator().manual_seed(1)))
        backbone.bias.fill_(0.1)
    loss = LOSSES[name]().double().gather_over(group, counts)
    value, seen = loss(backbone(images[rows]), labels[rows])
    value.backward()
    gradients = {key: p.grad for module in (backbone, loss) for key, p in module.named_parameters()}
    negatives = seen.get("negatives", torch.tensor(0.0))
    return {"loss": value.detach(), "negatives": negatives} | gradients


def two_parts(name: str, rows: slice, group=None) -> dict[str, torch.Tensor]:
    "The hybrids: class centres compare with the faces of the own rank, the rest with those of all"
    images, labels = faces()
    backbone = torch.nn.Linear(10, 6, bias=False, dtype=torch.float64)
    with torch.no_grad():
        backbone.weight.copy_(torch.randn(6, 10, generator=torch.Generator().manual_seed(1)))
    loss = {"hybrid": ArcFaceInfoNCE, "coreface": CoReFace}[name](16, 6, scale=8, margin=0.2, hybrid_weight=0.5).double()
    with torch.no_grad():
        for p in loss.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(2)))
    views = [images[rows], (images + images.roll(1, 1) / 4)[rows]] if name == "coreface" else [images[rows]]
    value, seen = loss.gather_over(group)(torch.cat([backbone(view) for view in views]), labels[rows].repeat(len(views)))
    value.backward()
    gradients = {key: p.grad for module in (backbone, loss) for key, p in module.named_parameters()}
    return {"loss": value.detach(), "negatives": seen["negatives"].clone(), "lead": seen.get("lead", torch.tensor(0.0))} | gradients


def collectives(rank: int, world: int, group) -> torch.Tensor:
    "How often InfoNCE calls each collective, forward and backward: all-gathers, and others"
    calls, kept = [], {}
    for name in ("all_gather_single", "all_gather_into_tensor", "all_gather", "all_reduce", "reduce_scatter_tensor",
                 "reduce_scatter", "broadcast", "all_to_all"):
        if kept.setdefault(name, getattr(torch.distributed, name, None)) is not None:
            def counted(*args, _name=name, **more):
                calls.append(_name)
                return kept[_name](*args, **more)
            setattr(torch.distributed, name, counted)
    size = 48 // world
    z = F.normalize(faces()[0][rank * size:(rank + 1) * size]).requires_grad_()
    info_nce(z, group=group).backward()
    for name, function in kept.items():
        if function is not None:
            setattr(torch.distributed, name, function)
    gathers = sum(name.startswith("all_gather") for name in calls)
    return torch.tensor([gathers, len(calls) - gathers])


def on_a_rank(rank: int, group) -> dict[str, dict[str, torch.Tensor]]:
    "All losses and row counts; gradients are averaged over the ranks, as data parallelism does"
    world, results = torch.distributed.get_world_size(group), {}
    results["collectives"] = collectives(rank, world, group)
    for counts in ROWS[world]:
        mine = slice(sum(counts[:rank]), sum(counts[:rank + 1]))
        equal = len(set(counts)) == 1
        for name in LOSSES:
            together = learn(name, mine, group, None if equal else counts)
            runs = {"all": together, "local": learn(name, mine)}
            for kind, run in runs.items():
                for key in sorted(run.keys() - {"loss", "negatives"}):  # one order on all ranks
                    torch.distributed.all_reduce(run[key], group=group)
                    run[key] /= world
                results[f"{kind} {name} {counts}"] = run
    size = 48 // world
    for name in ("hybrid", "coreface"):  # a mean over ranks of means, so with equal counts
        run = two_parts(name, slice(rank * size, (rank + 1) * size), group)
        for key in sorted(run):
            torch.distributed.all_reduce(run[key], group=group)
            run[key] /= world
        results[name] = run
    return results


@lru_cache
def ranks_learn(world: int) -> list[dict]:
    return run_ranks(on_a_rank, world)


@pytest.mark.parametrize("name, world, counts", CASES)
def test_ranks_learn_what_one_process_would(name, world, counts):
    whole = learn(name, slice(None))
    assert whole["weight"].norm() > 1e-3
    for run in ranks_learn(world):
        assert run[f"all {name} {counts}"].keys() == whole.keys()
        for key, value in run[f"all {name} {counts}"].items():
            gap = (value - whole[key]).norm()
            assert gap <= 1e-12 * whole[key].norm(), f"{key}: {value}, not {whole[key]}"


@pytest.mark.parametrize("world", ROWS)
def test_info_nce_gathers_twice_and_sends_no_gradient(world):
    assert [run["collectives"].tolist() for run in ranks_learn(world)] == [[2, 0]] * world


@pytest.mark.parametrize("world", ROWS)
@pytest.mark.parametrize("name", ["hybrid", "coreface"])
def test_hybrids_learn_what_one_process_would(name, world):
    whole = two_parts(name, slice(None))
    for run in ranks_learn(world):
        for key, value in run[name].items():
            assert (value - whole[key]).norm() <= 1e-12 * whole[key].norm(), key


@pytest.mark.parametrize("name, world, counts", CASES)
def test_without_gathering_another_loss_is_learnt(name, world, counts):
    "The counter-example: with negatives of the own rank alone, the gradient is another one"
    whole = learn(name, slice(None))["weight"]
    local = ranks_learn(world)[0][f"local {name} {counts}"]["weight"]
    size = (local.norm() / whole.norm()).item()
    cosine = F.cosine_similarity(local.flatten(), whole.flatten(), dim=0).item()
    print(f"{name}, rows {counts}: size {size:.3f}, cosine {cosine:.3f}")
    assert abs(size - 1) > 0.01 or cosine < 0.99


def test_learned_parameters_are_tested():
    "SigLIP's scale and bias have a gradient worth comparing"
    whole = learn("siglip", slice(None))
    assert whole["log_scale"].abs() > 1e-3 and whole["bias"].abs() > 1e-3
