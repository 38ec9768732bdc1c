"""The sharded head in two and four processes: what one process with the whole batch and all centres gives."""
import pytest
import torch
from ranks import run_ranks
from torch import nn

from facenb.gather import ranks
from facenb.margin import MarginHead
from facenb.sharded import ShardedHead

PEOPLE, DIM = 11, 6  # not divisible by the ranks


class Head(MarginHead):
    "A margin head with all that one can have: an extra, a penalty, sub-centres, numbers to report"

    def __init__(self, sub_centres=1):
        super().__init__(PEOPLE, DIM, 16.0, sub_centres)
        draw = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(PEOPLE * sub_centres, DIM, generator=draw, dtype=torch.float64))

    def extras(self, embeddings):
        length = embeddings.norm(dim=1)
        return (length / length.mean().detach(),)  # depends on the whole batch

    def target(self, own, length):
        return torch.cos(torch.arccos(own) + 0.2 * length)

    def penalty(self, embeddings):
        return 0.01 * embeddings.norm(dim=1).square().mean()

    def facts(self, length):
        return {"length": length.mean()}


def batch(counts):
    "Faces of all ranks through a layer that data parallelism shares, and labels"
    draw = torch.Generator().manual_seed(len(counts))
    faces = torch.randn(sum(counts), 4, generator=draw, dtype=torch.float64)
    layer = torch.randn(DIM, 4, generator=draw, dtype=torch.float64)
    return faces, layer, torch.randint(PEOPLE, (sum(counts),), generator=draw)


def step(head, faces, layer, labels):
    "Loss, gradients of the embeddings, the shared layer and the centres, numbers to report"
    layer = layer.clone().requires_grad_()
    embeddings = faces @ layer.T
    embeddings.retain_grad()
    loss, seen = head(embeddings, labels)
    loss.backward()
    return {"loss": loss.detach(), "embeddings": embeddings.grad, "layer": layer.grad,
            "weight": next(head.parameters()).grad, **seen}


def one_case(rank, group, counts, sub_centres, **options):
    world, start = ranks(group)[1], sum(counts[:rank])
    faces, layer, labels = batch(counts)
    head = ShardedHead(Head(sub_centres), group, counts=None if len(set(counts)) == 1 else counts, **options)
    mine = slice(start, start + counts[rank])
    found = step(head, faces[mine], layer, labels[mine])
    torch.distributed.all_reduce(found["layer"], group=group)
    found["layer"] /= world  # as data parallelism does
    return found | {"full": head.full_weight()}


def mistakes(rank, group):
    "What goes wrong on one rank is the same on all"
    z, labels = torch.ones(4, DIM, dtype=torch.float64), torch.arange(4) + 4 * (rank == 0)
    wrong, bad = labels.clone(), z.clone()
    if rank == 1:
        wrong[2], bad[2] = PEOPLE, torch.nan
    few = Head()
    few.num_people = 1
    return {"label": refusal(lambda: ShardedHead(Head(), group)(z, wrong)),
            "people": refusal(lambda: ShardedHead(few, group)),
            "nan": ShardedHead(Head(), group)(bad, labels)[0].detach()}


def refusal(run):
    try:
        run()
    except ValueError as error:
        return str(error)


SPLITS = {2: [[5, 5], [7, 2]], 4: [[4, 4, 4, 4], [3, 6, 1, 2]]}
WHOLE = [(split, sub_centres) for split in (0, 1) for sub_centres in (1, 3)]


def one_rank(rank, group):
    splits = SPLITS[ranks(group)[1]]
    return {"whole": [one_case(rank, group, splits[split], sub_centres, chunk_rows=4) for split, sub_centres in WHOLE],
            "sampled": one_case(rank, group, splits[0], 2, sample_rate=0.5, seed=3),
            "mistakes": mistakes(rank, group)}


@pytest.fixture(scope="module", params=[2, 4])
def found(request):
    "What every rank found; the processes start once"
    return run_ranks(one_rank, request.param)


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", range(4), ids=[f"{'unequal' if s else 'equal'}-{k}" for s, k in WHOLE])
def test_ranks_equal_one_process(found, case):
    split, sub_centres = WHOLE[case]
    expected = step(Head(sub_centres), *batch(SPLITS[len(found)][split]))
    found = [rank["whole"][case] for rank in found]
    for rank in found:
        for key in ("loss", "layer", "hits", "length"):
            same(rank[key], expected[key])
        same(rank["full"], Head(sub_centres).weight.detach())
    same(torch.cat([rank["embeddings"] for rank in found]), len(found) * expected["embeddings"])  # to be averaged
    same(torch.cat([rank["weight"] for rank in found]), expected["weight"])


def test_sampled_centres(found):
    "The loss is that of the people drawn, all who are present among them; others have no gradient"
    faces, layer, labels = batch(SPLITS[len(found)][0])
    found = [rank["sampled"] for rank in found]
    gradient = torch.cat([rank["weight"] for rank in found]).unflatten(0, (PEOPLE, 2))
    taken = (gradient != 0).any(2).any(1)
    assert taken[labels].all() and taken.sum() < PEOPLE
    few = Head(2)
    few.num_people = int(taken.sum())
    few.weight.data = few.weight.data.unflatten(0, (PEOPLE, 2))[taken].flatten(0, 1)
    expected = step(few, faces, layer, (taken.cumsum(0) - 1)[labels])
    for rank in found:
        same(rank["loss"], expected["loss"])
        same(rank["layer"], expected["layer"])
    same(gradient[taken].flatten(0, 1), expected["weight"])


def test_mistakes_on_one_rank(found):
    for rank in found:
        assert rank["mistakes"]["label"].startswith("label 11 in row 6 has no class centre: there are 11")
        assert rank["mistakes"]["people"] == f"num_people=1 are too few for {len(found)} ranks"
        assert rank["mistakes"]["nan"].isnan()
