"""Errors from outside: fold thresholds, pictures of pairs, and two models that fix each other's errors."""
import matplotlib
import numpy as np
import pytest
from scipy.stats import binomtest
from sklearn.metrics import cohen_kappa_score, matthews_corrcoef

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

from facenb.errors import (ErrorAnalysisError, agreement, agreement_grid, agreement_metrics, agreement_plane,  # noqa: E402
                           agreement_table, error_grid, fixed_share, hardest, hardest_errors, mean_score_accuracy,
                           pair_thresholds, wrong_by)
from facenb.pairs import PairSet  # noqa: E402
from facenb.verify import far_threshold, verify  # noqa: E402


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def some(seed=0, pairs=400, folds=5):
    "A pair set over 40 images, and the scores of two models with a common and an own part of noise"
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, 40, (2, pairs))
    same, common = rng.random(pairs) < 0.5, rng.normal(0, 0.4, pairs)
    scores = [same + common + rng.normal(0, sd, pairs) for sd in (0.3, 0.5)]
    return PairSet("some", np.arange(40), a, b, same, np.arange(pairs) % folds), scores


def thresholds(pairs, scores):
    return [verify(score, pairs.same, pairs.fold).accuracy_best.thresholds for score in scores]


def test_errors_are_those_that_verify_counts():
    pairs, (score, _) = some()
    result = verify(score, pairs.same, pairs.fold)
    for accuracy in (result.accuracy_best, result.accuracy_at_far):
        wrong = ~np.isnan(wrong_by(score, pairs.same, pair_thresholds(pairs.fold, accuracy.thresholds)))
        assert [1 - wrong[pairs.fold == fold].mean() for fold in range(5)] == pytest.approx(accuracy.folds)
        found = hardest_errors(score, pairs.same, pairs.fold, accuracy.thresholds, count=400)
        assert sorted(found) == np.flatnonzero(wrong).tolist()


def test_ties_at_the_threshold_are_accepted_and_keep_their_order():
    same = np.array([True, False, False, True])
    assert hardest(np.full(4, 0.5), same, 0.5, of_same=False).tolist() == [1, 2]
    assert hardest(np.full(4, 0.5), same, 0.5, of_same=True).tolist() == []
    assert hardest(np.full(4, 0.25, np.float16), same, 0.5, of_same=True).tolist() == [0, 3]


def test_the_hardest_comes_first_and_chance_is_counted_within_each_kind():
    assert hardest(np.array([0.6, 0.9, 0.7]), np.zeros(3, bool), 0.5, of_same=False).tolist() == [1, 2, 0]
    assert hardest(np.array([0.3, 0.1, 0.2]), np.ones(3, bool), 0.5, of_same=True).tolist() == [1, 2, 0]
    same, fold = np.repeat([True, False], 10), np.arange(20) % 2
    a, b = np.where(same, 1.0, 0.0), np.where(same, 1.0, 0.0)
    a[[0, 1, 10]], b[[1, 2, 3, 4]] = 0.5, 0.0
    result = agreement(a, b, same, fold, 0.6, 0.5)
    assert (result.only_a, result.only_b, result.both_wrong) == (3, 1, 1)
    assert result.both_wrong_by_chance == pytest.approx(2 * 0.4)  # not 2 * 4 / 20


def test_two_kinds_share_the_places():
    scores, same, fold = np.r_[np.ones(9), np.zeros(2)], np.r_[np.zeros(9, bool), True, True], np.zeros(11, int)
    assert hardest_errors(scores, same, fold, [0.5], 6).tolist() == [0, 1, 2, 3, 9, 10]
    assert hardest_errors(scores, same, fold, [0.5], 2).tolist() == [0, 9]
    assert hardest_errors(scores, same, fold, [0.5], 0).tolist() == []


@pytest.mark.parametrize("call, message", [
    (lambda: pair_thresholds([0, 1, 2], [0.1, 0.2]), "3 folds need as many finite thresholds"),
    (lambda: pair_thresholds([0, 1], [np.nan, 0.2]), "finite"),
    (lambda: wrong_by([np.inf, 0], np.array([True, False]), 0), r"first pairs: \[0\]"),
    (lambda: wrong_by([0.1, 0.2], np.array([1, 0]), 0), "true or false"),
    (lambda: wrong_by([0.1, 0.2], np.array([True, False]), [0, 0, 0]), r"\(3,\) thresholds for \(2,\) pairs"),
    (lambda: agreement([0.1, 0.2], [0.1], np.array([True, False]), np.array([0, 1]), 0, 0), r"\(1,\) and \(2,\)"),
    (lambda: agreement([0.1, 0.2], [0.1, 1], np.array([True, False]), np.array([3, 3]), 0, 0), "two folds"),
])
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(ErrorAnalysisError, match=message):
        call()


