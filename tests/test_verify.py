"""Verification on what people feed it: odd scores, odd folds, and numbers that must be reproduced."""
import json
import math
from fractions import Fraction

import numpy as np
import pytest

from conftest import ROOT
from facenb.demo import demo_split, demo_store
from facenb.embed import pixel_embedding, similarities, unit_rows
from facenb.faces import FaceDataset
from facenb.pairs import PairSet
from facenb.verify import (VerificationError, accepts, area_under_roc, best_threshold, check_cosines, det, equal_error_rate, far_threshold,
                           fold_accuracy, fold_rows, from_distance, from_probit, impostors_needed, l2_from_cosine, left_out,
                           metric_rows, metrics, most_accepted, operating_point, probit, roc, squared_l2_from_cosine,
                           tar_at_far, verify)

HALF = np.arange(200) % 2 == 0  # 100 same, 100 different pairs
TEN = np.arange(200) // 20


def counted(similarity, same, fold, far):
    "Both protocols with a loop over every pair and threshold"
    at_far, best = [], []
    for number in sorted(set(fold)):
        s, y = (part[fold != number].tolist() for part in (similarity, same))
        impostors = [score for score, one in zip(s, y) if not one]
        kept = [t for t in impostors if sum(score >= t for score in impostors) / len(impostors) <= far]
        at_far.append(min(kept, default=max(impostors) + 1e-6))
        best.append(min(sorted(set(s)), key=lambda t: -sum((score >= t) == one for score, one in zip(s, y))))
    share = lambda chosen: [np.mean((similarity[fold == number] >= t) == same[fold == number])
                            for number, t in zip(sorted(set(fold)), chosen)]
    return (at_far, share(at_far)), (best, share(best))


@pytest.mark.parametrize("seed", range(40))
def test_both_protocols_agree_with_counting(seed):
    rng = np.random.default_rng(seed)
    size, kind = int(rng.integers(30, 120)), (np.float16, np.float32, np.float64)[seed % 3]
    similarity = (rng.normal(size=size).round(int(rng.integers(0, 4))) / 4).astype(kind)
    same, fold = rng.random(size) < rng.choice([0.2, 0.5, 0.8]), rng.integers(0, int(rng.integers(2, 11)), size)
    same[:4], fold[:4] = [True, True, False, False], [0, 1, 0, 1]
    far = float(rng.choice([0, 1e-3, 0.03, 0.1, 0.3, 1]))
    found = verify(similarity, same, fold, far)
    for accuracy, (thresholds, shares) in zip((found.accuracy_at_far, found.accuracy_best),
                                              counted(similarity.astype(float), same, fold, far)):
        assert (accuracy.thresholds, accuracy.folds) == (thresholds, shares)
        assert (accuracy.mean, accuracy.sd) == (np.mean(shares), np.std(shares))
    assert found.accuracy_best == fold_accuracy(similarity.astype(float), same, fold, best_threshold)
    wins = np.subtract.outer(similarity[same].astype(float), similarity[~same].astype(float))
    assert found.auc == pytest.approx(np.mean(np.where(wins > 0, 1, np.where(wins == 0, 0.5, 0))), abs=1e-13)
    for point in found.points:
        thresholds = [t for t in [*similarity, np.inf] if np.mean(similarity[~same] >= t) <= point.target]
        assert point.tar == max(np.mean(similarity[same] >= t) for t in thresholds)
        assert point.accepted == np.sum(accepts(similarity[~same], point.threshold)) and point.far <= point.target
        assert point.genuine_accepted == np.sum(accepts(similarity[same], point.threshold))


def test_the_accepted_number_is_the_exact_floor():
    shares = ["0.1", "0.01", "0.001", "0.0001", "0.00001", "0.05", "0.2", "0.25", "0.3", "0.7", "0.9", "0.07", "0.29", "1", "0"]
    sizes = [*range(1, 1500), 2700, 3000, 3500, 7000, 10_000, 33_333, 123_456, 999_999, 6_083_998, 10**9 + 7]
    floored = 0
    for share in shares:
        for n in sizes:
            wanted = n * Fraction(share) // 1
            assert most_accepted(n, float(share)) == wanted, (n, share)
            floored += math.floor(n * float(share)) != wanted
    assert floored > 20  # the plain floor fails here
    for n in (3, 7, 10, 49, 3000):  # every share k / n itself, and its neighbours
        for k in range(n + 1):
            assert most_accepted(n, k / n) == k
            assert k == 0 or most_accepted(n, np.nextafter(k / n, 0)) == k - 1
    for share in ("0.1", "0.001", "0.0001", "0.3", "0.07", "1"):
        assert impostors_needed(float(share)) == math.ceil(1 / Fraction(share))
    assert most_accepted(10, 0.09999999999) == 0  # 1 of 10 is more than that


