"""Two and three processes over whole runs: what one process learns, keeps, skips, stores and judges."""
import io
import os
import re
import shutil
import sys
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn

from accelerate.optimizer import AcceleratedOptimizer
from facenb import gather, processes, sharded, step
from facenb.backbones import Backbone
from facenb.checkpoint import CheckpointError
from facenb.demo import demo_split, demo_store
from facenb.faces import FaceDataset
from facenb.interface import LOSSES
from facenb.judge import embed_over, judge
from facenb.loop import Keeper, Training
from facenb.optimise import Recipe
from facenb.pairs import all_pairs
from facenb.processes import group_of, make_accelerator, whole_state
from facenb.registry import build_loss, loss_settings
from facenb.sampler import PairSampler
from facenb.step import Trainer
from facenb.zoo import build_backbone

SIZE, DIM, PEOPLE, PAIRS, STEPS = 24, 16, 30, 10, 20
CLOSE = 1e-6  # what the contract asks of float64 and float32 alike


# parts of a run

class Plain(Backbone):
    "No batch statistics; embeddings that are not numbers in some steps of one rank, and dropout, if asked"

    def __init__(self, dropout: float = 0.0, broken: tuple[int, ...] = ()):
        super().__init__(SIZE, DIM)
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 5, 4), nn.GELU(), nn.Flatten(), nn.LayerNorm(200),
                                    nn.Linear(200, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, DIM))
        self.broken, self.calls = broken, 0

    def extract(self, faces):
        self.calls += self.training
        z = self.layers(faces.to(self.layers[0].weight.dtype))
        return z * torch.nan if self.training and self.calls in self.broken else z


@cache
def faces_of(folder: Path) -> FaceDataset:
    store = demo_store(folder / "demo.lmdb")
    return FaceDataset(store, SIZE, demo_split(store)[0], keep=True)


def begin(folder, world=1, loss="infonce", settings={}, network=Plain, dtype=torch.float64, keeper=None,
          evaluate=None, pairs=PAIRS, **recipe) -> Training:
    "A run of twenty steps, this process being one of `world`"
    accelerator = make_accelerator(0, "cpu", threads=1, world=world)
    net = network().to(dtype)
    head = build_loss(loss, PEOPLE, DIM, **loss_settings(loss, demo=True) | settings).to(dtype)
    faces, recipe = faces_of(folder), {"lr": 0.05, "steps": STEPS} | recipe
    sampler = PairSampler(faces.labels, pairs, 0, accelerator.process_index, world)
    return Training(net, head, faces, sampler, Recipe(epochs=9, **recipe), accelerator, 0, keeper, evaluate)


def result(of: Training) -> dict:
    "What is left of a run; all ranks must ask"
    backbone = of.accelerator.unwrap_model(of.trainer.backbone)
    scaler = of.accelerator.scaler
    return {"backbone": {name: value.clone() for name, value in backbone.state_dict().items()},
            "loss": {name: value.clone() for name, value in whole_state(of.loss).items()},
            "history": of.history.to_dict("list"), "step": of.journal.step, "scale": scaler.get_scale() if scaler else 1.0}


def learn(*args, **options) -> dict:
    of = begin(*args, **options)
    state = of.run()
    return result(of) | {"state": state}


def distance(one: dict, other: dict) -> float:
    "Largest difference of a weight, class centre or buffer; names and shapes must agree"
    assert one["loss"].keys() == other["loss"].keys() and one["backbone"].keys() == other["backbone"].keys()
    return max(float((value.double() - other[part][name].double()).abs().max())
               for part in ("backbone", "loss") for name, value in one[part].items())


def apart(one: dict, other: dict) -> dict[str, float]:
    "Largest relative difference in each column of the history"
    assert one.keys() == other.keys()
    return {name: float(np.max(np.abs(np.subtract(one[name], other[name])) / (1 + np.abs(other[name])))) for name in one}


# what is learnt