def test_agreement_against_scikit_learn_and_counting():
    pairs, scores = some()
    limits = thresholds(pairs, scores)
    result = agreement(*scores, pairs.same, pairs.fold, *limits)
    right = [(score >= pair_thresholds(pairs.fold, limit)) == pairs.same for score, limit in zip(scores, limits)]
    count = {(x, y): sum(1 for i in range(400) if right[0][i] == x and right[1][i] == y) for x in (True, False) for y in (True, False)}
    assert (result.both_right, result.only_a, result.only_b, result.both_wrong) == (
        count[True, True], count[True, False], count[False, True], count[False, False])
    assert result.kappa == pytest.approx(cohen_kappa_score(*right))
    assert result.correlation == pytest.approx(matthews_corrcoef(*right))
    fixes = binomtest(result.only_b, result.only_b + result.both_wrong).proportion_ci(method="wilson")
    assert (result.b_fixes_low, result.b_fixes_high) == pytest.approx((fixes.low, fixes.high))
    fixes = binomtest(result.only_a, result.only_a + result.both_wrong)
    assert result.a_fixes == pytest.approx(fixes.statistic)
    assert result.accuracy_oracle == pytest.approx(1 - result.both_wrong / 400)
    swapped = agreement(*scores[::-1], pairs.same, pairs.fold, *limits[::-1])
    assert (swapped.only_a, swapped.a_fixes, swapped.accuracy_b, swapped.accuracy_mean_score) == (
        result.only_b, result.b_fixes, result.accuracy_a, result.accuracy_mean_score)


def test_accuracies_are_means_over_folds_as_in_verify():
    pairs, scores = some(folds=5)
    uneven = PairSet("uneven", pairs.images, pairs.a, pairs.b, pairs.same, np.repeat([0, 1, 2], [50, 150, 200]))
    limits = thresholds(uneven, scores)
    result = agreement(*scores, uneven.same, uneven.fold, *limits)
    expected = [verify(score, uneven.same, uneven.fold).accuracy_best.mean for score in scores]
    assert [result.accuracy_a, result.accuracy_b] == pytest.approx(expected)


def test_independent_noise_is_averaged_away_and_common_noise_is_not():
    rng = np.random.default_rng(1)
    same, fold, common = np.arange(6000) % 2 == 0, np.arange(6000) // 600, rng.normal(0, 0.6, 6000)
    own = [2 * same + rng.normal(0, 1, 6000) for _ in range(2)]
    alike = [2 * same + common / 0.6 + rng.normal(0, 0.01, 6000) for _ in range(2)]
    better, equal = (agreement(a, b * 100 - 5, same, fold, 1.0, 95.0) for a, b in (own, alike))
    assert better.accuracy_mean_score > better.accuracy_a + 0.04 and better.accuracy_oracle > better.accuracy_mean_score
    assert abs(equal.accuracy_mean_score - equal.accuracy_a) < 0.01 and equal.kappa > 0.9
    assert abs(better.kappa) < 0.05 and abs(better.both_wrong - better.both_wrong_by_chance) < 4 * np.sqrt(better.both_wrong)


def test_mean_score_never_sees_the_fold_it_judges():
    pairs, scores = some()
    mean, right = mean_score_accuracy(scores, pairs.same, pairs.fold)
    changed = [np.where(pairs.fold == 2, score * 3 + 100, score) for score in scores]
    test = pairs.fold == 2
    means = [(c[test] - s[~test].mean()) / s[~test].std() for c, s in zip(changed, scores)]
    again, _ = mean_score_accuracy(changed, pairs.same, pairs.fold)
    shift = np.mean(means, axis=0) - again[test]
    assert np.ptp(shift) < 1e-9, "the threshold of fold 2 changed with its own scores"
    originals = np.mean([(s[test] - s[~test].mean()) / s[~test].std() for s in scores], axis=0)
    assert shift[0] == pytest.approx((originals - mean[test])[0])
    strict = mean_score_accuracy(scores, pairs.same, pairs.fold, lambda s, y: far_threshold(s[~y], 0.01))
    assert (strict[0] < mean).all() and (strict[0][~pairs.same] >= 0).mean() < 0.03


