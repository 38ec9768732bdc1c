"""Checkpoints of killed writers, full and damaged disks, several ranks, and what comes back from them."""
import errno
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from facenb import checkpoint
from facenb.checkpoint import (CheckpointError, newest_checkpoint, pack, random_state, read_checkpoint, read_shards,
                               refuse_changes, set_random_state, unpack, write_checkpoint)

FORK = multiprocessing.get_context("fork")  # children do nothing that needs threads, and start in milliseconds


def bits(value) -> tuple:
    "A value as something that is equal only to itself: types, order and every bit"
    if isinstance(value, dict):
        return "dict", [(bits(key), bits(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [bits(item) for item in value]
    if isinstance(value, torch.Tensor):
        flat = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        return "tensor", str(value.dtype), tuple(value.shape), flat.numpy().tobytes()
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value).__name__, value.dtype.name, value.shape, value.tobytes()
    return type(value).__name__, repr(value)


def state(step: int) -> dict:
    "Wherever one looks in it, it is of this step"
    return {"step": step, "wide": torch.full((40, 50), step), "more": [torch.full((3,), float(step)), np.full(4, step)]}


def is_of(value: dict, step: int) -> bool:
    return bits(value) == bits(state(step))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# what comes back


@pytest.mark.parametrize("dtype", checkpoint.DTYPES.values(), ids=str)
def test_every_kind_of_number_in_every_shape_comes_back_bit_for_bit(tmp_path, dtype):
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (16 * 12,), dtype=torch.uint8).view(dtype)
    square = raw[:12].view(3, 4)
    value = {"all": raw, "scalar": raw[0], "none": raw[:0], "empty": raw[:0].view(0, 1).expand(0, 5), "turned": square.T,
             "strided": square[:, ::2], "same": square[1:], "repeated": raw[:1].expand(7), "again": square,
             "single": square[:1, 0], "column": square.T[:1, :1]}
    path = write_checkpoint(tmp_path, 0, value, value["turned"])
    _, _, shared, own = read_checkpoint(path)
    assert bits(shared) == bits(value) and bits(own) == bits(square.T)
    assert int.from_bytes((path / "shared.safetensors").read_bytes()[:8], "little") % 8 == 0, "numbers lie aligned"
    library = safetensors.torch.load_file(path / "shared.safetensors")
    assert {name: bits(tensor) for name, tensor in library.items()} == {name: bits(tensor) for name, tensor in value.items()}


def test_a_view_that_negates_comes_back_as_numbers(tmp_path):
    view = torch.complex(torch.zeros(1), torch.ones(1)).conj().imag
    assert view.is_neg() and view.is_contiguous()
    assert read_checkpoint(write_checkpoint(tmp_path, 0, view, None))[2].tolist() == [-1.0]


def test_what_comes_back_stays_when_the_files_go(tmp_path):
    path = write_checkpoint(tmp_path, 3, state(3), {"a": np.arange(5)})
    _, _, shared, own = read_checkpoint(path)
    shutil.rmtree(path)
    assert is_of(shared, 3)
    shared["wide"] += 1
    own["a"] += 1
    assert own["a"].tolist() == [1, 2, 3, 4, 5]


def test_random_nested_values_come_back():
    chance = random.Random(0)
    leaves = [None, True, False, 0, -7, 2**70, 0.1, -0.0, math.inf, -math.inf, math.nan, 5e-324, "", "$tuple", "é\n\ud800",
              torch.arange(3), np.float32(0.1), np.bool_(False), np.array(2, np.uint64), np.ones((2, 3))[:, ::2]]

    def tree(depth):
        kind = chance.choice(["leaf", "list", "tuple", "dict"]) if depth else "leaf"
        if kind == "dict":
            keys = ["a", "b", "a.b", "a'", "$x", "$tensor", "", "__metadata__", 0, -1, 2**65]
            return {key: tree(depth - 1) for key in chance.sample(keys, chance.randrange(5))}
        if kind == "leaf":
            return chance.choice(leaves)
        return (list if kind == "list" else tuple)(tree(depth - 1) for _ in range(chance.randrange(4)))

    for _ in range(500):
        value = tree(5)
        plain, tensors = pack(value)
        text = json.dumps(plain, allow_nan=False)
        assert bits(unpack(json.loads(text), tensors)) == bits(value)


@pytest.mark.parametrize("make", [
    lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9, weight_decay=5e-4),
    lambda weights: torch.optim.AdamW(weights, 0.01, weight_decay=0.1)], ids=["sgd", "adamw"])