WITHOUT_DROPOUT = {"coreface": {"settings": {"dropout": 0.0}}}
TWENTY = ("infonce", "arcface", "hybrid", "adaface", "magface", "subcentre", "softmax", "coreface", "supcon")
RUNS = {name: {"loss": name} | WITHOUT_DROPOUT.get(name, {}) | ({} if name in TWENTY else {"steps": 5}) for name in LOSSES} | {
    "cosface+supcon": {"loss": "cosface+supcon"},
    "softmax+infonce": {"loss": "softmax+infonce", "clip": 0.5},
    "temperature": {"settings": {"learn_temperature": True}, "clip": 0.5},
    "clipped": {"loss": "arcface", "clip": 0.05},
    "accumulated": {"accumulate": 2},
    "accumulated arcface": {"loss": "arcface", "accumulate": 2, "clip": 0.2},
    "adamw": {"loss": "arcface", "optimizer": "adamw", "lr": 0.003, "clip": 0.2, "decay_norms": False},
    "adamw softmax": {"loss": "softmax", "optimizer": "adamw", "lr": 0.003},
    "plain descent": {"loss": "hybrid", "momentum": 0.0, "weight_decay": 0.0},
    "float32 infonce": {"dtype": torch.float32},
    "float32 arcface": {"loss": "arcface", "dtype": torch.float32},
    "float32 hybrid": {"loss": "hybrid", "dtype": torch.float32},
    "transformer": {"loss": "hybrid", "network": partial(build_backbone, "timm:test_vit", SIZE, DIM), "dtype": torch.float32,
                    "lr": 0.01, "steps": 8},
    "chunks": {"loss": "hybrid", "augment": 0.0, "chunk": 4},
}
WHOLE = {"chunks": {"chunk": 0}}  # chunks have no lights of their own without augmentation
THREE = ("infonce", "supcon", "softmax", "arcface", "adaface", "coreface", "cosface+supcon", "softmax+infonce", "temperature", "clipped",
         "accumulated arcface", "chunks", "float32 arcface")  # with shares that differ; all of them take a minute
MUTATIONS = {  # a mistake, and a run that must notice
    "gradients of gathered faces without W": ("supcon", lambda: patch.object(
        gather._GatherRows, "backward", staticmethod(lambda ctx, g: (g[ctx.first:ctx.first + ctx.rows], None, None)))),
    "own negatives": ("infonce", lambda: patch("facenb.loop.spread_loss", lambda loss, *_: loss)),
    "copies of a temperature drift apart": ("temperature", lambda: patch.object(step, "average_gradients", lambda *_: None)),
    "copies of class weights drift apart": ("softmax", lambda: patch.object(step, "average_gradients", lambda *_: None)),
    "a norm of own centres alone": ("clipped", lambda: patch.object(step, "sum_over", own_spread)),
    "lights of the first faces": ("arcface", lambda: patch.object(
        Trainer, "embed", lambda self, pixels, first, images, embed=Trainer.embed: embed(self, pixels, 0, images))),
    "gradients of own centres alone": ("arcface", lambda: patch.object(sharded, "_SumGradient", Same)),
}
OF_THREE = {
    "small shares weigh as much as large ones": ("softmax", lambda: patch.object(processes, "rank_share", lambda *_: 1.0)),
}


def own_spread(numbers, group, device, sum_over=step.sum_over):
    if len(numbers) != 3:  # loss, wish, square of the norm
        return sum_over(numbers, group, device)
    return [*sum_over(numbers[:2], group, device), numbers[2]]


class Same:
    @staticmethod
    def apply(z, group):
        return z


# where runs stop and go on

ENDINGS = {"infonce": {}, "arcface": {"loss": "arcface"}, "hybrid": {"loss": "hybrid", "optimizer": "adamw", "lr": 0.003},
           "subcentre": {"loss": "subcentre", "clip": 0.2}, "softmax": {"loss": "softmax"},
           "adaface+supcon": {"loss": "adaface+supcon", "accumulate": 2},
           "temperature": {"settings": {"learn_temperature": True}}}
BOUND = {"batch normalisation": {"network": partial(build_backbone, "small", SIZE, DIM), "dtype": torch.float32},
         "dropout": {"network": partial(Plain, 0.3)}, "chunks": {"chunk": 4}, "coreface": {"loss": "coreface"}}


class Asked(Keeper):
    "One rank asks for an end after some steps of this start"

    def __init__(self, folder, after=0, asks=True, **parameters):
        super().__init__(folder, parameters)
        self.left, self.asks = after, asks

    def wants(self):
        self.left -= 1
        return 2 if self.left == 0 and self.asks else 0


def partly(folder: Path, world: int, before: str, name: str, at: int = 7) -> None:
    "Leave a run that was stopped in folder / before / name"
    of = begin(folder, world, keeper=Asked(folder / before / name, at), **(ENDINGS | BOUND)[name])
    assert of.run() == "stopped" and of.journal.step == at


def go_on(folder: Path, world: int, before: str, name: str, **options) -> dict:
    "End a copy of what `partly` left"
    copy = folder / f"{before}-{world}" / name
    if int(os.environ.get("RANK", 0)) == 0:
        shutil.copytree(folder / before / name, copy)
    if world > 1:
        torch.distributed.barrier()
    return learn(folder, world, keeper=Asked(copy), **(ENDINGS | BOUND)[name] | options)


