"""Intervals of verification numbers: do they hold the truth as often as they say, and are they those of the naive way?"""
import math

import numpy as np
import pytest
from scipy.stats import norm

from facenb.uncertainty import (
    STATISTICS, People, Ranking, UncertaintyError, _touched, compare, coverage, dense_design, folds_design, forest_figure,
    intervals, mcnemar, people_of_pairs, plan, seed_difference, simulated_scores, sparse_design, statistic, wilson)
from facenb.verify import metrics, verify



def data(design=folds_design, seed=0, models=1, **options):
    rng = np.random.default_rng(seed)
    who, a, b, fold = design(rng, **options)
    scores = simulated_scores(who, a, b, rng, 0.35, models)
    return (scores if models > 1 else scores[0]), who[a] == who[b], fold, who[a], who[b]


def few(rng):
    "Ten folds of 20 people"
    return folds_design(rng, 20, 100)


def numbers(result) -> dict[str, float]:
    "All metrics, also TARs at a FAR that so few different pairs cannot show, which records leave out"
    return metrics(result) | {f"tar_at_far_{target:g}": tar for target, tar in result.tar.items()}


@pytest.mark.parametrize("seed, decimals", [(0, 9), (1, 2), (2, 1), *((seed, 9) for seed in range(3, 12))])
def test_estimates_are_those_of_verify(seed, decimals):
    scores, same, fold, *people = data(people=12, pairs=60, seed=seed)
    scores = scores.round(decimals)
    found, wanted = intervals(scores, same, fold, *people, STATISTICS, replicates=20), numbers(verify(scores, same, fold))
    assert {name: one.estimate for name, one in found.items()} == pytest.approx({name: wanted[name] for name in STATISTICS}, abs=1e-12)


def test_a_promise_that_is_a_whole_number_of_impostors():
    "FAR 1e-3 of 2,000 impostors on the other folds accepts two"
    rng, same = np.random.default_rng(0), np.arange(6000) < 3000
    scores, fold = rng.normal(size=6000) + 3 * same, np.arange(6000) % 3
    found = statistic("accuracy_at_far", Ranking(scores, same, fold)).value(np.ones(len(same)))
    assert found == pytest.approx(verify(scores, same, fold).accuracy_at_far.mean, abs=1e-12)


@pytest.mark.parametrize("name", STATISTICS)
def test_weights_are_repetitions(name):
    "People drawn with replacement, pairs listed as often as both were drawn, everything computed anew"
    scores, same, fold, one, two = data(people=12, pairs=60)
    fast = statistic(name, Ranking(scores.round(2), same, fold))
    drawn = 1 + np.bincount(np.random.default_rng(1).integers(120, size=120), minlength=120)
    times = drawn[one] * np.where(same, 1, drawn[two])
    naive = verify(*(np.repeat(column, times) for column in (scores.round(2), same, fold)))
    wanted = numbers(naive)[name]
    if name.startswith("accuracy"):  # folds by their weight, as they have different people; half of the pairs are same pairs
        right = (scores.round(2) >= np.array(getattr(naive, name).thresholds)[fold]) == same
        wanted = np.mean([np.average(right[kind], weights=times[kind]) for kind in (same, ~same)])
    assert fast.value(times.astype(float)) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("name, tolerance", [("accuracy_best", 0.4), ("tar_at_far_0.1", 0.15), ("tar_at_far_0.01", 0.3), ("eer", 0.15),
                                             ("auc", 0.12), ("accuracy_at_threshold_0.2", 0.1)])
def test_residuals_are_the_first_order(name, tolerance):
    "Independent weights of pairs move a statistic by the root of the sum of squared residuals"
    scores, same, fold, *_ = data()
    one, rng = statistic(name, Ranking(scores, same, fold)), np.random.default_rng(0)
    values = [one.value(rng.gamma(4, 0.25, len(scores))) for _ in range(400)]
    assert np.std(values) == pytest.approx(math.sqrt(np.sum(one.residual ** 2) / 4), rel=tolerance)