def test_nothing_wrong_is_said_in_words_and_left_out_of_records():
    same, fold = np.array([True, False] * 10), np.arange(20) // 2
    result = agreement(same * 1.0, same * 2.0, same, fold, 0.5, 0.5)
    assert np.isnan([result.kappa, result.correlation, result.b_fixes]).all()
    assert fixed_share(0, 0)[1:] == (0.0, 1.0) and result.accuracy_oracle == 1.0
    record = agreement_metrics(result, "ab_")
    assert {"ab_kappa", "ab_b_fixes"}.isdisjoint(record) and all(np.isfinite(list(record.values())))
    assert agreement_table(result).value["both wrong"] == "0"


def test_one_kind_of_pairs_only():
    scores, fold = np.linspace(0, 1, 20), np.arange(20) % 2
    result = agreement(scores, scores[::-1], np.ones(20, bool), fold, 0.5, 0.5)
    assert (result.only_a, result.only_b) == (10, 10) and result.b_fixes == 1.0


def test_pictures_show_the_pairs_and_scores_they_name():
    pairs, scores = some()
    limits = thresholds(pairs, scores)
    pixels = np.random.default_rng(2).integers(0, 256, (40, 3, 28, 28), np.uint8)
    names = [f"folder/person_with_a_very_long_name_{n:04d}" for n in range(40)]
    axes = np.array(error_grid(pixels, pairs, scores[0], limits[0], names, count=3).axes).reshape(2, 3)
    limit = pair_thresholds(pairs.fold, limits[0])
    for row, kind in enumerate((False, True)):
        for ax, pair in zip(axes[row], hardest(scores[0], pairs.same, limit, kind)):
            shown = ax.images[0].get_array()
            assert (shown[:, :28] == pixels[pairs.a[pair]].transpose(1, 2, 0)).all()
            assert (shown[:, -28:] == pixels[pairs.b[pair]].transpose(1, 2, 0)).all()
            score, first, second = ax.get_xlabel().split("\n")
            assert score == f"{scores[0][pair]:.2f} {'<' if kind else '≥'} {limit[pair]:.2f}"
            assert first.endswith(f"{pairs.a[pair]:04d}") and second.endswith(f"{pairs.b[pair]:04d}") and len(first) == 24
    result = agreement(*scores, pairs.same, pairs.fold, *limits)
    figure = agreement_grid(pixels, pairs, *scores, *limits, ("one", "two"), count=2)
    titles = [figure.axes[row].get_title(loc="left") for row in (0, 2, 4)]
    assert titles == [f"only one is right: {result.only_a:,} pairs", f"only two is right: {result.only_b:,} pairs",
                      f"both are wrong: {result.both_wrong:,} pairs"]
    hits = [(score >= pair_thresholds(pairs.fold, part)) == pairs.same for score, part in zip(scores, limits)]
    beyond = [np.nan_to_num(wrong_by(score, pairs.same, pair_thresholds(pairs.fold, part))) for score, part in zip(scores, limits)]
    for place, chosen, far in [(0, hits[0] & ~hits[1], beyond[1]), (2, ~hits[0] & hits[1], beyond[0]), (4, ~hits[0] & ~hits[1], beyond[0] + beyond[1])]:
        first = np.argmax(np.where(chosen, far, -1))
        shown, words = figure.axes[place].images[0].get_array(), figure.axes[place].get_xlabel()
        assert (shown[:, :28] == pixels[pairs.a[first]].transpose(1, 2, 0)).all()
        assert words == f"{'one person' if pairs.same[first] else 'two people'}\none {scores[0][first]:.2f}\ntwo {scores[1][first]:.2f}"
    plane = agreement_plane(*scores, pairs, *limits).axes[0]
    offsets = np.concatenate([points.get_offsets() for points in plane.collections])
    assert len(offsets) == 400
    assert sum((x >= 0) != (y >= 0) for x, y in offsets) == result.only_a + result.only_b


def test_public_models_share_the_hard_pairs_of_lfw(golden):
    stored = np.load(golden / "verification.npz")
    same, fold = stored["LFW_same"].astype(bool), stored["LFW_fold"]
    scores = [stored[f"LFW_{model}_single"].astype(float) for model in ("xxs", "mfn")]
    limits = [verify(score, same, fold).accuracy_best.thresholds for score in scores]
    result = agreement(*scores, same, fold, *limits)
    assert (result.both_right, result.only_a, result.only_b, result.both_wrong) == (5933, 40, 10, 17)
    assert result.accuracy_a == pytest.approx(0.9955) and result.accuracy_oracle == pytest.approx(5983 / 6000)
