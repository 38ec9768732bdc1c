"""Record files and verification sets from outside: sets that MXNet wrote, hostile files, mutations."""
import hashlib
import io
import json
import multiprocessing
import os
import pickle
import shutil
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from facenb.records import (RecordError, RecordFile, check_image, pack_record, read_bin, write_bin,
                            write_records)


@pytest.fixture(scope="session")
def data() -> Path:
    folder = os.environ.get("FACENB_DATA")
    if not folder:
        pytest.skip("FACENB_DATA is not set: it names the folder with ms1m_small, rec_variants and bins")
    return Path(folder)


def picture(seed: int, kind: str = "JPEG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), kind)
    return file.getvalue()


def with_magic(image: bytes) -> bytes:
    "The image with magic words in a comment, so that its record has several parts"
    comment = struct.pack("<I", 0xCED7230A) * 2 + b"..." + struct.pack("<I", 0xCED7230A)
    return image[:2] + b"\xff\xfe" + struct.pack(">H", 4 + len(comment)) + b".." + comment + image[2:]


# Sets that MXNet wrote

def expected_images(folder: Path) -> dict[int, tuple[int, str]]:
    "Label and SHA-1 of each image by key, as noted when the set was made"
    images = {}
    for key, facts in json.loads((folder / "expected.json").read_text()).items():
        label = facts["label"][0] if isinstance(facts["label"], list) else facts["label"]
        if facts["n"]:
            images[int(key)] = (int(label), facts["sha1"])
    return images


def found_images(records: RecordFile) -> dict[int, tuple[int, str]]:
    return {record.key: (record.label, hashlib.sha1(record.image).hexdigest()) for record in records}


@pytest.mark.parametrize("by_scan", [False, True])
@pytest.mark.parametrize("name, images, headers", [
    ("ms1m_small", 3500, 251), ("rec_variants/base", 30, 7), ("rec_variants/no_header", 30, 0),
    ("rec_variants/flagged_labels", 30, 7), ("rec_variants/magic_payload", 30, 7),
    ("rec_variants/face2rec2_order", 30, 7)])
def test_sound_sets(data, tmp_path, name, images, headers, by_scan):
    folder = data / name
    if by_scan:
        for file in ("train.rec", "property"):
            shutil.copy(folder / file, tmp_path)
    records = RecordFile(tmp_path if by_scan else folder)
    report = records.report
    assert found_images(records) == expected_images(folder)
    assert (len(records), report.images, report.headers) == (images, images, headers)
    assert report.records == images + headers and not report.failures and not report.notes
    assert report.index == ("scan: there is no train.idx" if by_scan else "train.idx")
    assert records.keys.dtype == records.offsets.dtype == records.lengths.dtype == np.int64
    assert records.labels.dtype == np.int32
    assert records.lengths.tolist() == [len(record.image) for record in records]
    assert all(check_image(image) is None for image in records.read(range(30)))
    json.dumps(report.as_dict())


@pytest.mark.parametrize("name, images, failed, message", [
    ("truncated_payload", 27, [28, 29, 30, 0, 31, 32, 33, 34, 35, 36], "key 28 at byte 145832: cut off"),
    ("idx_past_end", 30, [900], "key 900 at byte 165964: the file ends before"),
    ("dup_key", 30, [3], "key 3 at byte 20880: the key is listed twice, at bytes 13980 and 20880"),
    ("bad_jpeg", 28, [22, 30], "key 22 at byte 110528: neither JPEG nor PNG: begins with ff d8 00"),
])
def test_damaged_sets(data, name, images, failed, message):
    folder = data / "rec_variants" / name
    with pytest.raises(RecordError) as error:
        RecordFile(folder)
    assert message in str(error.value) and str(folder / "train.rec") in str(error.value)
    assert f'its {len(failed)} bad records by failures="count"' in str(error.value)
    records = RecordFile(folder, failures="count")
    report = records.report
    assert len(records) == report.images == images
    assert [failure.key for failure in report.failures] == failed
    assert report.records == report.images + report.headers + len(failed)
    assert message in str(report)
    sound = expected_images(data / "rec_variants" / "face2rec2_order")
    assert found_images(records) == {key: sound[key] for key in found_images(records)}


def test_empty_index_is_replaced_by_a_scan(data):
    records = RecordFile(data / "rec_variants" / "empty_idx")
    assert records.report.index == "scan: train.idx is empty"
    assert found_images(records) == expected_images(data / "rec_variants" / "face2rec2_order")


def test_verification_sets_in_two_encodings(data, tmp_path):
    images, same = read_bin(data / "bins" / "lfw_small.bin")
    again, same_again = read_bin(data / "bins" / "lfw_small_ndarray.bin")
    assert images == again and (same == same_again).all()
    assert (len(images), len(same), int(same.sum()), same.dtype) == (800, 400, 200, bool)
    written = write_bin(tmp_path / "copy.bin", images, same)
    assert read_bin(written)[0] == images and [path.name for path in tmp_path.iterdir()] == ["copy.bin"]
    assert pickle.loads(written.read_bytes()) == (images, same.tolist())


# Processes

@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_processes_read_the_same(tmp_path, start):
    images = [picture(i) for i in range(6)] + [with_magic(picture(6))]
    records = RecordFile(write_records(tmp_path, images, [0, 0, 1, 1, 2, 2, 3]))
    with multiprocessing.get_context(start).Pool(2) as pool:
        assert pool.map(records.__getitem__, range(7)) == list(records)
    assert [record.image for record in records] == images


@pytest.mark.parametrize("change", ["longer", "shorter", "replaced"])
def test_a_changed_file_is_noticed(tmp_path, change):
    path = write_records(tmp_path, [picture(0), picture(1)], [0, 1])
    copied = pickle.dumps(RecordFile(tmp_path))
    content = path.read_bytes()
    if change == "replaced":
        path.unlink()
    path.write_bytes({"longer": content + b"\0" * 4, "shorter": content[:-4]}.get(change, content))
    with pytest.raises(RecordError, match="was changed since"):
        pickle.loads(copied)[0]


# Hostile files

class Hostile:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("call", [(os.system, "touch {}"), (eval, "open('{}', 'w')")])
def test_nothing_a_pickle_names_is_called(tmp_path, protocol, call):
    mark = tmp_path / "called"
    value = ([picture(0), Hostile(call[0], (call[1].format(mark),))], [True])
    path = tmp_path / "evil.bin"
    path.write_bytes(pickle.dumps(value, protocol))
    name = {os.system: "posix.system", eval: "eval"}[call[0]]
    with pytest.raises(RecordError, match=f"evil.bin: refused, for it names .*{name}"):
        read_bin(path)
    assert not mark.exists()
    pickle.loads(path.read_bytes())
    assert mark.exists(), "the pickle would have done it"


@pytest.mark.parametrize("text", [
    b"cos\nsystem\n(S'true'\ntR.", b"(S'true'\nios\nsystem\n.", b"(cos\nsystem\nS'true'\no.",
    b"\x80\x02cnumpy\nload\n.", b"\x80\x04\x8c\x05numpy\x8c\x04load\x93.", b"cnumpy.core.multiarray\nfrombuffer\n.",
    b"c__builtin__\ngetattr\n.", b"\x80\x02\x82\x01.", b"cnumpy\nndarray\n)\x81.", b"Pabc\n.", b"}.", b"\x8f."])
def test_steps_and_names_without_a_place(tmp_path, text):
    (tmp_path / "x.bin").write_bytes(text)
    with pytest.raises(RecordError, match="refused|no place"):
        read_bin(tmp_path / "x.bin")


def test_python2_protocol0(tmp_path):
    images = [picture(i) for i in range(2)]
    quoted = b"".join(b"S" + repr(image)[1:].encode() + b"\np1\na" for image in images)
    (tmp_path / "x.bin").write_bytes(b"((lp0\n" + quoted + b"(lp2\nI01\natp3\n.")
    found, same = read_bin(tmp_path / "x.bin")
    assert found == images and same.tolist() == [True]


def hostile_pickles() -> dict[str, bytes]:
    "Small files that describe something huge"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR(I1\n(I%d\nt"
    kind = b"cnumpy\ndtype\n(S'u1'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI0\ntb"
    latin = b"(V" + b"x" * 100_000 + b"\nVlatin1\ntq\x000"
    return {
        "array": array % 10 ** 12 + kind + b"I00\nS'x'\ntb.",
        "bytes": b"\x8e" + struct.pack("<Q", 2 ** 62) + b"x.",
        "bytearray": b"\x96" + struct.pack("<Q", 2 ** 40) + b"x.",
        "text": b"\x8d" + struct.pack("<Q", 2 ** 62) + b"x.",
        "memo": b"]r\xff\xff\xff\xff.",
        "integer": b"\x8b" + struct.pack("<i", 2 ** 31 - 1) + b"x.",
        "digits": b"L" + b"9" * 1_000_000 + b"L\n.",
        "hash": b"I1\n" + b"2\x86" * 4000 + b"2\x93.",
        "repr": b"cnumpy\ndtype\n(I1\n" + b"2\x86" * 4000 + b"tR.",
        "made": latin + b"c_codecs\nencode\nh\x00R" * 2000 + b".",
        "marks": b"(" * 1_000_000 + b".",
        "lists": b"]" * 1_000_000 + b".",
        "nested": b"]" + b"2a" * 5000 + b".",
    }


@pytest.mark.parametrize("name", hostile_pickles())
def test_small_pickles_stay_small(tmp_path, name):
    content = hostile_pickles()[name]
    (tmp_path / "x.bin").write_bytes(content)
    start = time.process_time()
    tracemalloc.start()
    with pytest.raises(RecordError):
        read_bin(tmp_path / "x.bin")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * len(content) + 4_000_000
    assert time.process_time() - start < 20, "it must not run away; seconds are not measured here"


def test_small_records_stay_small(tmp_path):
    "Lengths, flags, offsets and chains of parts that promise more than there is"
    image, magic = picture(0), struct.pack("<I", 0xCED7230A)
    chain = magic + struct.pack("<I", 2 << 29)
    starts = b"".join(pack_record(i, 0)[:4] + struct.pack("<I", 1 << 29 | 24) + pack_record(i, 0)[8:]
                      for i in range(2000))
    content = pack_record(9000, 0, image) + starts + chain * 20_000
    content += magic + struct.pack("<I", (1 << 29) - 1) + struct.pack("<IfQQ", 2 ** 32 - 1, 0, 1, 0)
    (tmp_path / "train.rec").write_bytes(content)
    (tmp_path / "property").write_text("9" * 10_000)
    with pytest.raises(RecordError, match="should begin with people"):
        RecordFile(tmp_path)
    (tmp_path / "property").unlink()
    for index in (None, "9000\t0\n1\t999999999999999999\n2\t-999999999999999999\n", "9000 0\n" + "8" * 100_000):
        if index:
            (tmp_path / "train.idx").write_text(index)
        tracemalloc.start()
        assert len(RecordFile(tmp_path, failures="count")) == 1
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 20 * len(content) + 4_000_000


# Mutations

def mutate(content: bytes, rng: np.random.Generator) -> bytes:
    "A few changes of the kinds that happen to files, and some that attackers make"
    content = bytearray(content)
    for _ in range(rng.integers(1, 4)):
        place = int(rng.integers(len(content) + 1))
        kind = rng.integers(7)
        if kind == 0 and place < len(content):
            content[place] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            content[place:place + 1] = rng.bytes(1)
        elif kind == 2:
            del content[place:]
        elif kind == 3:
            content[place:place] = rng.bytes(int(rng.integers(1, 9)))
        elif kind == 4:
            del content[place:place + int(rng.integers(1, 9))]
        elif kind == 5:
            other = int(rng.integers(len(content) + 1))
            content[place:place] = content[other:other + int(rng.integers(1, 200))]
        else:
            word = rng.choice([0, 1, 24, 2 ** 29 - 1, 2 ** 31, 2 ** 32 - 1, 0xCED7230A, 1 << 29, 3 << 29])
            content[place // 4 * 4:place // 4 * 4 + 4] = struct.pack("<I", int(word))
        content = content or bytearray(b"\0")
    return bytes(content)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory) -> Path:
    "Sets of a few hundred bytes an image, so that changes often hit what matters"
    folder = tmp_path_factory.mktemp("fuzzed")
    images = [picture(i, "PNG" if i % 2 else "JPEG") for i in range(6)] + [with_magic(picture(8))]
    for header in (True, False):
        write_records(folder / f"set{header}", images, [0, 0, 1, 1, 2, 2, 2], header)
    pictures = (images + [picture(9)], [True, False, True, False])
    rows = ([np.frombuffer(image, np.uint8) for image in pictures[0]], np.array(pictures[1]))
    sets = [pickle.dumps(value, protocol) for value in (pictures, rows) for protocol in (0, 2, 4, 5)]
    (folder / "bins").write_bytes(pickle.dumps(sets))
    return folder


@pytest.mark.parametrize("name", ["train.rec", "train.idx", "property", "scan"])
def test_mutated_records(fuzzed, tmp_path, name):
    rng, outcomes, reasons = np.random.default_rng(len(name)), [], set()
    for number in range(1000):
        source = fuzzed / f"set{number % 2 == 0}"
        sound = {(record.label, record.image) for record in RecordFile(source)}
        folder = tmp_path / str(number)  # new files: rewriting old ones makes some disks wait
        shutil.copytree(source, folder, copy_function=os.symlink)
        changed = folder / ("train.rec" if name == "scan" else name)
        content = mutate(changed.read_bytes(), rng)
        changed.unlink()
        changed.write_bytes(content)
        if name == "scan":
            (folder / "train.idx").unlink()
        for failures in ("raise", "count"):
            try:
                records = RecordFile(folder, failures)
            except RecordError as error:
                outcomes.append("refused")
                assert str(folder) in str(error)
                continue
            outcomes.append(failures)
            found, report = list(records), records.report
            reasons |= {failure.reason.split(":")[0] for failure in report.failures}
            assert len(found) == len(records) == report.images > 0
            assert report.records == report.images + report.headers + len(report.failures)
            assert failures == "count" or not report.failures
            assert str(report).startswith(report.path) and json.dumps(report.as_dict())
            if name in ("train.idx", "property"):
                assert {(record.label, record.image) for record in found} <= sound
                assert report.failures or len(found) >= len(sound)
    counts = {kind: outcomes.count(kind) for kind in ("refused", "raise", "count")}
    few = 0 if name == "train.idx" else 20  # hardly a change of an index is harmless
    assert counts["raise"] > few and counts["count"] > 20 and counts["refused"] > 20, counts
    assert len(reasons) > 3 or name == "property", reasons


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
def test_mutated_pickles(fuzzed, tmp_path):
    rng, outcomes = np.random.default_rng(0), []
    sets = pickle.loads((fuzzed / "bins").read_bytes())
    for number in range(3000):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(mutate(sets[number % len(sets)], rng))
        try:
            images, same = read_bin(path)
        except RecordError as error:
            outcomes.append("refused")
            assert str(path) in str(error)
            continue
        outcomes.append("read")
        assert len(images) == 2 * len(same) and same.dtype == bool
        assert all(type(image) is bytes and image for image in images)
    counts = {kind: outcomes.count(kind) for kind in ("refused", "read")}
    assert min(counts.values()) > 100, counts
