"""`facenb overlap`: people hidden in a training set are found, others are not, and what cannot be promised is said."""
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from facenb.benchmarks import load_pairs, read_bin_benchmark, write_benchmark
from facenb.cards import save_backbone
from facenb.command import main
from facenb.overlap import Crowd, OverlapError, audit, look_alikes, overlap_sentence
from facenb.overlap_stores import benchmark_images, open_benchmark, training_images
from facenb.pairs import all_pairs, pair_arrays
from facenb.records import write_bin
from facenb.runs import read_record
from facenb.sources import open_faces
from facenb.store import FaceStore, write_store
from facenb.zoo import build_backbone


def people(directions: np.ndarray, labels: np.ndarray, noise: float, rng) -> np.ndarray:
    "Unit embeddings around the direction of each label"
    z = directions[labels] + noise * rng.standard_normal((len(labels), directions.shape[1])) / directions.shape[1] ** 0.5
    return (z / np.linalg.norm(z, axis=1, keepdims=True)).astype(np.float32)


def crowd(z: np.ndarray, labels: np.ndarray, seed: int = 0) -> Crowd:
    gathered = Crowd(labels, seed=seed)
    gathered.add(np.arange(len(z)), z)
    return gathered


def planted(seed: int, noise: float, images=(6, 1), training=150, hidden=2, asked=5, twice=0, level=0.05, tail="rank", dim=64):
    "Hits, false alarms and the audit; `twice` training people have a second folder"
    rng = np.random.default_rng(seed)
    directions = rng.standard_normal((training + asked, dim))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    directions[:hidden] = directions[training:training + hidden]
    directions[training - twice:training] = directions[training - 2 * twice:training - twice]
    learned = np.repeat(np.arange(training), images[0])
    tested = np.repeat(np.arange(training, training + asked), images[1])
    result = audit(crowd(people(directions, learned, noise, rng), learned, seed),
                   crowd(people(directions, tested, noise, rng), tested, seed), level, tail)
    table = result.table
    member = table.person < training + hidden
    right = table.training_person == table.person - training
    return (table.suspected & member & right).sum(), (table.suspected & ~member).sum(), result


@pytest.mark.parametrize("noise, images", [(0.8, (6, 1)), (1.2, (6, 3)), (1.2, (12, 8))])
def test_two_of_five_hidden_under_other_names_are_found(noise, images):
    runs = [planted(seed, noise, images) for seed in range(40)]
    assert sum(hits for hits, *_ in runs) / 80 > 0.95
    assert all(abs(result.expected_false_alarms - 0.05) < 1e-9 for *_, result in runs)
    assert sum(alarms for _, alarms, _ in runs) <= 5  # 40 x 0.05 x 3 / 5 = 1.2 at most expected


@pytest.mark.parametrize("images", [(6, 1), (6, 3), (2, 8)])
def test_level_is_kept_where_people_are_hard_to_tell_apart(images):
    "100 people to check, of whom nobody is in the training set, by centroids of other numbers of images"
    runs = [planted(seed, 2.0, images, hidden=0, asked=100, level=5) for seed in range(12)]
    alarms = [alarms for _, alarms, _ in runs]
    assert np.mean(alarms) < 5 + 3 * np.std(alarms, ddof=1) / 12 ** 0.5
    assert np.mean(alarms) > 1.5, "so far below its level it would find nobody either"


def test_mean_p_of_people_who_are_in_no_training_set_is_one_half():
    p = np.concatenate([planted(seed, 1.5, (5, 2), hidden=0, asked=60)[2].table.p for seed in range(12)])
    assert abs(p.mean() - 0.5) < 0.05
    assert 0.05 < (p <= 0.1).mean() < 0.15


def test_second_folders_do_not_hide_who_is_in_both():
    runs = [planted(seed, 1.0, (8, 2), twice=6) for seed in range(12)]
    assert sum(hits for hits, *_ in runs) / 24 > 0.9
    aside = [set(result.look_alikes.person) for *_, result in runs]
    assert np.mean([len(some & set(range(138, 150))) for some in aside]) > 10
    assert not any(some & set(range(138)) for some in aside)


def test_few_training_people_promise_nothing_they_cannot_keep():
    *_, result = planted(0, 0.8, training=30)
    assert result.expected_false_alarms == pytest.approx(5 / 31 * 30 / 29)
    *_, fitted = planted(0, 0.8, training=30, tail="gumbel")
    assert fitted.expected_false_alarms == pytest.approx(0.05)
    with pytest.raises(OverlapError, match="20 are needed"):
        planted(0, 0.8, training=15, tail="gumbel")


