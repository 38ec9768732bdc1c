"""Alignment from outside: upright crops for any five points, or an error; CFP's points; detectors."""
import io
import os
import pickle
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from facenb.align import (TEMPLATE, AlignError, Detected, Detection, Fiducials, RetinaFaceDetector, YuNet, align_all,
                          align_face, centre_crop, choose, order_points, similarity)

ORDERS = [[1, 0, 2, 3, 4], [0, 1, 2, 4, 3], [1, 0, 2, 4, 3]]


def moved(points, degrees, scale=1.0, shift=(0, 0)):
    angle = np.radians(degrees)
    turn = scale * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    return points @ turn.T + shift


def put(matrix, points):
    return points @ matrix[:, :2].T + matrix[:, 2]


def dots(points, size=400):
    "An image with a disc of its own grey at each point, 60 for the first, 90, ..., 180"
    image = np.zeros((size, size, 3), np.uint8)
    radius = np.linalg.norm(points[1] - points[0]) / 8
    for grey, (x, y) in zip(range(60, 200, 30), points):
        cv2.circle(image, (round(x * 16), round(y * 16)), round(radius * 16), (grey,) * 3, -1, cv2.LINE_8, 4)
    return image


@pytest.mark.parametrize("size", [56, 112, 224])
@pytest.mark.parametrize("degrees", [-60, -25, 0, 40, 60])
def test_points_land_within_a_pixel_of_the_template(size, degrees):
    points = moved(TEMPLATE, degrees, 1.7)
    points += 200 - points.mean(axis=0)
    crop = align_face(dots(points), points, size)[..., 0].astype(int)
    for grey, wanted in zip(range(60, 200, 30), TEMPLATE * size / 112):
        rows, columns = np.nonzero(np.abs(crop - grey) <= 2)
        near = np.hypot(columns - wanted[0], rows - wanted[1]) < size / 8
        assert np.hypot(columns[near].mean() - wanted[0], rows[near].mean() - wanted[1]) < 1


def test_reference_crop_is_left_alone():
    pixels = np.random.default_rng(0).integers(0, 256, (112, 112, 3), dtype=np.uint8)
    assert np.allclose(similarity(TEMPLATE), np.eye(2, 3), atol=1e-12)
    assert np.array_equal(align_face(pixels, TEMPLATE), pixels)


def test_known_similarities_are_undone():
    rng = np.random.default_rng(1)
    for _ in range(500):
        points = moved(TEMPLATE, rng.uniform(-180, 180), 10 ** rng.uniform(-1, 1.3), rng.uniform(-2000, 2000, 2))
        assert np.allclose(put(similarity(points), points), TEMPLATE, atol=1e-8)


def test_any_points_give_an_upright_face_without_reflection_or_an_error():
    rng, refused = np.random.default_rng(2), 0
    for _ in range(3000):
        points = rng.uniform(0, 100, (5, 2)) if rng.random() < 0.5 else TEMPLATE * rng.choice([-1, 1], 2) + rng.normal(0, 15, (5, 2))
        try:
            ordered = order_points(points)
        except AlignError:
            refused += 1
            continue
        matrix = similarity(ordered)
        crop = put(matrix, ordered)
        assert np.linalg.det(matrix[:, :2]) > 0
        assert crop[:2, 1].mean() < crop[3:, 1].mean()
        for order in ORDERS:
            assert np.array_equal(order_points(points[order]), ordered)
        assert np.array_equal(order_points(ordered), ordered)
    assert 300 < refused < 2700


def test_upside_down_points_are_never_a_crop():
    pixels = np.zeros((200, 200, 3), np.uint8)
    for degrees in (100, 135, 180, 225, 260):
        with pytest.raises(AlignError, match="upside down"):
            align_face(pixels, moved(TEMPLATE, degrees, 1, (100, 100)))


def test_a_mirrored_photograph_gives_the_mirrored_crop():
    points = moved(TEMPLATE, 20, 1.5, (150, 60))
    image = dots(points)
    mirror = (points * [-1, 1] + [399, 0])
    matrix = similarity(order_points(mirror))
    assert np.linalg.det(matrix[:, :2]) > 0
    assert np.abs(put(matrix, order_points(mirror)) - TEMPLATE).max() < 5, "the template is nearly symmetric"
    assert align_face(image[:, ::-1], mirror).shape == (112, 112, 3)


