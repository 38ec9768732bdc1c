"""The samplers from outside: every promise on awkward sets, at full size, on two processes, and against old defects."""
import hashlib
import multiprocessing

import numpy as np
import pytest
import torch

from facenb.sampler import (GroupSampler, PairSampler, SamplerError, deal, longest_epoch, ms1m_like_labels,
                            swap_clashes)

rng = np.random.default_rng(7)
SETS = {
    "demo": np.repeat(np.arange(30), 10),
    "two images each": np.repeat(np.arange(50), 2),
    "one rich": np.r_[np.zeros(5000, int), np.repeat(np.arange(1, 60), 6)],
    "three rich": np.repeat(np.arange(100), np.r_[[900] * 3, rng.integers(2, 12, 97)]),
    "long tail": rng.permutation(ms1m_like_labels(people=200, images=13_000)),
    "singles among them": rng.permutation(np.r_[np.arange(1000, 1400), np.repeat(np.arange(40), 9)]),
    "nearly equal": np.repeat(np.arange(60), rng.integers(9, 14, 60)),
    "one person": np.zeros(7, int),
    "numbers far apart": np.repeat([-10**12, 3, 10**15], [4, 5, 6]),
}


def check(labels, plan, people, images):
    "Full batches, nobody twice in one, no image twice"
    assert plan.ndim == 2 and plan.shape[1] == people * images
    who = np.asarray(labels)[plan].reshape(len(plan), people, images)
    assert (who == who[..., :1]).all(), "somebody else among a person's images"
    assert (np.diff(np.sort(who[..., 0], axis=1)) > 0).all(), "a person twice in a batch"
    assert np.bincount(plan.ravel()).max() == 1, "an image twice in an epoch"


