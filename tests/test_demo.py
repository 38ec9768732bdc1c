"""The demo from outside: the promises of data, sampler and stores that users rely on."""
import multiprocessing

import numpy as np
import pytest
import torch

from facenb.demo import demo_split, demo_store
from facenb.faces import FaceDataset
from facenb.sampler import PairSampler
from facenb.store import FaceStore, write_store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return demo_store(tmp_path_factory.mktemp("demo") / "demo.lmdb")


def test_people_are_split_not_images(store):
    train, pairs = demo_split(store)
    assert len(store) == 400 and len(train) == 300 and len(pairs.images) == 100
    assert not set(store.labels[train]) & set(store.labels[pairs.images])
    assert pairs.same.sum() == 450 and (~pairs.same).sum() == 4500 and len(np.unique(pairs.fold)) == 10


def test_repaired_files_are_not_part_of_another_image(store):
    from facenb.faces import decode
    rows = np.stack([decode(store[i][0])[..., 0].astype(int) for i in range(400)])
    assert rows.shape == (400, 112, 92)
    jumps = np.abs(np.diff(rows, axis=1)).mean(axis=(1, 2))
    assert jumps.max() < 20, "a shifted row makes neighbouring rows unlike"


@pytest.mark.parametrize("pairs", [1, 7, 30])
def test_sampler_keeps_its_promises(store, pairs):
    faces = FaceDataset(store, 8, demo_split(store)[0])
    sampler, epochs = PairSampler(faces.labels, pairs, seed=5), []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        images = np.concatenate(batches)
        assert len(batches) == len(sampler) == 150 // pairs
        assert len(np.unique(images)) == len(images)
        for batch in batches:
            people = faces.labels[batch]
            assert (people[0::2] == people[1::2]).all() and len(np.unique(people)) == pairs
        epochs.append(batches)
    assert epochs[0] != epochs[1]
    assert list(PairSampler(faces.labels, pairs, seed=5)) == epochs[0] != list(PairSampler(faces.labels, pairs, seed=6))
    with pytest.raises(ValueError, match="pairs=31, but 30 people"):
        PairSampler(faces.labels, 31)


@pytest.mark.parametrize("workers, start", [(0, None), (2, "fork"), (2, "spawn")])
def test_loader_workers_see_the_same_images(store, workers, start):
    faces = FaceDataset(store, 8, demo_split(store)[0][:60])
    expected = faces.all_pixels()
    context = multiprocessing.get_context(start) if start else None
    loader = torch.utils.data.DataLoader(faces, batch_size=16, num_workers=workers, multiprocessing_context=context)
    assert torch.equal(torch.cat([pixels for pixels, _ in loader]), expected)


def test_store_killed_while_written_is_no_store(tmp_path):
    def endless():
        for number in range(10**9):
            yield bytes(100_000), 0
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=write_store, args=(tmp_path / "faces.lmdb", endless(), ["one"], {}))
    child.start()
    while not any(path.stat().st_size > 1e7 for path in tmp_path.glob(".*")):
        assert child.is_alive()
    child.kill()
    child.join()
    with pytest.raises(FileNotFoundError):
        FaceStore(tmp_path / "faces.lmdb")
    write_store(tmp_path / "faces.lmdb", [(b"x", 0)], ["one"], {})
    assert [path.name for path in tmp_path.iterdir()] == ["faces.lmdb"]