@pytest.mark.parametrize("kind", ["all equal", "all zero but one", "float16", "one image each"])
def test_odd_embeddings_have_defined_results(kind):
    rng, labels = np.random.default_rng(0), np.repeat(np.arange(30), 1 if kind == "one image each" else 4)
    z = people(np.eye(64)[:30], labels, 0.3, rng)
    if kind == "all equal":
        z[:] = z[0]
    if kind == "all zero but one":
        z = np.eye(64, dtype=np.float32)[np.zeros(len(labels), int)]
    if kind == "float16":
        z = z.astype(np.float16)
    result = audit(crowd(z, labels), crowd(z[:8], labels[:8]), level=1)
    assert result.table.p.between(0, 1).all()
    if kind in ("all equal", "all zero but one"):
        assert result.table.suspected.sum() == 0 and result.power == 0
    if kind == "float16":
        assert result.table.suspected.all() and result.power == 1
    if kind == "one image each":
        assert np.isnan(result.power) and len(look_alikes(crowd(z, labels))) == 0


# with faces

CFP = "ms1m_small"  # 250 people, 14 images each: 10 frontal, 4 profile


@pytest.fixture(scope="module")
def data() -> Path:
    folder = os.environ.get("FACENB_DATA")
    if not folder:
        pytest.skip("FACENB_DATA is not set: it names a folder with a face model and face images")
    return Path(folder)


def part(path: Path, source, chosen: list[tuple[int, list[int]]], name) -> FaceStore:
    "A store of some images of some people"
    rows = [(image, place) for place, (_, images) in enumerate(chosen) for image in images]
    return FaceStore(write_store(path, ((source[image][0], place) for image, place in rows),
                                 [name(person) for person, _ in chosen], {"from": "test"},
                                 extras=pair_arrays(all_pairs(np.array([place for _, place in rows]), name="tested"))
                                 if path.stem == "tested" else None))


def test_hidden_faces_are_found_by_a_face_model(data, tmp_path, capsys):
    "Two of five people, by other photographs and under other names; the command from stores to record"
    source = open_faces(f"rec:{data / CFP}")
    images = {person: np.flatnonzero(source.labels == person).tolist() for person in range(125)}
    part(tmp_path / "trained.lmdb", source, [(person, images[person][:4]) for person in [*range(2), *range(5, 125)]],
         lambda person: f"m.{person:04x}")
    part(tmp_path / "tested.lmdb", source, [(person, images[person][5:8]) for person in range(5)], lambda person: f"b{person}")
    words = ["overlap", str(tmp_path / "trained.lmdb"), str(tmp_path / "tested.lmdb"), "--device", "cpu", "--no-flip",
             "--model", str(data / "models" / "edgeface_xxs.safetensors"), "--backbone", "timm:edgenext_xx_small",
             "--image-size", "112", "--embedding-dim", "512", "--batch-size", "64", "--out", str(tmp_path / "run")]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "2 of 5 people suspected (at most 0.05 false alarms expected" in said.out and "488 of 488 training" in said.err
    table = pd.read_csv(tmp_path / "run" / "overlap.csv")
    suspected = table[table.suspected]
    assert dict(zip(suspected.name, suspected.training_name)) == {"b0": "m.0000", "b1": "m.0001"}
    assert (suspected.best_training_name == suspected.training_name).all()
    record = read_record(tmp_path / "run" / "record.json")
    numbers = record["metrics"]
    assert (numbers["people_checked"], numbers["people_suspected"], numbers["level_reached"]) == (5, 2, 1)
    assert numbers["power"] > 0.9
    assert (numbers["pairs"], numbers["pairs_without"], numbers["folds"], numbers["folds_without"]) == (105, 36, 5, 3)
    assert str(tmp_path) not in (tmp_path / "run" / "record.json").read_text()


# from the outside

@pytest.fixture(scope="module")
def blind(tmp_path_factory) -> Path:
    "A network that learned nothing"
    torch.manual_seed(0)
    save_backbone(build_backbone("small", 24, 16), tmp_path_factory.mktemp("model") / "blind")
    return tmp_path_factory.getbasetemp() / "model0" / "blind"


