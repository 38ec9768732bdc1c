"""A threshold carried over: its promise holds for the population, and the numbers are those of counting."""
import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom, norm

from facenb.transfer import (TransferError, calibrate, describe, far_bound, impostors_to_promise, people_once, smallest_far, transfer,
                             transfer_figure, transfer_table)
from facenb.verify import VerificationError


@pytest.mark.parametrize("accepted, impostors, level", [(0, 1, 0.95), (0, 3000, 0.95), (7, 90, 0.5), (40, 41, 0.99), (3, 10**6, 0.95)])
def test_bound_is_where_so_few_become_unlikely(accepted, impostors, level):
    bound = far_bound(accepted, impostors, level)
    assert binom.cdf(accepted, impostors, bound) == pytest.approx(1 - level, rel=1e-9)
    assert bound > accepted / impostors or level == 0.5


@pytest.mark.parametrize("far", [0.5, 0.1, 0.01, 1e-3, 1e-4, 1e-6])
def test_impostors_that_a_promise_needs(far):
    needed = impostors_to_promise(far)
    assert smallest_far(needed) <= far < (smallest_far(needed - 1) if needed > 1 else 1)
    if needed < 10**5:
        scores = np.arange(needed) / needed
        assert calibrate(scores, far, safe=True).bound <= far
        with pytest.raises(TransferError, match=f"{needed:,} are needed"):
            calibrate(scores[1:], far, safe=True)


@pytest.mark.parametrize("values", [2, 20, 1000, None])
def test_safe_promises_hold_for_populations_with_and_without_ties(values):
    "Populations of a few distinct scores, where ties are the rule, and of none"
    rng, kept, trials = np.random.default_rng(0), 0, 600
    for _ in range(trials):
        scores = rng.random(300) if values is None else rng.integers(0, values, 300) / values
        chosen = calibrate(scores, 0.03, safe=True)
        t = chosen.threshold
        true = max(1 - t, 0) if values is None else max(values - math.ceil(t * values - 1e-9), 0) / values
        kept += true <= chosen.bound <= 0.03
        assert chosen.accepted <= chosen.allowed
    assert kept / trials >= 0.95 - 2.5 * math.sqrt(0.95 * 0.05 / trials)


def test_plain_bound_covers_the_true_far():
    rng = np.random.default_rng(1)
    chosen = [calibrate(rng.random(500), 0.02) for _ in range(600)]
    assert np.mean([1 - c.threshold <= c.bound for c in chosen]) >= 0.93
    assert all(c.bound == far_bound(10, 500) for c in chosen)  # as many as might have been accepted: ties need it
    assert 0.35 < np.mean([1 - c.threshold <= 0.02 for c in chosen]) < 0.75  # the plain promise is for these pairs only


def test_intervals_cover_the_true_rates():
    rng, impostor, genuine = np.random.default_rng(2), norm(0, 0.1), norm(0.5, 0.15)
    chosen = calibrate(impostor.rvs(20_000, random_state=3), 0.01)
    covered = {"far": 0, "tar": 0}
    for _ in range(300):
        scores = np.r_[impostor.rvs(400, random_state=rng) + 0.03, genuine.rvs(400, random_state=rng)]
        row = transfer(chosen, scores, np.arange(800) >= 400, cosine=False)
        for rate, true in (("far", impostor.sf(chosen.threshold - 0.03)), ("tar", genuine.sf(chosen.threshold))):
            covered[rate] += row[f"{rate}_low"] <= true <= row[f"{rate}_high"]
    assert all(0.91 < count / 300 < 0.99 for count in covered.values()), covered


def test_promise_in_words():
    many, threshold = 20_000, calibrate(np.linspace(0, 0.999, 1000), 0.1, "a")

    def promise(accepted, impostors=many):
        scores = np.r_[np.ones(accepted), np.zeros(impostors - accepted), np.ones(5)]
        return transfer(threshold, scores, np.arange(impostors + 5) >= impostors)["promise"]

    assert [promise(int(share * many)) for share in (0.05, 0.099, 0.1, 0.101, 0.15)] == ["kept", *["undecided"] * 3, "broken"]
    assert [promise(accepted, 20) for accepted in (0, 1, 20)] == ["undecided", "undecided", "broken"]


def test_what_cannot_be_calibrated_is_named():
    for wrong, message in [(([], 0.1), "without different pairs"), (([0.1, np.nan], 0.1), r"first rows: \[1\]"),
                           (([0.1, 0.2], 1.5), "far=1.5"), (([0.1, 0.2], -1), "far=-1"), (([[0.1], [0.2]], 0.1), r"shape \(2, 1\)")]:
        with pytest.raises(ValueError, match=message):
            calibrate(*wrong)
    with pytest.raises(TransferError, match="level=1"):
        calibrate([0.1, 0.2], 0.1, level=1)
    chosen = calibrate([0.1, 0.2], 0.5)
    with pytest.raises(VerificationError, match="none of the 2 pairs is a same pair"):
        transfer(chosen, [0.1, 0.2], [0, 0])
    with pytest.raises(VerificationError, match="divide embeddings by their length"):
        transfer(chosen, [0.1, 20.0], [0, 1])
    with pytest.raises(TransferError, match="level=0"):
        transfer(chosen, [0.1, 0.2], [0, 1], level=0)


def test_half_precision_scores_keep_the_promise():
    "NumPy would round the threshold to float16 and let the tie in"
    scores = np.full(1000, 0.5, np.float16)
    chosen = calibrate(scores, 1e-3)
    row = transfer(chosen, np.r_[scores, np.float16(0.9)], np.arange(1001) == 1000)
    assert (chosen.accepted, row["far_accepted"], row["tar"]) == (0, 0, 1.0)
    assert "0 of 1,000" in describe(chosen)


def test_people_once():
    rng = np.random.default_rng(4)
    a, b = rng.integers(0, 300, (2, 2000))
    a, b = a[a != b], b[a != b]
    for seed in range(5):
        chosen = people_once(a, b, seed)
        used = np.r_[a[chosen], b[chosen]]
        assert len(set(used)) == len(used) and chosen.tolist() == sorted(chosen.tolist())
        assert (np.isin(a, used) | np.isin(b, used)).all()  # no further pair has two new people
    assert people_once([], []).tolist() == []


def test_golden_thresholds_carry_over_as_counted(golden):
    stored = np.load(golden / "verification.npz")
    sets = {name: (stored[f"{name}_xxs_single"], stored[f"{name}_same"]) for name in ("LFW", "FF", "FP")}
    table = transfer_table(sets, 1e-3)
    assert len(table) == 9 and isinstance(table, pd.DataFrame)
    for row in table.itertuples():
        similarity, same = sets[row.calibrated_on]
        threshold = np.sort(similarity[~same].astype(float))[-3]  # 3 of 3,000 or 3,500
        similarity, same = sets[row.tested_on]
        assert (row.threshold, row.far_accepted, row.tar_accepted) == \
            (threshold, np.sum(similarity[~same] >= threshold), np.sum(similarity[same] >= threshold))
        assert row.threshold_l2**2 == pytest.approx(2 - 2 * threshold, abs=1e-12)
        assert row.own_set == (row.calibrated_on == row.tested_on) == (row.promise == "own set")
    assert {row.promise for row in table.itertuples() if row.calibrated_on == "FP" and not row.own_set} == {"broken"}
    figure = transfer_figure(table)
    assert [text.get_text() for text in figure.axes[0].texts][6].split("\n") == ["0.27 %", "0.14 .. 0.53", "broken"]