def refused(*args) -> str:
    try:
        go_on(*args)
    except CheckpointError as error:
        return str(error)
    return ""


# steps that one rank alone spoils

BROKEN, BROKEN_RUNS = (3, 4, 17), ("infonce", "arcface", "adaface", "softmax", "coreface", "hybrid")


def broken(folder: Path, world: int, name: str, here: bool, **options) -> dict:
    return learn(folder, world, network=partial(Plain, 0.0, BROKEN if here else ()), **RUNS[name] | options)


def broken_gradient(folder: Path, world: int, here: bool, scale: float = 0.0, name: str = "arcface") -> dict:
    "Of the class centres, after the third batch; with a scale as in fp16"
    of, calls = begin(folder, world, clip=1.0, **RUNS[name]), []
    if scale:
        scaler = of.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=5)
        of.trainer.optimizer = AcceleratedOptimizer(of.trainer.optimizer.optimizer, scaler=scaler)
        of.accelerator._optimizers = [of.trainer.optimizer]

    def add(trainer, *args, add=Trainer.add):
        add(trainer, *args)
        calls.append(None)
        if here and len(calls) == 3:
            next(trainer.loss.parameters()).grad[0] = torch.nan
    with patch.object(Trainer, "add", add):
        of.run()
    return result(of)


def stops(folder: Path, world: int, rank: int) -> dict:
    "A network with dropout, left alone, stopped by rank 0 twice, and not stopped by the last rank"
    where, options = folder / f"stops-{world}", {"network": partial(Plain, 0.3), "loss": "coreface"}
    alone, states = learn(folder, world, **options), []
    for after in (4, 9, 0):
        torch.rand(3 + rank + after), np.random.rand(after)  # whatever happened to the generators
        of = begin(folder, world, keeper=Asked(where, after, asks=rank == 0), **options)
        states.append([of.run(), of.journal.step])
    ignored = begin(folder, world, keeper=Asked(folder / f"ignored-{world}", 4, asks=rank == world - 1), **options)
    return {"alone": alone, "states": states, "end": result(of), "ignored": [ignored.run(), ignored.journal.step]}


# judging, progress, batches

def pictures(folder: Path):
    "All 400 faces, and all their pairs as a set that uses them"
    store = demo_store(folder / "demo.lmdb")
    everything = np.arange(len(store))
    return FaceDataset(store, SIZE).all_pixels(), [(all_pairs(store.labels, everything, "all"), everything)]


def judged(folder: Path, group) -> dict:
    pixels, sets = pictures(folder)
    torch.manual_seed(5)
    network = build_backbone("small", SIZE, DIM)
    rows, score = judge(network, [(pixels, sets)], group=group)
    few = [torch.from_numpy(embed_over(network, pixels[:n], True, group, 16)) for n in (1, 16, 17, 100)]
    return {"rows": rows, "score": score, "embeddings": few}


def judged_in_training(folder: Path, world: int) -> dict:
    "Batch statistics, of which each rank has its own"
    pixels, sets = pictures(folder)
    of = begin(folder, world, network=partial(build_backbone, "small", SIZE, DIM), dtype=torch.float32, evaluate_every=1)
    of.evaluate = partial(judge, benchmarks=[(pixels, sets)], group=group_of(of.accelerator))
    of.run()
    return result(of) | {"eer": of.evaluations.eer.tolist()}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def bar(folder: Path, world: int, kind=Terminal) -> str:
    with patch.object(sys, "stderr", kind()) as said:
        learn(folder, world, steps=4, accumulate=2)
        return said.getvalue()


def batches(folder: Path, rank: int, world: int) -> list[list[list[int]]]:
    "Of two epochs"
    sampler = PairSampler(faces_of(folder).labels, PAIRS, 0, rank, world)
    epochs = []
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    return epochs


# the ranks