@pytest.mark.parametrize("bad", [np.full((5, 2), np.nan), np.full((5, 2), np.inf), np.zeros((5, 2)), np.zeros((4, 2)), [], None, "face",
                                 TEMPLATE * 1e200, TEMPLATE / 112, np.c_[np.arange(5.0), np.arange(5.0)] * 20,
                                 TEMPLATE[[0, 0, 2, 3, 4]], TEMPLATE[[0, 1, 2, 3, 3]]], ids=lambda bad: str(np.shape(bad)))
def test_impossible_points_are_one_kind_of_error(bad):
    with pytest.raises(AlignError):
        align_face(np.zeros((50, 50, 3), np.uint8), bad)


@pytest.mark.parametrize("shape", [(1, 1, 3), (3, 2000, 3), (2400, 2400, 3), (40, 40, 3)])
def test_points_outside_the_image_give_a_crop(shape):
    pixels = np.full(shape, 200, np.uint8)
    for shift in (-5000, -60, 0, 60, 1e5):
        crop = align_face(pixels, TEMPLATE * 2 + shift)
        assert crop.shape == (112, 112, 3) and crop.dtype == np.uint8


def face(x, y, side, score=0.9):
    return Detection(np.array([x - side / 2, y - side / 2, side, side]), TEMPLATE * side / 112 + [x - side / 2, y - side / 2], score)


def test_centre_comes_first_whatever_the_size_score_or_order():
    middle, larger = face(100, 104, 60, 0.6), face(35, 40, 70, 0.99)
    assert choose([], (200, 200, 3)) is None
    assert choose([larger, middle], (200, 200, 3)) is middle is choose([middle, larger], (200, 200, 3))
    assert choose([larger], (200, 200, 3)) is larger


def test_failures_are_listed_and_keep_their_place():
    image = np.random.default_rng(3).integers(0, 256, (200, 200, 3), dtype=np.uint8)
    swapped = face(100, 100, 80)
    swapped = Detection(swapped.box, swapped.points[ORDERS[0]], 0.9)
    answers = [[], [face(100, 100, 80), face(30, 40, 100)], [swapped], [face(190, 190, 80)]]
    for on_fail in ("record", "centre"):
        waiting = iter(answers)
        aligned = align_all([(str(number), image) for number in range(4)], Detected(lambda pixels: next(waiting)), on_fail=on_fail)
        names, crops = zip(*aligned)
        assert names == ("0", "1", "2", "3")
        assert np.array_equal(crops[1], crops[2]) and np.isfinite(crops[3]).all()
        report = aligned.report
        assert (report.asked, report.aligned, report.several, report.failed) == (4, 3, 1, [("0", "no face found")])
        assert report.centred == (on_fail == "centre")
        assert crops[0] is None if on_fail == "record" else np.array_equal(crops[0], centre_crop(image))
        assert "4 images: 3 aligned" in str(report)


def test_errors_that_are_not_about_the_image_are_not_swallowed():
    def broken(name, pixels):
        raise RuntimeError("out of memory")
    with pytest.raises(RuntimeError):
        list(align_all([("a", np.zeros((9, 9, 3), np.uint8))], broken))


def test_retinaface_in_both_versions_of_left(monkeypatch):
    names, seen = ["right_eye", "left_eye", "nose", "mouth_right", "mouth_left"], []
    image = np.random.default_rng(4).integers(0, 256, (150, 150, 3), dtype=np.uint8)
    for keys in (names, [names[1], names[0], names[2], names[4], names[3]]):
        faces = {"face_1": {"score": np.float32(0.91), "facial_area": [10, 20, 60, 90], "landmarks": dict(zip(keys, (TEMPLATE / 3).tolist()))},
                 "face_2": {"score": np.float32(0.99), "facial_area": [20, 20, 130, 130], "landmarks": dict(zip(keys, TEMPLATE.tolist()))}}
        package = types.ModuleType("retinaface")
        package.RetinaFace = types.SimpleNamespace(detect_faces=lambda pixels, threshold: seen.append(pixels) or faces)
        monkeypatch.setitem(sys.modules, "retinaface", package)
        source = Detected(RetinaFaceDetector())
        assert np.array_equal(align_face(image, source("", image)), align_face(image, TEMPLATE))
        assert source.faces == 2 and source.name == "retinaface"
        assert np.array_equal(seen[-1], image[..., ::-1]), "the package takes BGR"
    for nothing in ({}, ([], [])):
        package.RetinaFace.detect_faces = lambda pixels, threshold: nothing
        assert RetinaFaceDetector()(image) == []