def noise_images(count: int, seed: int = 0) -> list[bytes]:
    from facenb.benchmarks import png
    rng = np.random.default_rng(seed)
    return [png(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)) for _ in range(count)]


@pytest.fixture(scope="module")
def strangers(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("stores") / "strangers.lmdb"
    return write_store(path, zip(noise_images(90), np.arange(90) // 3), [f"p{i}" for i in range(30)], {"from": "test"})


def test_a_bin_without_people_is_audited_by_groups(strangers, blind, tmp_path, capsys):
    images = noise_images(40, 1)
    pairs = [image for number in range(20) for image in (images[2 * number], images[(2 * number + 1) % 40])]
    write_bin(tmp_path / "toy.bin", pairs, np.arange(20) % 2 == 0)
    write_benchmark(tmp_path / "toy.lmdb", read_bin_benchmark(tmp_path / "toy.bin", "toy"))
    gathered = open_benchmark("toy", tmp_path)
    assert gathered.grouped and len(np.unique(gathered.labels)) == 30  # ten joined pairs, twenty single images
    words = ["overlap", str(strangers), str(tmp_path / "toy.lmdb"), "--model", str(blind), "--device", "cpu"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "counted as one person" in said and "cannot show that there is none" in said and "cannot be promised" in said


def test_pair_sets_of_one_store_are_verified_apart(tmp_path):
    store = FaceStore(write_store(
        tmp_path / "two.lmdb", zip(noise_images(12), np.arange(12) // 3), list("abcd"), {"from": "test"},
        extras=pair_arrays(all_pairs(np.arange(6) // 3, np.arange(6), "one")) |
        pair_arrays(all_pairs(np.arange(3, 12) // 3, np.arange(3, 12), "two"))))
    gathered = open_benchmark(str(tmp_path / "two.lmdb"))
    assert [pairs.name for pairs in gathered.pairs] == ["one", "two"] and len(gathered.images) == 12
    for pairs in gathered.pairs:
        alone = load_pairs(store, pairs.name)
        assert (gathered.images[pairs.a] == alone.images[alone.a]).all() and (pairs.same == alone.same).all()


def test_mistakes_end_with_a_line(strangers, blind, tmp_path, capsys):
    out = ["--model", str(blind), "--device", "cpu", "--out", str(tmp_path / "run")]
    damaged = noise_images(4, 2)
    write_store(tmp_path / "damaged.lmdb", zip([*damaged[:3], b"no image"], [0, 0, 1, 1]), ["a", "b"], {"from": "test"})
    copy = tmp_path / "copy.lmdb"
    copy.write_bytes(strangers.read_bytes())
    for words, reason in ((["overlap", strangers, tmp_path / "damaged.lmdb", *out], "image 3"),
                          (["overlap", strangers, copy, *out], "all are in both"),
                          (["overlap", strangers, "nothing", *out], "no benchmark nothing"),
                          (["overlap", tmp_path / "none.lmdb", copy, *out], "none.lmdb"),
                          (["overlap", strangers, copy, *out, "--level", "nan"], "all are in both")):
        assert main([str(word) for word in words]) == 2
        error = capsys.readouterr().err
        assert reason in error and "Traceback" not in error
    assert not (tmp_path / "run" / "record.json").exists()


def test_limit_draws_images_of_everybody():
    class Many:
        labels = np.repeat(np.arange(50), np.arange(50) + 1)[np.random.default_rng(0).permutation(1275)]
        people = [str(label) for label in range(50)]
    for limit in (1, 7, 0):
        drawn = training_images(Many, limit)
        assert (np.bincount(drawn.labels) == np.minimum(np.arange(50) + 1, limit or 50)).all()
        assert (np.diff(drawn.images) > 0).all() and (Many.labels[drawn.images] == drawn.labels).all()
    assert (training_images(Many, 7, seed=1).images != training_images(Many, 7).images).any()
    assert len(benchmark_images(Many).images) == 1275


def test_sentence_reads_records_with_and_without_numbers():
    assert overlap_sentence("lfw").endswith("not checked.")
    assert overlap_sentence("lfw", {"eer": 0.1}).endswith("not checked.")
    numbers = {"people_checked": 5.0, "people_suspected": 0.0, "expected_false_alarms": 0.05, "power": None}
    assert "cannot show" in overlap_sentence("lfw", numbers) and "cannot show" not in overlap_sentence("lfw", numbers | {"power": 0.9})