@pytest.mark.parametrize("images", [1, 2, 3, 5])
@pytest.mark.parametrize("name", SETS)
def test_promises(name, images):
    labels = SETS[name]
    groups = np.unique(labels, return_counts=True)[1] // images
    able = np.count_nonzero(groups)
    for people in sorted({1, 2, able // 3, able - 1, able} & set(range(1, able + 1))):
        sampler, plans = GroupSampler(labels, people, images, seed=2), []
        for epoch in range(4):
            sampler.set_epoch(epoch)
            plan = sampler.plan()
            check(labels, plan, people, images)
            assert len(plan) == len(sampler) == longest_epoch(groups, people)
            plans.append(plan.tobytes())
        assert len(set(plans)) == 4 or images == people == able == 1
        sampler.set_epoch(0)
        assert sampler.plan().tobytes() == plans[0]
        assert GroupSampler(labels, people, images, seed=3).plan().tobytes() != plans[0]


def test_pairs_are_groups_of_two():
    labels = SETS["long tail"]
    assert (PairSampler(labels, 20, seed=4).plan() == GroupSampler(labels, 20, 2, seed=4).plan()).all()


@pytest.mark.parametrize("pairs, digest", [(90, "6e98e5037d9f2a09"), (400, "2b69635663661112")])
def test_plan_is_pinned(pairs, digest):
    "A resumed run may use another machine or release: there the plan, swaps (400) or none (90), must be this one, too"
    plan = PairSampler(np.repeat(np.arange(500), np.arange(500) % 37 + 1), pairs, seed=1).plan()
    assert hashlib.sha256(plan.astype("<i4").tobytes()).hexdigest()[:16] == digest


@pytest.mark.parametrize("name, pairs, world", [("demo", 30, 2), ("long tail", 24, 4), ("long tail", 21, 3)])
def test_ranks_share_one_plan(name, pairs, world):
    labels = SETS[name]
    for epoch in range(2):
        parts = [PairSampler(labels, pairs, 5, rank, world) for rank in range(world)]
        for sampler in parts:
            sampler.set_epoch(epoch)
        whole = PairSampler(labels, pairs, 5)
        whole.set_epoch(epoch)
        together = [sum(batches, []) for batches in zip(*parts, strict=True)]
        assert together == list(whole) and {len(sampler) for sampler in parts} == {len(whole)}


@pytest.mark.parametrize("people, images, pairs", [(194, 2, 64), (322, 2, 64), (400, 4, 128)])
def test_ranks_end_together_where_the_published_sampler_hung(people, images, pairs):
    "194 people gave [2, 1] batches on two ranks, 322 gave [3, 2]: DDP waits for ever"
    labels = np.repeat(np.arange(people), images)
    counts = [sum(1 for _ in PairSampler(labels, pairs, 0, rank, 2)) for rank in range(2)]
    assert counts == [people * images // 2 // pairs] * 2


def test_resume_at_any_batch_with_another_number_of_ranks():
    labels = SETS["three rich"]
    sampler = PairSampler(labels, 12, seed=8)
    sampler.set_epoch(3)
    whole = list(sampler)
    for start in (0, 1, len(whole) // 2, len(whole)):
        ranks = [PairSampler(labels, 12, 8, rank, 2) for rank in range(2)]
        for rank in ranks:
            rank.set_epoch(3, start=start)
            assert len(rank) == len(whole)
        assert [a + b for a, b in zip(*ranks, strict=True)] == whole[start:]
    ranks[0].set_epoch(3)
    assert len(list(ranks[0])) == len(whole), "start is forgotten by the next set_epoch"
    for wrong in (-1, len(whole) + 1, 0.5):
        with pytest.raises(SamplerError, match="start="):
            sampler.set_epoch(3, start=wrong)
    with pytest.raises(SamplerError, match="epoch=-1"):
        sampler.set_epoch(-1)


def test_iteration_is_fixed_when_asked_for():
    sampler = PairSampler(SETS["demo"], 10)
    batches, expected = iter(sampler), list(sampler)
    sampler.set_epoch(1)
    assert list(batches) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_gives_the_plan(workers):
    sampler = PairSampler(SETS["demo"], 10, seed=1)
    loader = torch.utils.data.DataLoader(range(300), batch_sampler=sampler, num_workers=workers)
    sampler.set_epoch(2, start=4)
    assert torch.stack(list(loader)).tolist() == sampler.plan()[4:].tolist()
    assert len(loader) == len(sampler) == 15


def one_rank(rank, folder, queue):
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    labels, seen = SETS["three rich"], []
    sampler = PairSampler(labels, 40, seed=9, rank=rank, world_size=2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in sampler:
            both = [torch.zeros(40, dtype=torch.int64) for _ in range(2)]
            torch.distributed.all_gather(both, torch.tensor(batch))
            seen.append(torch.cat(both).tolist())
    if rank == 0:
        queue.put(seen)
    torch.distributed.destroy_process_group()


def test_two_processes_meet_nobody_twice(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    ranks = [spawn.Process(target=one_rank, args=(rank, tmp_path, queue)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        seen = queue.get(timeout=120)
    finally:
        for process in ranks:
            process.join(20)
            process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    sampler, expected = PairSampler(SETS["three rich"], 40, seed=9), []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        check(SETS["three rich"], sampler.plan(), 40, 2)
        expected += sampler.plan().tolist()
    assert seen == expected


def test_any_table_can_be_mended():
    "The proof asks nothing of the table: random ones, sorted ones, with and without pairs to spare"
    for seed in range(400):
        draw = np.random.default_rng(seed)
        batches, pairs = draw.integers(1, 9, 2)
        people = int(draw.integers(pairs, 3 * pairs + 1))
        pairs_of = draw.integers(0, batches + 1, people)
        if longest_epoch(pairs_of, pairs) < batches:
            pairs_of[:pairs] = batches
        person = np.repeat(np.arange(people), pairs_of)
        table = draw.permutation(len(person)) if seed % 2 else np.arange(len(person))
        table = table[:batches * pairs].reshape(batches, pairs)
        clashes = sum(pairs - len(np.unique(row)) for row in person[table])
        before, swaps = np.sort(table, axis=None), swap_clashes(table, person, draw)
        assert swaps <= clashes and (np.sort(table, axis=None) == before).all()
        assert all(len(np.unique(row)) == pairs for row in person[table])


def test_all_pairs_needed_and_none_to_spare():
    "sum of min(m, B) = B P with unequal people: one solution in many, and it is found"
    for seed in range(100):
        draw = np.random.default_rng(seed)
        who = np.stack([draw.permutation(15)[:8] for _ in range(12)])  # an epoch to be found again
        pairs_of = np.bincount(who.ravel(), minlength=15)
        table, person, _ = deal(pairs_of, 8, draw)
        assert table.shape == (12, 8) and all(len(set(row)) == 8 for row in person[table].tolist())
        assert (np.bincount(person[table].ravel(), minlength=15) == pairs_of).all()


@pytest.mark.parametrize("labels", [np.float32([0, 0, 1, 1]), [0, 0, 1, 1], np.uint8([4, 4, 9, 9]),
                                    torch.tensor([0, 0, 1, 1])])
def test_labels_of_any_whole_type(labels):
    sampler = PairSampler(labels, 2)
    assert sampler.labels.dtype.kind in "iu" and np.array_equal(sampler.labels, np.asarray(labels))
    check(sampler.labels, sampler.plan(), 2, 2)


@pytest.mark.parametrize("labels", [[0.5, 0.5], [np.nan, 0, 0], [np.inf, np.inf], [], [[0, 0]], 3, ["a", "a"],
                                    [None, None], [True, True], np.uint64([2**63, 2**63])])
def test_labels_that_are_none(labels):
    with pytest.raises(SamplerError, match="labels must"):
        PairSampler(labels, 1)


def test_too_many_images_for_32_bits():
    with pytest.raises(SamplerError, match="2\\*\\*31"):
        PairSampler(np.broadcast_to(np.int8(0), (2**31,)), 1)


@pytest.mark.parametrize("arguments, message", [
    (dict(pairs=31), "pairs=31, but 30 people have two images or more; choose pairs in 1..30"),
    (dict(pairs=0), "pairs=0 must be 1 or more"), (dict(pairs=1.5), "pairs=1.5 must be a whole number"),
    (dict(pairs=2, world_size=3), "pairs=2 must be world_size=3 or more"),
    (dict(pairs=4, rank=2, world_size=2), "rank=2 lie in 0..1"), (dict(pairs=4, rank=-1), "rank=-1"),
    (dict(pairs=4, world_size=0), "world_size=0"), (dict(pairs=4, seed=-1), "seed=-1"),
    (dict(people=31, images=4), "people=31, but 30 people have 4 images or more; choose people in 1..30"),
    (dict(people=1, images=11), "0 people have 11 images or more; no batch"), (dict(people=1, images=0), "images=0"),
])
def test_sizes_that_cannot_be(arguments, message):
    with pytest.raises(ValueError) as error:
        (PairSampler if "pairs" in arguments else GroupSampler)(SETS["demo"], **arguments)
    assert message in str(error.value)


@pytest.fixture(scope="module")
def ms1m():
    return ms1m_like_labels()


@pytest.mark.parametrize("pairs, share", [(725, 0.99), (2049, 0.99), (8192, 0.99), (16384, 0.975)])
def test_coverage_at_the_size_of_ms1m(ms1m, pairs, share):
    sizes = np.bincount(ms1m)
    assert (len(ms1m), len(sizes), sizes.min(), sizes.max()) == (5_822_653, 85_742, 2, 603)
    plan = PairSampler(ms1m, pairs).plan()
    check(ms1m, plan, pairs, 2)
    assert plan.dtype == np.int32 and plan.size >= share * sizes[sizes >= 2].sum()


def test_coverage_of_groups_at_the_size_of_ms1m(ms1m):
    "An epoch can use at most the images that make whole groups; of those nearly all"
    plan = GroupSampler(ms1m, 1024, 4).plan()
    check(ms1m, plan, 1024, 4)
    assert plan.size >= 0.99 * (np.bincount(ms1m) // 4 * 4).sum()