def test_an_optimizer_goes_on_with_the_same_bits(tmp_path, make):
    def begin():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        groups = [{"params": [p for p in net.parameters() if p.ndim > 1]},
                  {"params": [p for p in net.parameters() if p.ndim < 2], "weight_decay": 0.0}]
        return net, make(groups)

    def train(net, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            net(torch.randn(5, 6)).square().mean().backward()
            optimizer.step()
        return bits([net.state_dict(), optimizer.state_dict()])

    wanted = train(*begin(), 8)
    net, optimizer = begin()
    train(net, optimizer, 5)
    path = write_checkpoint(tmp_path, 5, {"net": net.state_dict(), "optimizer": optimizer.state_dict()}, random_state())
    net, optimizer = begin()
    _, _, shared, own = read_checkpoint(path)
    net.load_state_dict(shared["net"])
    optimizer.load_state_dict(shared["optimizer"])
    set_random_state(own)
    assert train(net, optimizer, 3) == wanted


def test_every_generator_goes_on_where_it_stood(tmp_path):
    "Also those that keep a second number for the next call"
    generators = {"augment": torch.Generator().manual_seed(9)}
    draw = lambda some: [random.gauss(0, 1), np.random.randn(), np.random.rand(), torch.randn(3), torch.rand(2),
                         torch.randn(17, generator=some["augment"])]
    draw(generators)
    path = write_checkpoint(tmp_path, 1, None, random_state(generators))
    wanted = bits([draw(generators), draw(generators)])
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    others = {"augment": torch.Generator()}
    set_random_state(read_checkpoint(path)[3], others)
    assert bits([draw(others), draw(others)]) == wanted


def test_random_numbers_are_all_or_none():
    before = bits(random_state())
    other = {**random_state(), "generators": {"a": torch.get_rng_state()}}
    random.random(), torch.rand(1)
    after = bits(random_state())
    assert after != before
    with pytest.raises(CheckpointError, match="random generators a, b are only"):
        set_random_state(other, {"b": torch.Generator()})
    assert bits(random_state()) == after


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_the_same_numbers_and_its_tensors_come_back_on_the_cpu(tmp_path):
    weights, generators = torch.randn(5, device="cuda"), {"own": torch.Generator("cuda")}
    path = write_checkpoint(tmp_path, 1, {"weights": weights}, random_state(generators))
    draw = lambda: torch.cat([torch.randn(4, device="cuda"), torch.randn(4, device="cuda", generator=generators["own"])])
    wanted = draw()
    _, _, shared, own = read_checkpoint(path)
    set_random_state(own, generators)
    assert torch.equal(draw(), wanted) and shared["weights"].device.type == "cpu"
    assert torch.equal(shared["weights"], weights.cpu())


# killed writers


def child_of(work, *arguments):
    child = FORK.Process(target=work, args=arguments)
    child.start()
    return child


def write_for_ever(folder: Path, begin: int, done) -> None:
    for step in range(begin, begin + 1_000_000):
        write_checkpoint(folder, step, state(step), state(step))
        done.value = step


def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    chance, done, last = random.Random(), FORK.RawValue("l", 0), 0
    for _ in range(25):
        child = child_of(write_for_ever, tmp_path, last + 1, done)
        while done.value <= last and child.is_alive():
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.03))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        path = newest_checkpoint(tmp_path)
        last, world, shared, own = read_checkpoint(path)
        assert done.value <= last <= done.value + 1, "one that was reported is never lost"
        assert is_of(shared, last) and is_of(own, last) and path.name == f"step-{last:08d}" and world == 1
    write_checkpoint(tmp_path, last + 1, state(0), None)
    assert names(tmp_path) == [f"step-{step:08d}" for step in (last, last + 1)]