def test_what_the_demo_records_hold():
    "Raw pixels need no training, so their numbers can be made anew: 450 same and 4,500 different pairs"
    store = demo_store()
    _, pairs = demo_split(store, "demo")
    found, compared = {}, 0
    for path in sorted((ROOT / "data" / "runs" / "published").glob("*/record.json")):
        record = json.loads(path.read_text())
        size = record["parameters"]["image_size"]
        if record["parameters"]["data"] == "demo":
            if size not in found:
                pixels = FaceDataset(store, size, pairs.images).all_pixels()
                found[size] = metrics(verify(similarities(pixel_embedding(pixels), pairs), pairs.same, pairs.fold), "pixels_")
            stored = {name: value for name, value in record["metrics"].items() if name.startswith("pixels_")}
            assert list(found[size]) == list(stored) and found[size] == pytest.approx(stored, abs=1e-12), path
            compared += 1
    assert compared > 40


def test_all_scores_equal():
    found = verify(np.full(200, 0.5), HALF, TEN)
    assert (found.eer, found.auc, found.accuracy_best.mean, found.accuracy_best.sd) == (0.5, 0.5, 0.5, 0.0)
    assert found.accuracy_at_far.folds == [0.5] * 10 and min(found.accuracy_at_far.thresholds) > 0.5  # nobody is accepted
    assert set(found.tar.values()) == {0.0} and [point.accepted for point in found.points] == [0] * 4


@pytest.mark.parametrize("name, similarity, auc, eer, best, tar", [
    ("perfect", np.where(HALF, 0.9, 0.1), 1.0, 0.0, 1.0, 1.0), ("inverted", np.where(HALF, 0.1, 0.9), 0.0, 1.0, 0.5, 0.0)])
def test_perfect_and_inverted(name, similarity, auc, eer, best, tar):
    found = verify(similarity, HALF, TEN)
    assert (found.auc, found.eer, found.accuracy_best.mean) == (auc, eer, best)
    assert set(found.tar.values()) == {tar}
    assert found.accuracy_at_far.mean == {"perfect": 1.0, "inverted": 0.5}[name]


def test_ties_at_the_threshold_never_break_the_promise():
    rng = np.random.default_rng(0)
    genuine = rng.uniform(0.3, 0.9, 2700)
    for impostors in (np.full(2700, 0.5), np.r_[np.full(50, 0.5), rng.uniform(-1, 0.4, 2650)],
                      np.r_[[0.8, 0.8], np.full(50, 0.5), rng.uniform(-1, 0.4, 2648)]):
        similarity, same = np.r_[impostors, genuine], np.arange(5400) >= 2700
        fold = np.arange(5400) % 10
        assert np.mean(impostors >= far_threshold(impostors, 1e-3)) <= 1e-3
        found = verify(similarity, same, fold)
        rows = fold_rows(similarity, same, fold, found.accuracy_at_far)
        assert all(row["far_where_chosen"] <= 1e-3 for row in rows)
        assert all(point.far <= point.target for point in found.points)
    assert found.points[2].accepted == 2  # those above the tie are still accepted
    assert found.points[2].threshold == genuine[genuine > 0.5].min()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_are_named_by_row(bad):
    similarity = np.linspace(0, 1, 200)
    similarity[[3, 17]] = bad
    for call in (lambda: verify(similarity, HALF, TEN), lambda: roc(similarity, HALF), lambda: det(similarity, HALF),
                 lambda: tar_at_far(similarity, HALF, 0.1), lambda: area_under_roc(similarity, HALF),
                 lambda: best_threshold(similarity, HALF), lambda: far_threshold(similarity, 0.1),
                 lambda: from_distance(similarity), lambda: check_cosines(similarity)):
        with pytest.raises(VerificationError, match=r"2 .* not finite, first rows: \[3, 17\]"):
            call()


@pytest.mark.parametrize("same, kind", [(np.ones(200, bool), "different"), (np.zeros(200, bool), "same")])
def test_one_kind_of_pair_is_an_error(same, kind):
    for call in (lambda: verify(TEN / 10, same, TEN), lambda: roc(TEN / 10, same), lambda: operating_point(TEN / 10, same, 0.1),
                 lambda: area_under_roc(TEN / 10, same)):
        with pytest.raises(VerificationError, match=f"none of the 200 pairs is a {kind} pair"):
            call()