def test_missing_extras_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "retinaface", None)
    with pytest.raises(AlignError, match=r"pip install facenb\[retinaface\]"):
        RetinaFaceDetector()
    monkeypatch.delenv("FACENB_YUNET", raising=False)
    with pytest.raises(AlignError, match="FACENB_YUNET"):
        YuNet()


def test_module_needs_neither_torch_nor_tensorflow():
    code = "import sys, facenb.align; assert not {'torch', 'tensorflow', 'retinaface'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def cfp(golden):
    with zipfile.ZipFile(golden.parent / "data" / "faces" / "cfp.zip") as archive:
        stored = np.load(golden / "cfp_landmarks5.npz")
        def pixels(name):
            image = Image.open(io.BytesIO(archive.read(f"cfp-dataset/Data/Images/{name}.jpg")))
            return np.asarray(image.convert("RGB"))
        yield Path(archive.filename), {key: stored[key] for key in stored.files}, pixels


def test_all_fiducials_of_cfp(cfp):
    path, stored, _ = cfp
    source = pickle.loads(pickle.dumps(Fiducials(path)))
    points = np.array([source(f"cfp-dataset/Data/Images/{name}.jpg") for name in stored["keys"]])
    assert np.abs(points - stored["fid5"]).max() < 1e-3
    for five in points:
        crop = put(similarity(order_points(five)), order_points(five))
        assert crop[:2, 1].max() < crop[3:, 1].min(), "both eyes above both mouth corners"


def test_yunet_on_faces_of_all_kinds(cfp):
    path, stored, pixels = cfp
    model = Path(os.environ["FACENB_DATA"]) / "models" / "face_detection_yunet_2026may.onnx"
    detector = pickle.loads(pickle.dumps(YuNet(model)))
    sizes = np.argsort(stored["wh"].max(axis=1))
    rows = np.r_[sizes[:4], sizes[-4:], np.random.default_rng(5).choice(len(sizes), 34, replace=False)]
    names = stored["keys"][rows]
    assert sum("profile" in name for name in names) >= 8
    source, distances = Detected(detector), []
    for name, wanted in zip(names, stored["yunet5"][rows].astype(float)):
        found = source(name, pixels(name))
        assert found is not None, name
        length = np.linalg.norm(wanted[3:].mean(axis=0) - wanted[:2].mean(axis=0))
        for face in detector(pixels(name)):
            off = (face.points.mean(axis=0) - face.box[:2]) / face.box[2:] - 0.5
            assert np.abs(off).max() < 0.35, "a box lies around its points"
        distances.append(np.linalg.norm(order_points(found) - order_points(wanted), axis=1).mean() / length)
    # the stored points were found at another scale within another border, hence no equality
    assert np.median(distances) < 0.07 and np.max(distances) < 0.3


def test_yunet_takes_rgb_and_finds_nothing_where_nothing_is(cfp, monkeypatch):
    path, stored, pixels = cfp
    monkeypatch.setenv("FACENB_YUNET", str(Path(os.environ["FACENB_DATA"]) / "models" / "face_detection_yunet_2026may.onnx"))
    detector = YuNet()
    aligned = align_all([("black", np.zeros((90, 70, 3), np.uint8)), ("001/frontal/01", pixels("001/frontal/01")),
                         ("speck", np.zeros((1, 1, 3), np.uint8)), ("line", np.zeros((1, 900, 3), np.uint8))], Detected(detector))
    assert [name for name, crop in aligned if crop is not None] == ["001/frontal/01"]
    assert [reason for _, reason in aligned.report.failed] == ["no face found"] * 3
    seen = []
    detector._network = types.SimpleNamespace(setInputSize=lambda size: None, detect=lambda image: (0, seen.append(image)))
    assert detector(np.full((50, 50, 3), (250, 100, 10), np.uint8)) == []
    assert [tuple(image[image.shape[0] // 2, image.shape[1] // 2]) for image in seen] == [(10, 100, 250)] * 2