def write_until(moment: int, folder: Path, step: int) -> None:
    "Killed just before its file operation of number `moment`"
    count = iter(range(10_000))

    def watch(event, _):
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree") and next(count) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(watch)
    write_checkpoint(folder, step, state(step), state(step), keep=1)


@pytest.mark.parametrize("step", [1, 2], ids=["same step", "next step"])
def test_a_writer_killed_before_each_file_operation(tmp_path, monkeypatch, step):
    "Also when only one is kept and the same step is written again"
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # a killed process does not lose what the system has
    found = set()
    for moment in range(200):
        folder = tmp_path / str(moment)
        write_checkpoint(folder, 1, state(1), state(1))
        child = child_of(write_until, moment, folder, step)
        child.join()
        path = newest_checkpoint(folder)
        number, _, shared, own = read_checkpoint(path)
        assert is_of(shared, number) and is_of(own, number) and number in (1, step)
        found.add(number)
        assert all(is_of(read_checkpoint(one)[2], int(one.name[5:])) for one in folder.glob("step-*")), "what has a name is whole"
        write_checkpoint(folder, step, state(step), state(step))
        assert set(names(folder)) <= {"step-00000001", "step-00000002"}, "nothing hidden is left"
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
    assert moment > 15 and child.exitcode == 0 and found == {1, step}


def test_the_disk_knows_before_the_name_does(tmp_path, monkeypatch):
    "For power cuts: every file, then the folder, then the name, then the folder above; and only then older ones go"
    write_checkpoint(tmp_path, 1, state(1), 1)
    log, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (log.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda source, target: (log.append(Path(target).name), replace(source, target)))
    final = write_checkpoint(tmp_path, 2, state(2), 1, keep=1)
    monkeypatch.undo()
    at = log.index(final.name)
    assert {"shared.json", "shared.safetensors", "rank-0.json", "rank-0.safetensors"} <= set(log[:at])
    assert log[at - 2:at] == ["checkpoint.json", ".step-00000002.tmp"]
    assert log[at + 1] == tmp_path.name and log.index(".step-00000001.gone") > at + 1