def test_a_fold_without_impostors():
    same = HALF | (TEN == 4)
    found = verify(np.where(same, 0.9, 0.1), same, TEN)
    assert found.accuracy_at_far.folds == [1.0] * 10 and found.chosen_on == 80
    row = fold_rows(np.where(same, 0.9, 0.1), same, TEN, found.accuracy_best)[4]
    assert row["different_pairs"] == 0 and math.isnan(row["far"]) and row["tar"] == 1.0
    alone = TEN != 4  # all impostors in one fold: without it there is nothing to choose on
    with pytest.raises(VerificationError, match="without fold 4 no different pairs"):
        verify(np.linspace(0, 1, 200), alone, TEN)


def test_nine_pairs_in_ten_folds():
    similarity, same = [0.9, 0.1, 0.8, 0.2, 0.7, 0.3, 0.6, 0.4, 0.5], [1, 0, 1, 0, 1, 0, 1, 0, 1]
    found = verify(similarity, same, [0, 1, 2, 3, 4, 5, 6, 8, 9])  # nobody is in fold 7
    assert len(found.accuracy_best.folds) == 9 and set(found.accuracy_best.folds) <= {0.0, 1.0}
    assert metric_rows(found)[1]["metric"] == "accuracy at the best threshold of 8 folds"
    assert "tar_at_far_0.1" not in metrics(found) and "4 different pairs show no FAR between 0 and 0.25" in left_out(found)
    with pytest.raises(VerificationError, match="two folds or more"):
        verify(similarity, same, [3] * 9)


def test_half_precision_scores_are_what_they_were_rounded_to():
    rng = np.random.default_rng(1)
    exact = np.clip(rng.normal(np.where(HALF, 0.5, 0.1), 0.15), -1, 1)
    half = exact.astype(np.float16)
    assert len(np.unique(half)) < 200  # rounding ties some
    assert verify(half, HALF, TEN, cosine=True) == verify(half.astype(float), HALF, TEN, cosine=True)
    assert all(point.far <= point.target for point in verify(half, HALF, TEN).points)


def test_embeddings_that_are_not_normalised_are_found_out():
    rng = np.random.default_rng(2)
    embeddings = rng.normal(size=(400, 16))
    pairs = PairSet("odd", np.arange(400), np.arange(0, 400, 2), np.arange(1, 400, 2), HALF, TEN)
    with pytest.raises(VerificationError, match=r"divide embeddings by their length; .* the first in row 0"):
        verify(similarities(embeddings, pairs), HALF, TEN, cosine=True)
    for kind in (np.float64, np.float32, np.float16):  # but rounding is not held against anybody
        twins = np.repeat(unit_rows(embeddings[::2]), 2, axis=0).astype(kind)
        verify(similarities(twins, pairs), HALF, TEN, cosine=True)


def test_thresholds_in_l2_decide_as_the_cosines_do():
    rng = np.random.default_rng(3)
    cosines = rng.uniform(-1, 1, 200)
    found = verify(cosines, HALF, TEN, cosine=True)
    for row, point in zip(metric_rows(found)[2:], found.points):
        if point.resolved:
            accepted = cosines >= point.threshold
            assert (squared_l2_from_cosine(cosines) <= row["threshold_squared_l2"]).tolist() == accepted.tolist()
            assert (l2_from_cosine(cosines) <= row["threshold_l2"]).tolist() == accepted.tolist()
    nobody = far_threshold(np.ones(50), 0.01)  # copies among the impostors: their distance is 0
    assert nobody > 1 and l2_from_cosine(nobody) < 0 and squared_l2_from_cosine(nobody) < 0


def test_distances_give_the_numbers_of_their_similarities():
    rng = np.random.default_rng(4)
    distance = rng.gamma(2, np.where(HALF, 0.3, 1.0)).round(2)
    far, tar, _ = roc(from_distance(distance), HALF)
    found = verify(from_distance(distance), HALF, TEN)
    assert found.eer == equal_error_rate(far, tar) < 0.5 < found.auc
    point = found.points[0]
    assert np.mean(distance[HALF] <= -point.threshold) == point.tar and np.sum(distance[~HALF] <= -point.threshold) == point.accepted <= 10


