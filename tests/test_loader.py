"""Faces reach training the same way however processes are started, and stores survive all of it."""
import hashlib
import multiprocessing
import os
import pickle
import signal
import stat
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from facenb.demo import demo_store
from facenb.faces import FaceDataset
from facenb.loader import FaceLoader
from facenb.store import FaceStore


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return demo_store(tmp_path_factory.mktemp("demo") / "demo.lmdb").path


def digest(pixels: torch.Tensor) -> str:
    return hashlib.sha256(pixels.contiguous().numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("opened", ["before", "after"])
def test_batches_are_identical_under_every_start_method(path, start, opened):
    store = FaceStore(path)
    faces = FaceDataset(store, 16, store.labels < 5)
    batches = np.random.default_rng(0).permutation(50).reshape(5, 10).tolist()
    expected = [digest(faces.batch(batch)) for batch in batches]
    if opened == "after":  # a copy that no process has opened
        faces, store = pickle.loads(pickle.dumps(faces)), None
        assert faces.store._file._handle is None
    with FaceLoader(faces, batches, workers=2, start=start) as loader:
        assert [digest(pixels) for pixels, _ in loader] == expected
        assert [labels.tolist() for _, labels in loader] == [faces.labels[batch].tolist() for batch in batches]


def test_several_datasets_on_one_file_share_it(path):
    first, second = FaceDataset(FaceStore(path), 16, [0, 1]), FaceDataset(FaceStore(path), 16, [1, 2])
    with FaceLoader(first, [[0, 1]], workers=1) as one, FaceLoader(second, [[0, 1]], workers=1) as two:
        assert torch.equal(next(iter(one))[0][1], next(iter(two))[0][0])


READERS = """
import multiprocessing, sys
from facenb.store import FaceStore
fork, store, expected = multiprocessing.get_context("fork"), FaceStore(sys.argv[1]), FaceStore(sys.argv[1])[7]
queue = fork.SimpleQueue()
for _ in range(150):  # more than LMDB's table of 126 readers
    child = fork.Process(target=lambda: queue.put(store[7] == expected))
    child.start(), child.join()
    assert child.exitcode == 0 and queue.get()
"""


def test_many_short_lived_readers(path):
    "Of a process without torch: one as large as this takes a tenth of a second for each"
    done = subprocess.run([sys.executable, "-c", READERS, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_read_only_folder_is_enough(path, tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir()
    (folder / "demo.lmdb").write_bytes(path.read_bytes())
    (folder / "demo.lmdb").chmod(stat.S_IRUSR)
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert FaceStore(folder / "demo.lmdb")[3] == FaceStore(path)[3]
        assert [entry.name for entry in folder.iterdir()] == ["demo.lmdb"]
    finally:
        folder.chmod(stat.S_IRWXU)


def test_workers_end_with_their_parent(path):
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()

    def train():
        loader = FaceLoader(FaceDataset(FaceStore(path), 16), [[0, 1]] * 100, workers=2)
        next(iter(loader))
        theirs.send([process.pid for process in loader._processes])
        time.sleep(60)

    parent = fork.Process(target=train)
    parent.start()
    workers = ours.recv()
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in workers):
        assert time.monotonic() < deadline, "orphaned workers"
        time.sleep(0.1)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