def test_a_half_removed_checkpoint_is_never_read(tmp_path):
    "Neither is a half written one"
    write_checkpoint(tmp_path, 1, state(1), 1)
    for name in (".step-00000009.gone", ".step-00000008.tmp"):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
    assert newest_checkpoint(tmp_path).name == "step-00000001"
    write_checkpoint(tmp_path, 2, state(2), 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


# full disks


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    done = mount and subprocess.run([mount, "-t", "tmpfs", "-o", "size=2m", "none", folder], capture_output=True, text=True)
    if not done or done.returncode:
        pytest.skip(f"mounting a small disk needs root: {done.stderr.strip() if done else 'there is no mount'}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_a_named_error_and_harms_nothing(small_disk):
    folder, big = small_disk / "checkpoints", torch.zeros(700_000, dtype=torch.uint8)
    first = write_checkpoint(folder, 1, state(1), big)
    write_checkpoint(folder, 2, state(2), big)
    before = newest_checkpoint(folder)
    for step in (2, 3):
        with pytest.raises(CheckpointError) as caught:
            write_checkpoint(folder, step, state(3), big)
        message = str(caught.value)
        assert str(folder) in message and "No space left" in message and caught.value.__cause__.errno == errno.ENOSPC
        needed, free = (int(word.replace(",", "")) for word in re.search(r"needs ([\d,]+) bytes, ([\d,]+) are free", message).groups())
        assert 716_000 < needed < 720_000 and free < needed
        assert names(folder) == ["step-00000001", "step-00000002"] and newest_checkpoint(folder) == before
        assert is_of(read_checkpoint(before)[2], 2) and is_of(read_checkpoint(first)[2], 1)
    shutil.rmtree(first)
    assert is_of(read_checkpoint(write_checkpoint(folder, 3, state(3), big))[2], 3)


def test_a_folder_that_cannot_be_made_is_a_named_error(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match=r"could not be written to .*/checkpoints: File exists. It needs 16,\d+ bytes, [\d,]+ are free"):
        write_checkpoint(tmp_path / "checkpoints", 1, state(1), 1)


def test_a_file_that_may_not_grow_is_a_named_error(tmp_path):
    "For those who may not mount a small disk"
    write_checkpoint(tmp_path, 1, state(1), 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"File too large\. It needs 16,\d+ bytes, [\d,]+ are free"):
            write_checkpoint(tmp_path, 2, state(2), 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["step-00000001"]
    assert is_of(read_checkpoint(write_checkpoint(tmp_path, 2, state(2), 2))[2], 2)


@pytest.mark.parametrize("call", ["replace", "fsync", "open"])
def test_every_failing_call_of_a_write_leaves_the_older_checkpoint(tmp_path, monkeypatch, call):
    "An input/output error at the first, second, third ... such call"
    write_checkpoint(tmp_path, 1, state(1), 1)
    real, failing = getattr(os, call), []

    def fails(*arguments, **options):
        failing.append(1)
        if len(failing) == number:
            raise OSError(errno.EIO, "Input/output error")
        return real(*arguments, **options)
    for number in range(1, 30):
        failing.clear()
        monkeypatch.setattr(os, call, fails)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                write_checkpoint(tmp_path, 1, state(1), 1)
            finished = len(failing) < number
        except CheckpointError as error:
            assert "Input/output error" in str(error)
        finally:
            monkeypatch.undo()
        assert is_of(read_checkpoint(newest_checkpoint(tmp_path))[2], 1)
        if len(failing) < number:
            assert finished and number > 1
            break
    assert names(tmp_path) == ["step-00000001"]


# damaged files


def test_every_damage_of_every_file_is_noticed(tmp_path):
    chance = random.Random(1)
    old = write_checkpoint(tmp_path, 1, state(1), [1])
    new = write_checkpoint(tmp_path, 2, state(2), {"a": torch.ones(2)})
    assert len(names(new)) == 5
    for path in sorted(new.iterdir()):
        whole = path.read_bytes()
        places = {0, 7, 8, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(25))}
        damaged = [whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1:] for at in places]
        damaged += [b"", whole[:-1], whole[:len(whole) // 2], whole + b"\0", whole + whole, bytes(len(whole)), None]
        for content in damaged:
            path.unlink() if content is None else path.write_bytes(content)
            with pytest.warns(UserWarning, match=f"{path.name} (is damaged|has format)"):
                assert newest_checkpoint(tmp_path) == old
            with pytest.raises(CheckpointError, match=path.name):
                read_checkpoint(new)
            path.write_bytes(whole)
    assert newest_checkpoint(tmp_path) == new


def test_files_of_other_checkpoints_do_not_pass(tmp_path):
    old, new = (write_checkpoint(tmp_path, step, state(step), step) for step in (1, 2))
    shutil.copy(old / "shared.safetensors", new)  # of the same size
    with pytest.warns(UserWarning, match="shared.safetensors is damaged: its sha256"):
        assert newest_checkpoint(tmp_path) == old
    old.rename(tmp_path / "step-00000003")
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match="no checkpoint in .* is whole.*is of step 1"):
        newest_checkpoint(tmp_path)


def test_a_folder_without_one_has_none(tmp_path):
    assert newest_checkpoint(tmp_path) is None and newest_checkpoint(tmp_path / "gone") is None
    (tmp_path / "step-1").mkdir(), (tmp_path / "notes.txt").touch()
    assert newest_checkpoint(tmp_path) is None
    (tmp_path / "step-00000001").mkdir()
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match="remove the folder.*step-00000001/checkpoint.json is damaged: No such file"):
        newest_checkpoint(tmp_path)


def test_an_old_format_is_refused_by_name(tmp_path, monkeypatch):
    "Also where an older checkpoint of this format lies beside it: going back would lose steps unseen"
    write_checkpoint(tmp_path, 1, 1, 1)
    monkeypatch.setattr(checkpoint, "FORMAT", 0)
    path = write_checkpoint(tmp_path, 2, 2, 2)
    monkeypatch.undo()
    for read in (newest_checkpoint, lambda _: read_checkpoint(path), lambda _: read_shards(path)):
        with pytest.raises(CheckpointError, match=r"checkpoint.json has format 0; this version of facenb reads format 1"):
            read(tmp_path)


def test_nothing_in_a_file_is_executed(tmp_path):
    "There is no pickle to be met"
    source = Path(checkpoint.__file__).read_text()
    assert not any(word in source for word in ("import pickle", "torch.load", "torch.save", "eval(", "allow_pickle"))
    path = write_checkpoint(tmp_path, 1, state(1), random_state())
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}
    for file in path.glob("*.json"):
        json.loads(file.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


# several processes


def part(folder: Path, rank: int, world: int, barrier, steps: int, said) -> None:
    for step in range(steps):
        write_checkpoint(folder, step, state(step), state(100 * rank + step), rank, world, barrier.wait)
    said.put(rank)


def ranks_write(folder: Path, world: int, steps: int) -> list:
    barrier, said = FORK.Barrier(world), FORK.Queue()
    children = [child_of(part, folder, rank, world, barrier, steps, said) for rank in range(world)]
    found = sorted(said.get(timeout=30) for _ in range(world))
    [child.join() for child in children]
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_processes_write_together(tmp_path, world):
    assert ranks_write(tmp_path, world, 5) == list(range(world))
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    path = newest_checkpoint(tmp_path)
    assert len(names(path)) == 3 + 2 * world
    for rank in range(world):
        step, by, shared, own = read_checkpoint(path, rank)
        assert (step, by) == (4, world) and is_of(shared, 4) and is_of(own, 100 * rank + 4)
    for rank in (world, -1):
        with pytest.raises(CheckpointError, match=f"by {world} processes and has no part of rank {rank}"):
            read_checkpoint(path, rank)
    assert [own["step"] for own in read_shards(path)] == [100 * rank + 4 for rank in range(world)]
    write_checkpoint(tmp_path, 4, state(4), state(7))  # gone on with one process, and stopped at once
    assert len(names(newest_checkpoint(tmp_path))) == 5 and read_checkpoint(path)[1] == 1


def test_the_part_of_another_rank_is_checked_too(tmp_path):
    ranks_write(tmp_path, 2, 2)
    path = tmp_path / "step-00000001" / "rank-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert read_checkpoint(path.parent, 0)[0] == 1
    with pytest.raises(CheckpointError, match="rank-1.safetensors is damaged: it has"):
        read_checkpoint(path.parent, 1)
    with pytest.warns(UserWarning, match="rank-1.safetensors"):
        assert newest_checkpoint(tmp_path).name == "step-00000000"


def test_two_processes_killed_together(tmp_path):
    for _ in range(8):
        barrier, said = FORK.Barrier(2), FORK.Queue()
        children = [child_of(part, tmp_path, rank, 2, barrier, 1_000_000, said) for rank in range(2)]
        time.sleep(random.uniform(0.01, 0.06))
        [child.kill() for child in random.sample(children, 2)], [child.join() for child in children]
        if path := newest_checkpoint(tmp_path):
            for rank in range(2):
                step, _, shared, own = read_checkpoint(path, rank)
                assert is_of(shared, step) and is_of(own, 100 * rank + step)
            shutil.rmtree(tmp_path)


def rank_that_fails(folder: Path, rank: int, bad: int, barrier, said) -> None:
    try:
        write_checkpoint(folder, 2, state(2), {"a": {1}} if rank == bad else 0, rank, 3, barrier.wait)
        said.put((rank, "nothing"))
    except CheckpointError as error:
        said.put((rank, str(error)))


def run_failing(target, folder: Path, world: int, bad: int) -> dict[int, str]:
    "What each rank says"
    barrier, said = FORK.Barrier(world), FORK.Queue()
    children = [child_of(target, folder, rank, bad, barrier, said) for rank in range(world)]
    found = dict(said.get(timeout=30) for _ in range(world))
    [child.join() for child in children]
    return found


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_rank_that_fails_fails_all_and_leaves_no_half(tmp_path, bad):
    ranks_write(tmp_path, 2, 2)
    found = run_failing(rank_that_fails, tmp_path, 3, bad)
    assert f"rank-{bad}: a is a builtins.set, which a checkpoint cannot hold" in found.pop(bad)
    if bad:
        assert f"rank {bad} wrote no part of a checkpoint in {tmp_path}" in found.pop(0)
    assert all("rank 0 completed no checkpoint of step 2" in message for message in found.values())
    assert names(tmp_path) == ["step-00000000", "step-00000001"]


def rank_with_full_disk(folder: Path, rank: int, bad: int, barrier, said) -> None:
    if rank == bad:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, -1))
    try:
        write_checkpoint(folder, 2, state(2), state(2), rank, 2, barrier.wait)
        said.put((rank, "nothing"))
    except CheckpointError as error:
        said.put((rank, str(error)))