def on_a_rank(rank: int, group, folder: Path) -> dict:
    "Everything that needs several processes, which take seconds to start"
    world = gather.ranks(group)[1]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # where nobody looks: the group is there already
    here = rank == 1
    found = {
        "runs": {name: learn(folder, world, **RUNS[name]) for name in some(world, RUNS, THREE)},
        "mistakes": {name: with_mistake(folder, world, *of) for name, of in mistakes(world).items()},
        "broken": {name: broken(folder, world, name, here) for name in some(world, BROKEN_RUNS, BROKEN_RUNS[:2])},
        "broken gradient": broken_gradient(folder, world, here),
        "scaled": {name: broken_gradient(folder, world, here, 2.0**12, name) for name in some(world, SCALED, SCALED[:1])},
        "stops": stops(folder, world, rank),
        "continued": {name: go_on(folder, world, some(world, "one", "ranks-2"), name) for name in ENDINGS},
        "refused": {name: refused(folder, world, "one", name) for name in BOUND},
        "judged": judged(folder, group),
        "judged in training": judged_in_training(folder, world),
        "bar": bar(folder, world),
        "batches": batches(folder, rank, world),
    }
    for name in ENDINGS | BOUND if world == 2 else ():  # for three or one to go on with
        partly(folder, world, "ranks-2", name)
    return found


def some(world: int, all_of, few):
    return all_of if world == 2 else few


SCALED = ("arcface", "hybrid", "softmax")


def mistakes(world: int) -> dict:
    return MUTATIONS if world == 2 else OF_THREE


def with_mistake(folder: Path, world: int, run: str, mistake) -> dict:
    with mistake():
        return learn(folder, world, **RUNS[run])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "Demo faces, and runs that one process began"
    folder = tmp_path_factory.mktemp("processes")
    faces_of(folder)
    for name in ENDINGS | BOUND:
        partly(folder, 1, "one", name)
    yield folder
    faces_of.cache_clear()


@pytest.fixture(scope="module")
def two(folder):
    return run_ranks(on_a_rank, 2, folder)


@pytest.fixture(scope="module")
def three(folder, two):
    return run_ranks(on_a_rank, 3, folder)  # 6, 6 and 8 faces of a batch


@pytest.fixture(params=["two", "three"])
def ranks(request):
    return request.getfixturevalue(request.param)


def over(all_of, few):
    "Every name with two ranks, a few with three"
    return pytest.mark.parametrize("ranks, name", [*(("two", name) for name in all_of), *(("three", name) for name in few)],
                                   indirect=["ranks"])


@pytest.fixture(scope="module")
def alone(folder):
    "What one process learns in a run of RUNS; each is run once"
    return cache(lambda name, **options: learn(folder, 1, **RUNS[name] | WHOLE.get(name, {}) | options))


# what is shown

@over(RUNS, THREE)
def test_ranks_learn_what_one_process_learns(ranks, alone, name):
    "Twenty steps, five of losses that only have another formula, with pair sampler and augmentation: weights, centres, history"
    expected, close = alone(name), CLOSE
    for rank in ranks:
        found = rank["runs"][name]
        largest = max(float(value.abs().max()) for part in ("backbone", "loss") for value in expected[part].values())
        if "float32" in name or name == "transformer":  # of the largest weight, by twenty roundings and sums in another order
            close = CLOSE * max(1.0, largest)
        assert distance(found, expected) < close
        rows = apart(found["history"], expected["history"])
        assert {name: far for name, far in rows.items() if far > CLOSE and not (name == "contrastive_hits" and close > CLOSE)} == {}
        assert found["history"]["loss"] == ranks[0]["runs"][name]["history"]["loss"] and found["step"] == RUNS[name].get("steps", STEPS)


@pytest.mark.parametrize("mistake", MUTATIONS | OF_THREE)
def test_mistakes_would_be_noticed(two, three, alone, mistake):
    run, ranks = (MUTATIONS | OF_THREE)[mistake][0], two if mistake in MUTATIONS else three
    assert max(distance(rank["mistakes"][mistake], alone(run)) for rank in ranks) > 1000 * CLOSE


@pytest.mark.parametrize("name", RUNS)
def test_spread_losses_are_kept_whole(two, name):
    "A run of several processes leaves what the loss of one process loads, strictly"
    of = RUNS[name].get("loss", "infonce")
    loss = build_loss(of, PEOPLE, DIM, **loss_settings(of, demo=True) | RUNS[name].get("settings", {}))
    loss.load_state_dict(two[0]["runs"][name]["loss"], strict=True)


@over(BROKEN_RUNS, BROKEN_RUNS[:2])
def test_a_step_that_fails_on_one_rank_is_left_out_by_all(ranks, folder, name):
    expected = broken(folder, 1, name, True)
    assert expected["history"]["skipped"] == [2, 1]
    for rank in ranks:
        assert rank["broken"][name]["history"]["skipped"] == [2, 1] and rank["broken"][name]["step"] == STEPS
        assert distance(rank["broken"][name], expected) < CLOSE


def test_a_gradient_that_fails_on_one_rank_is_left_out_by_all(ranks, folder):
    expected = broken_gradient(folder, 1, True)
    for rank in ranks:
        assert rank["broken gradient"]["history"]["skipped"] == [1, 0]
        assert distance(rank["broken gradient"], expected) < CLOSE