@pytest.mark.parametrize("design", [few, dense_design, sparse_design])
def test_bootstrap_has_the_dyadic_variance(design):
    scores, same, fold, a, b = data(design)
    people, one = People(a, b, same), statistic("accuracy_at_threshold_0.2", Ranking(scores, same, fold))
    residual, drawing, rng = one.residual, plan(People(a, b, same), one.residual), np.random.default_rng(0)
    naive = 0.0  # the definition, person by person and once for each couple
    for person in np.unique(np.r_[a, b]):
        naive += residual[(a == person) | (b == person)].sum() ** 2
    for couple in {(min(p, q), max(p, q)) for p, q in zip(a.tolist(), b.tolist()) if p != q}:
        naive -= residual[(np.minimum(a, b) == couple[0]) & (np.maximum(a, b) == couple[1])].sum() ** 2
    pulled = sum(people.sums(residual * kind) / (1 - _touched(people, kind)) for kind in (same, ~same))
    naive += np.sum(pulled ** 2) - np.sum(people.sums(residual) ** 2)  # what people's own pull hides
    assert drawing.sd == pytest.approx(math.sqrt(naive), rel=1e-9)
    values = [one.value(people.draw(drawing.variance, rng)) for _ in range(500)]
    assert np.std(values) == pytest.approx(math.sqrt(naive), rel=0.12)


def test_a_set_of_strangers_is_a_set_of_independent_pairs():
    "Nobody is in two pairs, so the interval of a share is the one of independent trials"
    rng, trials = np.random.default_rng(0), 4000
    same = np.arange(trials) % 2 == 0
    a, b = np.arange(trials), np.where(same, np.arange(trials), np.arange(trials) + trials)
    scores = rng.normal(size=trials) + 2 * same
    found = intervals(scores, same, np.arange(trials) % 10, a, b, ["accuracy_at_threshold_1"], replicates=1000)["accuracy_at_threshold_1"]
    low, high = wilson(round(found.estimate * trials), trials)
    assert (found.high - found.low) == pytest.approx(high - low, rel=0.08)