@pytest.mark.parametrize("bad", [0, 1])
def test_a_disk_that_is_full_for_one_rank(tmp_path, bad):
    ranks_write(tmp_path, 2, 2)
    found = run_failing(rank_with_full_disk, tmp_path, 2, bad)
    assert "File too large" in found[bad]
    assert ("rank 1 wrote no part" if bad else "rank 0 completed no checkpoint") in found[1 - bad]
    assert names(tmp_path) == ["step-00000000", "step-00000001"]


# which ones stay, and for whom


def test_the_newest_two_stay_and_abandoned_ones_go(tmp_path):
    for step in (1, 20, 3_000, 123_456_789):
        write_checkpoint(tmp_path, step, step, step)
    assert names(tmp_path) == ["step-00003000", "step-123456789"]
    write_checkpoint(tmp_path, 4_000, 0, 0, keep=3)
    assert names(tmp_path) == ["step-00003000", "step-00004000"]
    write_checkpoint(tmp_path, 4_001, 0, 0, keep=1)
    assert names(tmp_path) == ["step-00004001"]


@pytest.mark.parametrize("options", [{"step": -1}, {"keep": 0}, {"rank": 2, "world": 2}, {"world": 0}], ids=str)
def test_impossible_requests_are_refused(tmp_path, options):
    with pytest.raises(CheckpointError, match="wants step >= 0, keep >= 1"):
        write_checkpoint(tmp_path / "x", **{"step": 1, **options}, shared=0, own=0)
    assert names(tmp_path) == []