@over(SCALED, SCALED[:1])
def test_scales_of_half_precision_stay_in_step(ranks, folder, name):
    "2^12, halved by the third step and doubled after every five: 2^14; a power of two changes no weight"
    expected = broken_gradient(folder, 1, True, name=name)
    for rank in ranks:
        assert (rank["scaled"][name]["scale"], rank["scaled"][name]["history"]["skipped"]) == (2.0**14, [1, 0])
        assert distance(rank["scaled"][name], expected) < CLOSE


def test_all_ranks_stop_where_rank_0_asks_and_go_on_bit_for_bit(ranks):
    for rank in ranks:
        found = rank["stops"]
        assert found["states"] == [["stopped", 4], ["stopped", 13], ["done", STEPS]] and found["ignored"] == ["done", STEPS]
        assert distance(found["end"], found["alone"]) == 0
        assert found["end"]["history"] == found["alone"]["history"]


@over(ENDINGS, ENDINGS)
def test_more_processes_go_on(ranks, folder, name):
    "Two with what one began, three with what two began"
    expected = learn(folder, 1, **ENDINGS[name])
    for rank in ranks:
        found = rank["continued"][name]
        assert (found["state"], found["step"]) == ("done", STEPS)
        assert distance(found, expected) < CLOSE and max(apart(found["history"], expected["history"]).values()) < CLOSE


@pytest.mark.parametrize("name", ENDINGS)
def test_one_process_goes_on_with_what_two_began(two, folder, name, capsys):
    found, expected = go_on(folder, 1, "ranks-2", name), learn(folder, 1, **ENDINGS[name])
    assert "2 processes began this run, 1 go on: equal up to rounding" in capsys.readouterr().out
    assert distance(found, expected) < CLOSE and max(apart(found["history"], expected["history"]).values()) < CLOSE


REASONS = {"batch normalisation": "batch normalisation has the statistics of each process (see sync_batchnorm)",
           "dropout": "each process draws its own dropout", "coreface": "each process draws its own dropout",
           "chunks": "each process cuts its faces into chunks of its own (chunk=4)"}


@pytest.mark.parametrize("name", BOUND)
def test_another_number_of_processes_is_refused_by_name(two, three, folder, name):
    for world, rank in [*((2, rank) for rank in two), *((3, rank) for rank in three)]:
        assert f"written by 1 processes, here are {world}, which would learn something else: {REASONS[name]}" in rank["refused"][name]
    with pytest.raises(CheckpointError) as error:
        go_on(folder, 1, "ranks-2", name)
    assert REASONS[name] in str(error.value) and "Go on with 2 processes" in str(error.value)


def test_ranks_judge_as_one_process_bit_for_bit(ranks, folder):
    expected = judged(folder, None)
    for rank in ranks:
        assert rank["judged"]["rows"] == expected["rows"] and rank["judged"]["score"] == expected["score"]
        for found, of in zip(rank["judged"]["embeddings"], expected["embeddings"], strict=True):
            assert torch.equal(found, of)


def test_the_network_that_is_judged_is_the_one_that_is_kept(ranks, folder):
    "Ranks see other batches, hence have other statistics; those of rank 0 are stored"
    network = build_backbone("small", SIZE, DIM)
    network.load_state_dict(ranks[0]["judged in training"]["backbone"])
    score = judge(network, [pictures(folder)])[1]
    for rank in ranks:
        assert len(rank["judged in training"]["eer"]) == 2 and rank["judged in training"]["eer"][-1] == score
        assert distance(rank["judged in training"], ranks[0]["judged in training"]) == 0


def test_only_the_first_rank_shows_a_bar_and_only_to_a_terminal(ranks, folder):
    texts = [rank["bar"] for rank in ranks]
    assert re.search(r"160/160 \[\d\d:\d\d<\d\d:\d\d, +[\d.]+k? images/s, epoch 1, loss [\d.]+", texts[0]) and not any(texts[1:])
    assert bar(folder, 1, io.StringIO) == "" and "images/s" in bar(folder, 1)


def test_batches_of_ranks_are_those_of_one_process(ranks, folder):
    for epoch, expected in enumerate(batches(folder, 0, 1)):
        for parts in zip(expected, *(rank["batches"][epoch] for rank in ranks), strict=True):
            assert sum(parts[1:], []) == parts[0] and len(set(parts[0])) == 2 * PAIRS
    assert ranks[0]["batches"][0] != ranks[0]["batches"][1]
