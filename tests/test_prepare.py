"""`facenb prepare` from outside: killed at any moment, told where data lies, refusing what is wrong."""
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from conftest import ROOT
from facenb.records import write_records
from facenb.store import FaceStore

FACENB = [sys.executable, "-c", "import sys; from facenb.command import main; sys.exit(main())"]


def prepare(*arguments, **options):
    return subprocess.run([*FACENB, "prepare", *map(str, arguments)], capture_output=True, text=True, timeout=120, **options)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> Path:
    "A record file of 60 MB, so that there is something to interrupt"
    folder, rng = tmp_path_factory.mktemp("ms1m"), np.random.default_rng(0)
    images = [b"\xff\xd8\xff" + rng.bytes(6_000) + b"\xff\xd9" for _ in range(10_000)]
    write_records(folder, images, np.arange(10_000) // 20)
    return folder


def start(records: Path, out: Path) -> subprocess.Popen:
    "Begin a conversion; returns when the first byte is about to be written"
    process = subprocess.Popen([*FACENB, "prepare", "ms1m", "--source", str(records), "--out", str(out), "--force"],
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not list(out.glob(".*.partial")):
        assert process.poll() is None, process.communicate()[1]
    return process


def test_killed_at_ten_random_moments(records, tmp_path):
    clean, out, moment = tmp_path / "clean", tmp_path / "out", random.Random(0)
    process, begin = start(records, clean), time.monotonic()
    assert process.wait() == 0
    whole, store, expected = time.monotonic() - begin, out / "ms1m.lmdb", digest(clean / "ms1m.lmdb")
    killed = 0
    for _ in range(10):
        process = start(records, out)
        time.sleep(whole * moment.random())
        process.kill()
        killed += process.wait() == -signal.SIGKILL
        assert not store.exists() or digest(store) == expected
    assert killed >= 3, "the machine is too uneven: most runs ended before they were killed"
    assert prepare("ms1m", "--source", records, "--out", out, "--force").returncode == 0
    assert digest(store) == expected and [path.name for path in out.iterdir()] == ["ms1m.lmdb"]


def test_interrupted_by_the_user(records, tmp_path):
    process = start(records, tmp_path)
    while not any(path.stat().st_size for path in tmp_path.glob(".*.partial")):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    said = process.communicate()[1]
    assert process.returncode == 130 and "begins anew" in said
    assert list(tmp_path.iterdir()) == []


def test_places_come_from_a_file(records, tmp_path):
    copy = tmp_path / "checkout"
    shutil.copytree(ROOT / "facenb", copy / "facenb")
    shutil.copy(ROOT / "settings.ini", copy)
    (copy / ".env").write_text(f"MS1M_DIR={records}\nDATA_DIR='{tmp_path / 'big disk'}'\n")
    environment = {key: value for key, value in os.environ.items() if key not in ("MS1M_DIR", "DATA_DIR")}
    environment["PYTHONPATH"] = str(copy)
    done = prepare("ms1m", cwd=copy, env=environment)
    assert done.returncode == 0 and "10000 images of 500 people" in done.stdout, done.stderr
    assert len(FaceStore(tmp_path / "big disk" / "ms1m.lmdb")) == 10_000


@pytest.mark.parametrize("arguments, message", [
    (["cfp", "--source", "nowhere.zip"], "no folder or archive at nowhere.zip"),
    (["ms1m", "--source", "nowhere"], "no file nowhere; give a .rec file"),
    (["lfw"], "choose --align yunet"),
    (["bin", "--source", "nothing.bin"], "nothing.bin"),
    (["mnist"], "invalid choice: 'mnist'"),
])
def test_mistakes_end_with_one_line(arguments, message, tmp_path):
    environment = {**os.environ, "LFW_DIR": "", "DATA_DIR": str(tmp_path)}
    done = prepare(*arguments, cwd=tmp_path, env=environment)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.glob("*.lmdb")) == []


def test_real_sets(tmp_path):
    data = os.environ.get("FACENB_DATA")
    if not data:
        pytest.skip("FACENB_DATA is not set: it names the folder with ms1m_small, faces and bins")
    for arguments, said in [
        (["ms1m", "--source", f"{data}/ms1m_small", "--check"], "3500 images of 250 people"),
        (["lfw", "--source", f"{data}/faces/lfw.zip"], "7701 images"),
        (["bin", "--source", f"{data}/bins/lfw_small_ndarray.bin", "--name", "small"], "614 images"),
    ]:
        done = prepare(*arguments, "--out", tmp_path)
        assert done.returncode == 0 and said in done.stdout, done.stderr
    damaged = prepare("ms1m", "--source", f"{data}/rec_variants/bad_jpeg", "--out", tmp_path / "damaged")
    assert damaged.returncode == 2 and "key 22" in damaged.stderr
    counted = prepare("ms1m", "--source", f"{data}/rec_variants/bad_jpeg", "--out", tmp_path / "damaged", "--failures", "count")
    assert counted.returncode == 0 and "28 images" in counted.stdout and "key': 30" in counted.stdout
