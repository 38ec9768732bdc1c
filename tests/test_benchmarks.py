"""LFW, CFP and .bin benchmarks from outside: what was downloaded becomes a store with every pair accounted for."""
import hashlib
import io
import multiprocessing
import os
import random
import shutil
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from facenb import benchmarks
from facenb.align import Detection
from facenb.benchmarks import (Benchmark, BenchmarkError, UnusableFile, download, download_lfw, load_pairs, open_files,
                               pair_sets, people_in_common, pixels_of, read_bin_benchmark, read_cfp, read_lfw,
                               write_benchmark)
from facenb.pairs import PairSet, bin_pairs
from facenb.store import FaceStore

FIVE = np.array([[38, 52], [74, 52], [56, 72], [42, 92], [71, 92]], float)


@pytest.fixture(scope="session")
def faces() -> Path:
    "Folder with lfw.zip and cfp.zip"
    if not os.environ.get("FACENB_DATA"):
        pytest.skip("FACENB_DATA is not set: it names the folder that holds faces/lfw.zip and faces/cfp.zip")
    return Path(os.environ["FACENB_DATA"]) / "faces"


def picture(seed: int, edge: int, kind: str = "JPEG") -> bytes:
    file, noise = io.BytesIO(), np.random.default_rng(seed).integers(0, 256, (7, 7, 3), np.uint8)
    Image.fromarray(noise).resize((edge, edge)).save(file, kind)
    return file.getvalue()


def lay(folder: Path, files: dict) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def small_lfw(edge: int = 112) -> dict:
    "Two folds with two same and two different pairs each; person P has images 1 to 3"
    people, lines = [f"P{i}_Q" for i in range(8)], ["2\t2"]
    for fold in (people[:4], people[4:]):
        lines += [f"{who}\t1\t2" for who in fold[:2]]
        lines += [f"{who}\t3\t{other}\t1" for who, other in zip(fold[:2], fold[2:])]
    files = {f"lfw/{who}/{who}_{number:04d}.jpg": picture(10 * i + number, edge)
             for i, who in enumerate(people) for number in (1, 2, 3)}
    return {**files, "lfw/pairs.txt": "\n".join(lines).encode() + b"\n"}


def asked_pairs(benchmark: Benchmark, pairs: PairSet) -> list[tuple]:
    name = np.array(benchmark.names)[pairs.images]
    return list(zip(name[pairs.a].tolist(), name[pairs.b].tolist(), pairs.same.tolist(), pairs.fold.tolist()))


def stored_pairs(store: FaceStore, name: str) -> list[tuple]:
    pairs, names = load_pairs(store, name), np.array(store.extra("names"))
    return list(zip(names[pairs.images][pairs.a].tolist(), names[pairs.images][pairs.b].tolist(),
                    pairs.same.tolist(), pairs.fold.tolist()))


# --- the real sets

def test_lfw_resolves_as_published(faces, tmp_path):
    store = FaceStore(write_benchmark(tmp_path / "lfw.lmdb", read_lfw(faces / "lfw.zip")))
    pairs = load_pairs(store, "lfw")
    assert len(store) == len(pairs.images) == 7701 and len(store.people) == 4281
    assert pairs.asked == len(pairs) == 6000 and pair_sets(store) == ["lfw"]
    assert np.bincount(2 * pairs.fold + pairs.same).tolist() == [300] * 20
    labels = store.labels[pairs.images]
    assert (pairs.same == (labels[pairs.a] == labels[pairs.b])).all()
    with zipfile.ZipFile(faces / "lfw.zip") as archive:
        lines = archive.read("lfw/pairs.txt").decode().splitlines()[1:]
        names = store.extra("names")
        for row in (0, 299, 300, 599, 600, 5999):
            words = lines[row].split("\t")
            second = words[0] if len(words) == 3 else words[2]
            got = names[pairs.images[pairs.a[row]]], names[pairs.images[pairs.b[row]]]
            assert got == (f"{words[0]}/{words[0]}_{int(words[1]):04d}", f"{second}/{second}_{int(words[-1]):04d}")
        for number in range(0, 7701, 500):
            assert store[number][0] == archive.read(f"lfw/{names[number]}.jpg")
    assert store.source["aligner"] == "as it came" and store.source["images_failed"] == 0