def test_changed_parameters_are_refused_by_name():
    before = unpack(*pack({"loss": "infonce", "lr": 0.1, "clip": math.nan, "workers": 2, "epochs": 30}))
    refuse_changes(before, {**before, "workers": 8, "clip": math.nan}, free={"workers"})
    with pytest.raises(CheckpointError) as caught:
        refuse_changes(before, {"loss": "arcface", "lr": 0.1, "clip": 1.0, "workers": 2, "seed": 1}, ["workers"], "runs/a/checkpoints")
    message = str(caught.value)
    for words in ("loss: was 'infonce', now 'arcface'", "clip: was nan, now 1.0", "seed: was absent, now 1", "-p name NAME",
                  "epochs: was 30, now absent", "remove runs/a/checkpoints"):
        assert words in message
    assert "lr:" not in message and "workers" not in message


def write_and_read(folder: Path, said) -> None:
    "200 MB; how far memory rose while writing, and then while reading, in MB"
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    large = {str(i): torch.from_numpy(np.ones(5_000_000, np.float32)) for i in range(10)}
    before = peak()
    path = write_checkpoint(folder, 1, large, None)
    written = peak()
    del large
    found = read_checkpoint(path)
    said.put((written - before, peak() - written, len(found[2])))


def test_a_large_state_needs_no_second_one(tmp_path):
    said = FORK.Queue()
    child = child_of(write_and_read, tmp_path, said)
    writing, reading, tensors = said.get(timeout=60)
    child.join()
    assert writing < 60 and reading < 60 and tensors == 10
