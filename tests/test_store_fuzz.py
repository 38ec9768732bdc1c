"""Whatever happens to the bytes of a store, it says so with its own error: no crash, no hang, no flood of memory."""
import hashlib
import multiprocessing
import resource
import signal

import numpy as np
import pytest

from facenb.store import FaceStore, StoreError, write_store

MUTATIONS, EACH = 3000, 200


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "The bytes of a store with many blocks, mixed people and extras"
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("store") / "faces.lmdb"
    images = [(rng.bytes(int(size)), int(rng.integers(9))) for size in rng.integers(1, 6000, 120)]
    write_store(path, images, [f"person {i}" for i in range(9)], {"from": "noise"}, block=9000,
                extras={"names": [f"{i}.jpg" for i in range(120)], "some": rng.random((50, 3))})
    return path.read_bytes()


def mutate(data: bytes, rng: np.random.Generator) -> bytes:
    "A flip, a cut, an insertion, zeros, a repeated part, or several of them"
    damaged = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        place, length = int(rng.integers(len(damaged))), int(rng.choice([1, 8, 600, 5000]))
        kind = rng.choice(["flip", "cut", "insert", "zero", "copy", "tail"])
        if kind == "flip":
            damaged[place] ^= 1 << int(rng.integers(8))
        elif kind == "cut":
            del damaged[place:place + length]
        elif kind == "insert":
            damaged[place:place] = rng.bytes(length)
        elif kind == "zero":
            damaged[place:place + length] = bytes(len(damaged[place:place + length]))
        elif kind == "copy":
            source = int(rng.integers(len(damaged)))
            part = damaged[source:source + length]
            damaged[place:place + len(part)] = part
        else:
            damaged[-int(rng.integers(1, 60)):] = rng.bytes(int(rng.integers(0, 60)))
        if not damaged:
            break
    return bytes(damaged)


def everything(path) -> str:
    "A digest of all that a store can tell"
    store = FaceStore(path)
    images = store.read(np.arange(len(store)))
    by_person = [store.images_of(label).tolist() for label in range(len(store.people))]
    told = [images, by_person, store.checks().tolist(), store.labels.tolist(), store.meta,
            [np.asarray(store.extra(name)).tolist() for name in store.meta["extras"]]]
    return hashlib.sha256(repr(told).encode()).hexdigest()


def attack(whole: bytes, expected: str, folder, seeds, link) -> None:
    "In a process of its own, so that a crash is seen as one"
    signal.alarm(60)
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    for seed in seeds:
        path = folder / f"{seed}.lmdb"
        path.write_bytes(mutate(whole, np.random.default_rng(seed)))
        try:
            link.send((seed, "equal" if everything(path) == expected else "different"))
        except StoreError:
            link.send((seed, "refused"))
        except BaseException as error:
            link.send((seed, repr(error)))
        path.unlink()


def test_mutated_stores(whole, tmp_path):
    (tmp_path / "whole.lmdb").write_bytes(whole)
    fork, outcomes, expected = multiprocessing.get_context("fork"), [], everything(tmp_path / "whole.lmdb")
    for start in range(0, MUTATIONS, EACH):
        ours, theirs = fork.Pipe(duplex=False)
        seeds = range(start, start + EACH)
        child = fork.Process(target=attack, args=(whole, expected, tmp_path, seeds, theirs))
        child.start()
        theirs.close()
        try:
            while True:
                outcomes.append(ours.recv())
        except EOFError:  # the child has ended, one way or the other
            child.join()
        assert child.exitcode == 0, f"seed {start + len(outcomes) % EACH}: exit code {child.exitcode}"
    counts = {kind: sum(outcome == kind for _, outcome in outcomes) for _, kind in outcomes}
    assert len(outcomes) == MUTATIONS
    assert set(counts) <= {"refused", "equal"}, counts
    assert counts["refused"] > 0.9 * MUTATIONS and counts["equal"] > 10, counts  # unused ends of pages may change