def test_lfw_downloaded_folder_and_zip_are_one_benchmark(faces, tmp_path):
    with zipfile.ZipFile(faces / "lfw.zip") as archive:
        archive.extractall(tmp_path / "folder")
    with tarfile.open(lay(tmp_path / "downloaded", {"lfw.tgz": b""}) / "lfw.tgz", "w:gz", compresslevel=1) as archive:
        for path in sorted((tmp_path / "folder" / "lfw").glob("*/*"), reverse=True):
            archive.add(path, f"./lfw/{path.parent.name}/{path.name}")
    shutil.copy(tmp_path / "folder" / "lfw" / "pairs.txt", tmp_path / "downloaded")
    places = [faces / "lfw.zip", tmp_path / "folder", tmp_path / "folder" / "lfw", tmp_path / "downloaded",
              tmp_path / "downloaded" / "lfw.tgz"]
    read = [read_lfw(place) for place in places]
    for other in read[1:]:
        assert (other.names, other.people) == (read[0].names, read[0].people)
        assert asked_pairs(other, other.pairs[0]) == asked_pairs(read[0], read[0].pairs[0])
        for name in read[0].names[::97]:
            assert other.crop(name) == read[0].crop(name)
    stores = [FaceStore(write_benchmark(tmp_path / f"{i}.lmdb", read[i])) for i in (0, 1)]
    assert stores[0].read(range(7701)) == stores[1].read(range(7701))
    assert (stores[0].labels == stores[1].labels).all()


def test_cfp_resolves_as_published(faces):
    cfp = read_cfp(faces / "cfp.zip")
    assert len(cfp.names) == 7000 and cfp.people[0] == "50 Cent" and len(cfp.people) == 500
    assert np.bincount(cfp.labels).tolist() == [14] * 500
    assert [pairs.name for pairs in cfp.pairs] == ["cfp_ff", "cfp_fp"]
    for pairs in cfp.pairs:
        assert len(pairs) == pairs.asked == 7000
        assert np.bincount(2 * pairs.fold + pairs.same).tolist() == [350] * 20
        labels = cfp.labels[pairs.images]
        assert (pairs.same == (labels[pairs.a] == labels[pairs.b])).all()
        people = [set(labels[pairs.a[pairs.fold == fold]]) | set(labels[pairs.b[pairs.fold == fold]])
                  for fold in range(10)]
        assert [len(fold) for fold in people] == [50] * 10 and len(set.union(*people)) == 500
    poses = [{name.split("/")[1] for name in np.array(cfp.names)[pairs.images[side]]}
             for pairs in cfp.pairs for side in (pairs.a, pairs.b)]
    assert poses == [{"frontal"}, {"frontal"}, {"frontal"}, {"profile"}]


def test_cfp_folder_and_zip_are_one_benchmark(faces, tmp_path):
    with zipfile.ZipFile(faces / "cfp.zip") as archive:
        archive.extractall(tmp_path / "deep" / "er")
        grey = [name for name in archive.namelist() if name.endswith(".jpg")
                and Image.open(io.BytesIO(archive.read(name))).mode == "L"]
    zipped, folder = read_cfp(faces / "cfp.zip"), read_cfp(tmp_path)
    assert zipped.names == folder.names and zipped.source["protocol_sha256"] == folder.source["protocol_sha256"]
    for one, other in zip(zipped.pairs, folder.pairs):
        assert asked_pairs(zipped, one) == asked_pairs(folder, other)
    grey = ["/".join(name.split("/")[-3:]).removesuffix(".jpg") for name in grey]
    assert len(grey) == 13
    for name in zipped.names[::500] + grey:
        crop, aligner = zipped.crop(name)
        assert folder.crop(name) == (crop, aligner) and aligner == "fiducials"
        assert Image.open(io.BytesIO(crop)).size == (112, 112) and Image.open(io.BytesIO(crop)).mode == "RGB"