def test_the_same_pairs_of_fewer_people_say_less():
    widths = []
    for people in (10, 40):
        scores, same, fold, *who = data(dense_design, people=people, images=160 // people, seed=3)
        one = intervals(scores, same, fold, *who, ["auc"], replicates=100)["auc"]
        widths.append(one.high - one.low)
    assert widths[0] > 1.3 * widths[1]


def test_coverage_of_a_small_version():
    table = coverage(few, ["auc", "tar_at_far_0.1", "accuracy_at_threshold_0.17"], datasets=100, replicates=40, seed=5).set_index("statistic")
    assert (table.coverage >= 0.95 - 4 * math.sqrt(0.95 * 0.05 / 100)).all(), table
    assert (table.width / (2 * norm.ppf(0.975) * table.sd)).between(0.8, 1.3).all(), table  # nor by being wide


@pytest.mark.slow
@pytest.mark.parametrize("design", [folds_design, sparse_design], ids=["cfp", "lfw"])
def test_coverage_is_nominal(design):
    "Within 2 points of 95 %, 3 where a threshold rests on two or three impostors (600 data sets: chance is 0.9 points)"
    table = coverage(design, STATISTICS, datasets=600, replicates=100).set_index("statistic")
    print(table.round(4).to_string())
    few = table.index.isin(["accuracy_at_far", "tar_at_far_0.001"])
    assert table.coverage[~few].between(0.93, 0.97).all() and table.coverage[few].between(0.92, 0.98).all(), table


@pytest.mark.slow
def test_coverage_of_all_pairs_of_fifty_people():
    table = coverage(dense_design, ["auc", "eer", "accuracy_at_threshold_0.175"], datasets=600, replicates=50)
    print(table.round(4).to_string())
    assert table.coverage.between(0.93, 0.97).all(), table


def test_compare_is_antisymmetric_and_narrower_than_its_parts():
    (one, two), *pairs = data(models=2)
    there, back = (compare(*both, *pairs, ["auc", "eer"], replicates=60) for both in ((one, two), (two, one)))
    alone = intervals(one, *pairs, ["auc", "eer"], replicates=60)
    parts = [statistic("auc", Ranking(scores, *pairs[:2])) for scores in (one, two)]
    assert ((parts[0] - parts[1]).residual == parts[0].residual - parts[1].residual).all()
    for name in there:
        assert (there[name].low, there[name].high) == pytest.approx((-back[name].high, -back[name].low))
        assert there[name].high - there[name].low < alone[name].high - alone[name].low


def equal_models(seed):
    "Two models as good as each other, each with people of its own that it finds hard"
    scores, same, fold, a, b = data(few, seed=seed, models=2)
    hard = 0.05 * np.random.default_rng(seed + 1000).normal(size=(2, max(a.max(), b.max()) + 1))
    return scores + np.where(same, hard[:, a], -(hard[:, a] + hard[:, b]) / 2), same, fold, a, b


@pytest.mark.slow
def test_differences_of_equal_models():
    "5 % of equal models are found different by the interval, and far more by McNemar's test, which knows no people"
    rejected = []
    for seed in range(400):
        (one, two), same, *rest = equal_models(seed)
        found = compare(one, two, same, *rest, ["auc", "accuracy_at_threshold_0.17"], replicates=60, seed=seed)
        right = [(part >= 0.17) == same for part in (one, two)]
        rejected.append([*(not part.low <= 0 <= part.high for part in found.values()), mcnemar(*right).p <= 0.05])
    print(np.mean(rejected, axis=0))
    assert (np.abs(np.mean(rejected, axis=0)[:2] - 0.05) <= 0.02).all() and np.mean(rejected, axis=0)[2] > 0.1


@pytest.mark.parametrize("scores", [lambda s, same: same * 1.0, lambda s, same: ~same * 1.0, lambda s, same: s * 0, lambda s, same: s.astype(np.float16),
                                    lambda s, same: s * 1e-30, lambda s, same: s * 1e30, lambda s, same: np.round(s, 1)],
                         ids=["perfect", "inverted", "equal", "float16", "tiny", "huge", "ties"])
def test_unusual_scores_have_intervals(scores):
    similarity, same, fold, *people = data(few)
    for name, one in intervals(scores(similarity, same), same, fold, *people, replicates=20).items():
        assert 0 <= one.low <= one.estimate <= one.high <= 1 and one.low < one.high, name


def test_nine_pairs():
    same = np.array([1, 0, 1, 0, 1, 0, 1, 0, 0], bool)
    a, b = np.arange(9), np.where(same, np.arange(9), np.arange(9) + 20)
    for one in intervals(np.linspace(0, 1, 9), same, np.arange(9) % 3, a, b, replicates=50).values():
        assert 0 <= one.low < one.high <= 1


def test_order_of_pairs_sides_and_names_do_not_matter():
    scores, same, fold, a, b = data(few)
    turn, swap = np.random.default_rng(0).permutation(len(same)), np.random.default_rng(1).random(len(same)) < 0.5
    wanted = intervals(scores, same, fold, a, b, replicates=20)
    left, right = np.where(swap, b, a)[turn], np.where(swap, a, b)[turn]
    for names in (left, right), (np.char.add("p", (left + 1000).astype(str)), np.char.add("p", (right + 1000).astype(str))):
        found = intervals(scores[turn], same[turn], fold[turn], *names, replicates=20)
        for name in wanted:
            assert (found[name].low, found[name].high) == pytest.approx((wanted[name].low, wanted[name].high), abs=1e-9), name


def test_guessed_people_of_a_list_with_joined_images():
    a, b, same = [0, 1, 3, 5], [1, 2, 4, 0], [True, True, True, False]
    one, two = people_of_pairs(a, b, same)
    assert one[0] == two[0] == one[1] == two[1] == two[3] != one[2] and one[3] not in (one[0], one[2])
    with pytest.raises(UncertaintyError, match=r"first rows: \[4\]"):
        people_of_pairs([*a, 0], [*b, 2], [*same, False])


def test_forest_takes_missing_models():
    scores, same, fold, *people = data(few)
    one = intervals(scores, same, fold, *people, ["auc"], replicates=20)["auc"]
    figure = forest_figure({"LFW": {"A": one, "B": one}, "CFP": {"B": one}}, "AUC")
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["A", "B"]


def test_seeds_that_agree():
    assert seed_difference([0.9, 0.9], [0.8, 0.8]).low == pytest.approx(0.1)
    with pytest.raises(UncertaintyError, match="two seeds"):
        seed_difference([0.9], [0.8, 0.7])


def test_one_impostor_far_above_the_rest():
    "The replicates of TAR at FAR 1e-3 fall into two heaps; the interval runs from one to the other and not beyond"
    scores, same, fold, *people = data(sparse_design)
    scores[np.flatnonzero(~same)[0]] = 0.5  # above most same pairs
    found = intervals(scores, same, fold, *people, ["tar_at_far_0.001"], replicates=400)["tar_at_far_0.001"]
    least, most = (np.mean(scores[same] > np.sort(scores[~same])[-rank]) for rank in (1, 40))
    assert least - 0.05 < found.low < least + 0.1 and found.estimate + 0.01 < found.high < most and "rests on 3 impostors" in found.method