def test_names_tell_protocols_apart_and_fine_promises_from_kept_ones():
    found = verify(np.random.default_rng(7).random(200), HALF, TEN, lost=[0, 0, 3])
    assert found.accuracy_best.sd > 0.01
    best, asked = found.accuracy_best.folds, found.accuracy_best_asked.folds
    assert asked == pytest.approx([best[0] * 20 / 22, *best[1:3], best[3] * 20 / 21, *best[4:]], abs=1e-15)
    assert found.accuracy_at_far_asked.mean < found.accuracy_at_far.mean
    rows = metric_rows(found)
    assert len({row["metric"] for row in rows}) == len(rows) == 10 and len({tuple(row) for row in rows}) == 1
    words = {row["metric"]: row for row in rows}
    assert math.isnan(words["TAR at FAR <= 0.001 over all pairs"]["value"])
    assert words["TAR at FAR <= 0.001 over all pairs"]["note"] == \
        "not resolved: 100 different pairs show no FAR between 0 and 0.01; 1,000 are needed"
    assert words["TAR at FAR <= 0.01 over all pairs"]["value"] == found.tar[0.01]
    assert "the threshold lies above the highest" in words["accuracy at the threshold for FAR <= 0.001 on 9 folds"]["note"]
    assert set(metrics(found)) == {"accuracy_best", "accuracy_best_sd", "accuracy_at_far", "accuracy_at_far_sd", "tar_at_far_0.1",
                                   "tar_at_far_0.01", "eer", "auc", "accuracy_best_asked", "accuracy_at_far_asked"}
    row = words["accuracy at the best threshold of 9 folds"]
    assert row["sd_over_folds_ddof0"] == pytest.approx(np.std(found.accuracy_best.folds, ddof=0), abs=1e-15)
    assert row["standard_error"] == pytest.approx(np.std(found.accuracy_best.folds, ddof=1) / math.sqrt(10), abs=1e-15)


def test_ten_thousand_impostors_show_one_in_ten_thousand():
    rng = np.random.default_rng(5)
    similarity, same = np.r_[rng.normal(size=10_000), rng.normal(4, 1, 1000)], np.arange(11_000) >= 10_000
    found = verify(similarity, same, np.arange(11_000) % 10)
    assert metrics(found)["tar_at_far_0.0001"] == np.mean(similarity[same] > np.sort(similarity[~same])[-2]) and left_out(found) == ""
    fewer = verify(similarity[1:], same[1:], np.arange(10_999) % 10)
    assert "tar_at_far_0.0001" not in metrics(fewer) and "9,999 different pairs" in left_out(fewer)


def test_curves_end_where_they_must():
    rng = np.random.default_rng(6)
    similarity = rng.normal(size=200).round(1)
    far, fnmr, thresholds = det(similarity, HALF)
    assert (far[0], fnmr[0], thresholds[0]) == (0, 1, np.inf) and (far[-1], fnmr[-1]) == (1, 0)
    assert len(far) == len(np.unique(similarity)) + 1
    for place in range(1, len(far)):
        assert far[place] == np.mean(similarity[~HALF] >= thresholds[place])
        assert fnmr[place] == pytest.approx(np.mean(similarity[HALF] < thresholds[place]), abs=1e-15)
    assert np.isfinite(probit([0, 1])).all() and from_probit(probit(0.2)) == pytest.approx(0.2)


@pytest.mark.parametrize("model", ["mfn", "xxs"])
@pytest.mark.parametrize("benchmark", ["LFW", "FF", "FP"])
def test_golden_points_and_best_thresholds(golden, benchmark, model):
    "`test_golden` has both protocols; here the points, the rule of the best threshold, and half precision"
    stored = np.load(golden / "verification.npz")
    similarity, same, fold = stored[f"{benchmark}_{model}_single"], stored[f"{benchmark}_same"], stored[f"{benchmark}_fold"]
    wanted = json.loads((golden / "verification.json").read_text())[f"{benchmark}_{model}_single"]
    found = verify(similarity, same, fold, cosine=True)
    assert {point.target: point.tar for point in found.points if point.resolved} == \
        {float(far): tar for far, tar in wanted["tar_at_far"].items()}
    for point in found.points:
        assert point.impostors == np.sum(~same) and point.genuine == np.sum(same)
        assert point.accepted == np.sum(similarity[~same] >= point.threshold) == point.impostors * Fraction(str(point.target)) // 1
    for number, threshold in enumerate(found.accuracy_best.thresholds):
        s, y = similarity[fold != number].astype(float), same[fold != number]
        right = [np.count_nonzero((s >= t) == y) for t in np.unique(s)]
        assert threshold == np.unique(s)[int(np.argmax(right))]
    half = verify(similarity.astype(np.float16), same, fold, cosine=True)
    assert half.accuracy_best.mean == pytest.approx(found.accuracy_best.mean, abs=2e-3) and all(p.far <= p.target for p in half.points)