def test_pairs_are_those_behind_the_golden_similarities(faces, golden):
    arrays = np.load(golden / "verification.npz")
    read = [*read_lfw(faces / "lfw.zip").pairs, *read_cfp(faces / "cfp.zip").pairs]
    for pairs, key in zip(read, ("LFW", "FF", "FP"), strict=True):
        assert (pairs.same == arrays[f"{key}_same"]).all() and (pairs.fold == arrays[f"{key}_fold"]).all()


def test_people_of_cfp_in_lfw(faces):
    lfw, cfp = read_lfw(faces / "lfw.zip"), read_cfp(faces / "cfp.zip")
    common = people_in_common(cfp.people, lfw.people)
    assert len(common) == 155 and ("Al Pacino", "Al_Pacino") in common


def test_bin_file_gives_the_same_pairs_as_its_lists(tmp_path):
    from facenb.records import write_bin
    images = [picture(seed % 17, 112) for seed in range(60)]
    write_bin(tmp_path / "agedb_30.bin", images, [seed % 2 == 0 for seed in range(30)])
    store = FaceStore(write_benchmark(tmp_path / "b.lmdb", read_bin_benchmark(tmp_path / "agedb_30.bin")))
    pairs = load_pairs(store, "agedb_30")
    assert len(store) == 17 and pairs.fold.tolist() == [row // 3 for row in range(30)]
    assert store.read(pairs.images[pairs.a]) == images[0::2] and store.read(pairs.images[pairs.b]) == images[1::2]


def test_the_two_encodings_of_one_bin_file(faces, tmp_path):
    read = [read_bin_benchmark(faces.parent / "bins" / name) for name in ("lfw_small.bin", "lfw_small_ndarray.bin")]
    assert [(len(one.names), one.pairs[0].counts()["pairs_same"], one.pairs[0].asked) for one in read] == [(614, 200, 400)] * 2
    assert all(read[0].crop(name) == read[1].crop(name) for name in read[0].names)
    assert np.bincount(read[0].pairs[0].fold).tolist() == [40] * 10


# --- what goes wrong

class Mock:
    "A detector that misses some pictures and names itself"
    name = "mock detector"

    def __init__(self, missed=(), points=FIVE):
        self.missed = [pixels_of(data, "").tobytes() for data in missed]
        self.points = points

    def __call__(self, pixels):
        return [] if pixels.tobytes() in self.missed else [Detection(np.array([0, 0, 99, 99.]), self.points, 0.9)]


def test_an_undetected_face_loses_its_pairs_and_moves_no_other(tmp_path):
    files = small_lfw(edge=130)
    lay(tmp_path / "src", files)
    whole = read_lfw(tmp_path / "src", Mock())
    missed = read_lfw(tmp_path / "src", Mock([files["lfw/P0_Q/P0_Q_0001.jpg"], files["lfw/P6_Q/P6_Q_0001.jpg"]]))
    store = FaceStore(write_benchmark(tmp_path / "s.lmdb", missed))
    kept = [pair for pair in asked_pairs(whole, whole.pairs[0])
            if not {"P0_Q/P0_Q_0001", "P6_Q/P6_Q_0001"} & set(pair[:2])]
    assert stored_pairs(store, "lfw") == kept and len(kept) == 6
    pairs = load_pairs(store, "lfw")
    assert pairs.lost.tolist() == [[0, 1], [1, 0]] and pairs.asked == 8
    assert pairs.counts()["pairs_lost"] == 2 and pairs.counts()["folds"] == 2
    assert store.source["aligner"] == "mock detector" and store.source["images_failed"] == 2
    assert store.source["failures"] == [["P0_Q/P0_Q_0001", "no face found"], ["P6_Q/P6_Q_0001", "no face found"]]
    assert store.source["sets"] == {"lfw": {"asked": 8, "used": 6, "lost": 2, "lost_same": 1}}
    assert len(store) == len(store.extra("names")) == len(whole.names) - 2
    for row, name in enumerate(store.extra("names")):
        assert store[row][0] == whole.crop(name)[0] and store.people[store.labels[row]] == name.split("/")[0]


def test_points_in_one_place_are_a_lost_face_not_a_crash(tmp_path):
    lay(tmp_path / "src", small_lfw(edge=130))
    with pytest.raises(BenchmarkError, match="none of 16 images has a usable face; the first: P0_Q/P0_Q_0001: cannot"):
        write_benchmark(tmp_path / "s.lmdb", read_lfw(tmp_path / "src", Mock(points=FIVE * 0)))
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_a_detector_that_breaks_says_on_which_image(tmp_path):
    lay(tmp_path / "src", small_lfw(edge=130))
    def broken(pixels):
        raise RuntimeError("out of memory")
    with pytest.raises(RuntimeError) as caught:
        write_benchmark(tmp_path / "s.lmdb", read_lfw(tmp_path / "src", broken))
    assert caught.value.__notes__ == ["while cropping P0_Q/P0_Q_0001 of lfw"]


def test_missing_and_broken_images(tmp_path):
    files = small_lfw()
    del files["lfw/P1_Q/P1_Q_0002.jpg"]
    lay(tmp_path / "src", files)
    with pytest.raises(UnusableFile, match=r"lfw/pairs.txt line 3: no image P1_Q/P1_Q_0002"):
        read_lfw(tmp_path / "src")
    lay(tmp_path / "src", {"lfw/P4_Q/P4_Q_0001.jpg": files["lfw/P4_Q/P4_Q_0001.jpg"][:-200]})
    store = FaceStore(write_benchmark(tmp_path / "s.lmdb", read_lfw(tmp_path / "src", allow_missing=True)))
    assert load_pairs(store, "lfw").lost.tolist() == [[0, 1], [1, 1]]
    assert [name for name, _ in store.source["failures"]] == ["P1_Q/P1_Q_0002", "P4_Q/P4_Q_0001"]
    lay(tmp_path / "src", {"lfw/P1_Q/P1_Q_0002.jpg": picture(1, 112)})
    with pytest.raises(UnusableFile, match="P4_Q/P4_Q_0001 cannot be decoded"):
        write_benchmark(tmp_path / "t.lmdb", read_lfw(tmp_path / "src"))
    assert not (tmp_path / "t.lmdb").exists()


def test_originals_need_a_detector(tmp_path):
    lay(tmp_path / "src", small_lfw(edge=250))
    with pytest.raises(BenchmarkError, match=r"250x250 pixels.*--align yunet\|retinaface"):
        write_benchmark(tmp_path / "s.lmdb", read_lfw(tmp_path / "src"))


def test_progress_sees_every_image(tmp_path):
    seen = []

    def progress(items, total, label):
        for item in items:
            seen.append(item)
            yield item
        seen.append((total, label))

    benchmark = read_lfw(lay(tmp_path / "src", small_lfw()))
    write_benchmark(tmp_path / "s.lmdb", benchmark, progress)
    assert seen == [*benchmark.names, (16, "lfw")]


# --- archives that mean harm, or were cut

def test_names_that_climb_out_are_only_names(tmp_path):
    with zipfile.ZipFile(tmp_path / "evil.zip", "w") as archive:
        archive.writestr("../../evil.txt", b"x")
        archive.writestr("/etc/passwd", b"y")
    with tarfile.open(tmp_path / "evil.tar", "w") as archive:
        link = tarfile.TarInfo("lfw/pairs.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        archive.addfile(tarfile.TarInfo("x/a.txt"), io.BytesIO())
    assert open_files(tmp_path / "evil.tar").names() == ["x/a.txt"]
    assert open_files(tmp_path / "evil.zip").read("/etc/passwd") == b"y"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evil.tar", "evil.zip"]


def test_bombs_and_repeated_names_are_refused(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("big.txt", bytes(benchmarks.LARGEST + 1))
    with pytest.raises(UnusableFile, match="big.txt in .* has 67108865 bytes"):
        open_files(tmp_path / "bomb.zip").read("big.txt")
    monkeypatch.setattr(benchmarks, "LARGEST_ARCHIVE", 1 << 21)
    shutil.make_archive(tmp_path / "bomb", "gztar", lay(tmp_path / "zeros", {"zeros": bytes(1 << 22)}))
    with pytest.raises(BenchmarkError, match="bomb.tar.gz unpacks to more than"):
        open_files(tmp_path / "bomb.tar.gz")
    with tarfile.open(tmp_path / "twice.tar", "w") as archive:
        for _ in range(2):
            archive.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    with pytest.raises(BenchmarkError, match="holds a.txt twice"):
        open_files(tmp_path / "twice.tar")
    huge = io.BytesIO()
    Image.new("L", (9000, 9000)).save(huge, "PNG")
    with pytest.raises(UnusableFile, match="9000x9000 pixels are too many"):
        pixels_of(huge.getvalue(), "x.png")


def test_links_in_circles_end(tmp_path):
    lay(tmp_path / "src", small_lfw())
    (tmp_path / "src" / "lfw" / "again").symlink_to(tmp_path / "src")
    assert len(read_lfw(tmp_path / "src").names) == 16


@pytest.mark.parametrize("kind", ["zip", "gztar", "tar"])
def test_damaged_archives_raise_our_errors_only(tmp_path, kind):
    lay(tmp_path / "src", small_lfw())
    archive = Path(shutil.make_archive(tmp_path / "lfw", kind, tmp_path / "src"))
    whole, rng, refused = archive.read_bytes(), random.Random(0), 0
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            place, length = rng.randrange(len(data)), rng.choice([1, 1, 2, 30])
            data[place:place + length] = rng.randbytes(length if rng.random() < 0.8 else 0)
        archive.write_bytes(data[:rng.randrange(len(data))] if rng.random() < 0.2 else data)
        try:
            benchmark = read_lfw(archive)
            for name in benchmark.names:
                benchmark.crop(name)
        except BenchmarkError:
            refused += 1
    assert refused > 50


# --- downloads, from a server of our own

class Server:
    "Serves `files`; `cut[name]` answers break off halfway first"

    def __init__(self, files: dict):
        self.files, self.cut, self.asked = files, {}, []
        outer = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self):
                name = self.path[1:]
                outer.asked.append(name)
                if name not in outer.files:
                    return self.send_error(404)
                data = outer.files[name]
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if outer.cut.get(name, 0):
                    outer.cut[name] -= 1
                    data = data[:len(data) // 2]
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()

    def remote(self, name: str, checksum: str | None = None):
        return SimpleNamespace(filename=name, url=f"http://127.0.0.1:{self.http.server_port}/{name}",
                               checksum=checksum or hashlib.sha256(self.files[name]).hexdigest())


@pytest.fixture
def server(tmp_path):
    archive = Path(shutil.make_archive(tmp_path / "made", "gztar", lay(tmp_path / "tree", small_lfw())))
    made = Server({"lfw.tgz": archive.read_bytes(), "pairs.txt": small_lfw()["lfw/pairs.txt"]})
    yield made
    made.http.shutdown()
    made.http.server_close()


@pytest.fixture
def published(server, monkeypatch):
    "scikit-learn's list of files, with our server's addresses and checksums"
    import sklearn.datasets._lfw as module
    other = SimpleNamespace(filename="pairsDevTest.txt", url="http://127.0.0.1:9/x", checksum="0" * 64)
    monkeypatch.setattr(module, "TARGETS", (other, server.remote("pairs.txt")))
    monkeypatch.setattr(module, "ARCHIVE", server.remote("lfw.tgz"))
    return module


def test_what_is_downloaded_can_be_read(server, published, tmp_path):
    shown = []

    def progress(chunks, total, label):
        shown.append((total, label))
        yield from chunks

    folder = download_lfw(tmp_path / "web", progress)
    assert shown == [(1, "pairs.txt"), (1, "lfw.tgz")]
    assert sorted(path.name for path in folder.iterdir()) == ["lfw.tgz", "pairs.txt"]
    benchmark = read_lfw(folder)
    assert len(benchmark.names) == 16 and benchmark.pairs[0].asked == 8
    download_lfw(folder)
    assert server.asked == ["pairs.txt", "lfw.tgz"]


def test_a_wrong_checksum_leaves_nothing(server, published, tmp_path, monkeypatch):
    right = hashlib.sha256(server.files["lfw.tgz"]).hexdigest()
    monkeypatch.setattr(published, "ARCHIVE", server.remote("lfw.tgz", "ab" * 32))
    with pytest.raises(BenchmarkError, match=f"lfw.tgz from .* has SHA-256 {right}, expected {'ab' * 32}"):
        download_lfw(tmp_path / "web")
    assert [path.name for path in (tmp_path / "web").iterdir()] == ["pairs.txt"]


def test_broken_connections_are_tried_again_and_half_files_replaced(server, tmp_path):
    server.cut["lfw.tgz"] = 2
    lay(tmp_path / "web", {"lfw.tgz": server.files["lfw.tgz"][:999], ".lfw.tgz.partial": b"left by a kill"})
    path = download(server.remote("lfw.tgz"), tmp_path / "web", delay=0)
    assert path.read_bytes() == server.files["lfw.tgz"] and len(server.asked) == 3
    server.cut["pairs.txt"] = 9
    with pytest.raises(BenchmarkError, match="pairs.txt could not be downloaded from .* in 3 tries"):
        download(server.remote("pairs.txt"), tmp_path / "web", delay=0)
    with pytest.raises(BenchmarkError, match="none.txt could not be downloaded .*404"):
        download(server.remote("none.txt", "0" * 64), tmp_path / "web", delay=0, tries=1)
    assert [path.name for path in (tmp_path / "web").iterdir()] == ["lfw.tgz"]


def test_an_interrupted_download_is_redone(server, tmp_path):
    def interrupted(chunks, total, label):
        yield next(iter(chunks))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(server.remote("lfw.tgz"), tmp_path / "web", interrupted)
    assert list((tmp_path / "web").iterdir()) == []
    download(server.remote("lfw.tgz"), tmp_path / "web")
    assert [path.name for path in (tmp_path / "web").iterdir()] == ["lfw.tgz"]


def _hold(remote, folder, ready, done):
    def slow(chunks, total, label):
        ready.set()
        done.wait(20)
        return chunks
    download(remote, folder, slow)


def test_two_processes_do_not_write_one_download(server, tmp_path):
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    child = context.Process(target=_hold, args=(server.remote("lfw.tgz"), tmp_path / "web", ready, done))
    child.start()
    assert ready.wait(20)
    with pytest.raises(BenchmarkError, match="another process is downloading"):
        download(server.remote("lfw.tgz"), tmp_path / "web", delay=0)
    done.set()
    child.join(20)
    assert child.exitcode == 0 and (tmp_path / "web" / "lfw.tgz").read_bytes() == server.files["lfw.tgz"]


def test_bin_folds_are_those_of_scikit_learn():
    from sklearn.model_selection import KFold
    for count in (10, 37, 6000):
        same = np.arange(count) % 2 == 0
        _, pairs = bin_pairs([b"%d" % i for i in range(2 * count)], same, "x")
        for number, (_, test) in enumerate(KFold(10, shuffle=False).split(same)):
            assert np.flatnonzero(pairs.fold == number).tolist() == test.tolist()
