"""Geometry on the sphere: against naive versions, on known shapes, under adversarial input, and with honest intervals."""
import hashlib
import io
import math
import os
import tracemalloc
import zipfile
from itertools import permutations
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from PIL import Image
from scipy.stats import skew, t

from facenb.geometry import (MEASURES, GeometryError, alignments, angle_figure, center_angles, compare_geometry, copies, cosine_cdf,
                             freedom_sentence, geometry, geometry_figure, hubness, intrinsic_dimension, jackknife_interval,
                             jackknife_se, nearest_figure, nearest_mean, nearest_person, nearest_points, nearest_quantile, participation,
                             people_vectors, uniform_law, uniformities, uniformity_law, unit_vectors)


def faces(people=40, images=5, dim=16, spread=0.4, seed=0, cone=0.3):
    "People of 1 to `images` images around directions that crowd on one side; labels in no order"
    rng = np.random.default_rng(seed)
    who = np.repeat(rng.permutation(1000)[:people], rng.integers(1, images + 1, people))
    middle = rng.normal(size=(people, dim)) * np.linspace(0.4, 1, dim) + cone
    z = middle[np.unique(who, return_inverse=True)[1]] + spread * rng.normal(size=(len(who), dim))
    order = rng.permutation(len(who))
    return z[order], who[order]


def uniform(count, dim, seed=0):
    return unit_vectors(np.random.default_rng(seed).normal(size=(count, dim)))


def naive(z, who, k):
    "Every measure from its definition, with loops"
    z = z.astype(float) / np.linalg.norm(z.astype(float), axis=1, keepdims=True)
    people = sorted(set(who.tolist()))
    n = len(z)
    apart = {p: [((z[i] - z[j]) ** 2).sum() for i in range(n) for j in range(i) if who[i] == who[j] == p] for p in people}
    near = lambda i, j: math.exp(-2 * ((z[i] - z[j]) ** 2).sum())
    between = [np.mean([near(i, j) for i in np.flatnonzero(who == p) for j in np.flatnonzero(who == q)])
               for p in people for q in people if p != q]
    centre = np.array([z[who == p].mean(0) for p in people])
    centre /= np.linalg.norm(centre, axis=1, keepdims=True)
    order = [sorted((((centre[p] - centre[q]) ** 2).sum() ** 0.5, q) for q in range(len(people)) if q != p)[:k] for p in range(len(people))]
    ratio = np.sort([math.log(row[1][0] / row[0][0]) for row in order])[:int(0.9 * len(people))]
    line = [-math.log(1 - (i + 1) / len(people)) for i in range(len(ratio))]
    dot, p = centre @ centre.T, len(people)
    square = (np.mean([dot[i, j] ** 2 for i, j in permutations(range(p), 2)])
              - 2 * np.mean([dot[i, j] * dot[i, m] for i, j, m in permutations(range(p), 3)])
              + np.mean([dot[i, j] * dot[m, o] for i, j, m, o in permutations(range(p), 4)]))
    trace = 1 - np.mean([dot[i, j] for i, j in permutations(range(p), 2)])
    popular = [sum(q == p for row in order for _, q in row) for p in range(len(people))]
    return {
        "alignment_images": np.mean(sum(apart.values(), [])), "alignment_people": np.mean([np.mean(a) for a in apart.values() if a]),
        "uniformity_images": math.log(np.mean([near(i, j) for i in range(n) for j in range(n) if i != j])),
        "uniformity_people": math.log(np.mean(between)), "participation_ratio": trace**2 / square,
        "intrinsic_dimension_twonn": np.dot(ratio, line) / np.dot(ratio, ratio),
        "intrinsic_dimension_mle": 1 / np.mean([math.log(row[-1][0] / row[j][0]) for row in order for j in range(k - 1)]),
        "nearest_person_similarity": np.mean([1 - row[0][0] ** 2 / 2 for row in order]),
        "hubness_skewness": skew(popular), "hubness_top_share": max(popular) / sum(popular),
        "hubness_never_share": np.mean(np.array(popular) == 0)}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind, tolerance", [(np.float64, 1e-9), (np.float32, 1e-4), (np.float16, 2e-2)])
def test_every_measure_is_its_definition(seed, kind, tolerance):
    z, who = faces(people=17, images=4, dim=9, seed=seed)
    z = z.astype(kind)
    found, expected = geometry(z, who, k=4), naive(z, who, 4)
    assert found.values.keys() == expected.keys()
    for name, value in expected.items():
        assert found.values[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


def test_nothing_depends_on_how_embeddings_are_given():
    z, who = faces()
    turn = np.linalg.qr(np.random.default_rng(5).normal(size=(16, 16)))[0]
    order = np.random.default_rng(6).permutation(len(z))
    plain, other = geometry(z, who), geometry((z @ turn * np.linspace(1e-3, 1e3, len(z))[:, None])[order], who[order])
    for name in MEASURES:
        assert other.values[name] == pytest.approx(plain.values[name], abs=1e-9), name
        np.testing.assert_allclose(other.interval(name), plain.interval(name), rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("rows", [1, 13, 10_000])
def test_block_size_changes_nothing(rows):
    z, who = faces(people=20)
    for (name, (value, without)), (_, expected) in zip(uniformities(z, who, rows).items(), uniformities(z, who).values()):
        assert value == pytest.approx(uniformities(z, who)[name][0], abs=1e-12)
        np.testing.assert_allclose(without, expected, atol=1e-12)
    x = people_vectors(z, who)[1]
    np.testing.assert_array_equal(nearest_points(x, 7, rows)[1], nearest_points(x, 7)[1])
    np.testing.assert_array_equal(copies(np.concatenate([x, x[3:5]]), rows=rows), [False] * 20 + [True] * 2)
    for by in ("centroid", "image"):
        found, expected = nearest_person(z, who, by, rows), nearest_person(z, who, by)
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_nearest_person_by_image_against_loops():
    z, who = faces(people=15)
    unit = unit_vectors(z)
    for row in nearest_person(z, who, "image").itertuples():
        ours, others = unit[who == row.person], np.flatnonzero(who != row.person)
        similarity = (ours @ unit[others].T).max(0)
        assert row.similarity == pytest.approx(similarity.max()) and row.nearest == who[others[similarity.argmax()]]


# Known shapes

@pytest.mark.parametrize("k, count, low, high", [
    (2, 1000, 1.85, 2.15), (8, 1000, 7.0, 8.6), (32, 1000, 19, 29), (32, 100, 15, 27), (128, 1000, 45, 80), (500, 1000, 100, 500)])
def test_intrinsic_dimension_of_spheres_in_512_dimensions(k, count, low, high):
    "Right when there are few dimensions, too low when there are many: the bias is part of the contract"
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(512, k + 1)))[0]
    found = [intrinsic_dimension(uniform(count, k + 1, seed) @ turn.T) for seed in range(3)]
    for name in ("twonn", "mle"):
        assert low < np.mean([f[name] for f in found]) < high, name


def test_all_images_measure_the_spread_within_people():
    "Why intrinsic dimension is of people: their near copies have the dimension of the noise"
    rng = np.random.default_rng(0)
    people = uniform(300, 4)  # three dimensions between people, forty within
    z = np.pad(people, ((0, 0), (0, 40))).repeat(12, 0) + 1e-2 * np.pad(rng.normal(size=(3600, 40)), ((0, 0), (4, 0)))
    who = np.arange(300).repeat(12)
    for name in ("twonn", "mle"):
        assert intrinsic_dimension(z)[name] > 6
        assert intrinsic_dimension(people_vectors(z, who)[1])[name] == pytest.approx(3, abs=0.5)


def test_unseen_people_against_the_law():
    for count, dim in ((50, 4), (400, 32), (1000, 128)):
        best = np.concatenate([np.sort(nearest_points(uniform(count, dim, seed), 1)[0][:, 0]) for seed in range(10)])
        cosine = 1 - best**2 / 2
        assert cosine.mean() == pytest.approx(nearest_mean(count, dim), abs=0.01)
        for share in (0.1, 0.5, 0.9):
            assert (cosine <= nearest_quantile(share, count, dim)).mean() == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("points", [2, 3, 10, 1000])
def test_law_of_the_nearest_in_three_dimensions(points):
    "There the cosine is uniform (Archimedes), so the nearest is the largest of uniform numbers"
    assert nearest_mean(points, 3) == pytest.approx((points - 2) / points, abs=1e-6)
    assert nearest_quantile(0.3, points, 3) == pytest.approx(2 * 0.3 ** (1 / (points - 1)) - 1, abs=1e-12)


def test_law_of_uniformity_and_of_participation():
    for dim in (2, 8, 128):
        found = [uniform(60, dim, seed) for seed in range(20)]
        near = [uniformities(x, np.arange(60))["uniformity_people"][0] for x in found]
        assert np.log(np.mean(np.exp(near))) == pytest.approx(uniformity_law(dim), abs=0.02)
        assert 1 / np.mean([1 / participation(x)[0] for x in found]) == pytest.approx(dim, rel=0.05)
    assert uniformity_law(10**6) == pytest.approx(-4, abs=1e-4)


def test_participation_sees_more_dimensions_than_people():
    x = [uniform(12, 100, seed) for seed in range(300)]
    assert 1 / np.mean([1 / participation(one)[0] for one in x]) == pytest.approx(100, rel=0.1)
    simplex = unit_vectors(np.eye(12) - 1 / 12)
    assert math.isnan(participation(simplex)[0])  # the traces say: no variance is shared at all


def test_the_most_popular_are_one_in_a_hundred():
    ids = np.repeat([0, 1, 2], [100, 60, 40])[:, None]
    assert hubness(ids, 200)["hubness_top_share"] == 0.8 and hubness(ids, 200)["hubness_never_share"] == 197 / 200
    assert hubness(ids[:199], 199)["hubness_top_share"] == 160 / 199 and hubness(ids[:100], 100)["hubness_top_share"] == 1


def test_hubs_are_found_where_there_is_a_middle():
    cone = lambda height: hubness(nearest_points(unit_vectors(uniform(400, 60) + height * np.eye(60)[0]), 10)[1], 400)
    assert cone(0.7)["hubness_skewness"] > 1.2 > 0.5 > abs(cone(0)["hubness_skewness"])
    assert cone(0.7)["hubness_top_share"] > 2 * cone(0)["hubness_top_share"]


@pytest.mark.parametrize("count, dim", [(3, 2), (30, 64), (30, 29), (65, 64)])
def test_simplex_is_recognised(count, dim):
    corners = np.linalg.svd(np.eye(count) - 1 / count)[0][:, :count - 1] if count <= dim + 1 else None
    found = center_angles(np.pad(corners, ((0, 0), (0, dim - count + 1)))).metrics()
    assert found["center_angle"] == pytest.approx(math.degrees(math.acos(-1 / (count - 1))), abs=0.01)
    assert found["simplex_gap"] < 1e-6 and found["nearest_center_angle_min"] == pytest.approx(found["center_angle"], abs=0.01)


def test_random_centres_follow_the_law():
    relative = [center_angles(uniform(30, 64, seed)).metrics()["simplex_gap_relative"] for seed in range(20)]
    assert np.mean(relative) == pytest.approx(1, abs=0.02)
    found = center_angles(uniform(2000, 64).astype(np.float32)).metrics()
    assert found["center_angle_ks"] < 2e-3 and found["center_angle"] == pytest.approx(90, abs=0.02)
    assert found["center_angle_sd"] == pytest.approx(math.degrees(1 / 8), abs=0.1)
    crowded = center_angles(uniform(2000, 64) + 0.5 * np.eye(64)[0]).metrics()
    assert crowded["center_angle_ks"] > 0.3 and "simplex_gap" not in crowded


@pytest.mark.parametrize("rows", [1, 5, 64, 4096])
def test_tiles_see_every_pair_once(rows):
    w = np.random.default_rng(1).normal(size=(83, 7))
    cosine = unit_vectors(w) @ unit_vectors(w).T
    pairs, found = cosine[np.triu_indices(83, 1)], center_angles(w, rows)
    assert found.histogram.sum() == len(pairs)
    edges = np.linspace(-1, 1, 201)
    np.testing.assert_array_equal(found.histogram.reshape(200, 100).sum(1), np.histogram(pairs, edges)[0])
    np.testing.assert_allclose(found.nearest, (cosine - 2 * np.eye(83)).max(1), atol=1e-12)
    expected = max(max(abs(above - law), abs(below - law)) for above, below, law in
                   zip(np.arange(1, len(pairs) + 1) / len(pairs), np.arange(len(pairs)) / len(pairs), cosine_cdf(np.sort(pairs), 7)))
    assert found.ks() == pytest.approx(expected, abs=2e-3)


def test_a_large_matrix_is_never_held():
    z, who = uniform(6000, 16).astype(np.float32), np.arange(6000) // 2  # 6,000^2 float32: 144 MB
    for work in (lambda: uniformities(z, who), lambda: nearest_person(z, who, "image"), lambda: copies(z),
                 lambda: nearest_points(z, 50), lambda: center_angles(z), lambda: geometry(z, who)):
        tracemalloc.start()
        work()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 130e6, peak


# Errors

@pytest.mark.parametrize("change, message", [
    (lambda z, who: (np.where(np.arange(len(z))[:, None] == 3, np.nan, z), who), r"1 of \d+ embeddings .* first rows: \[3\]"),
    (lambda z, who: (np.where(np.arange(len(z))[:, None] < 2, 0, z), who), r"2 of \d+ embeddings .* first rows: \[0, 1\]"),
    (lambda z, who: (z[:, :1], who), "d >= 2"), (lambda z, who: (z + 1j, who), "complex128"), (lambda z, who: (z[0], who), r"\(16,\)"),
    (lambda z, who: (z, who[1:]), "one an embedding"), (lambda z, who: (z, who + 0.5), "whole numbers"),
    (lambda z, who: (z[:4], np.arange(4)), "4 people: at least 5"), (lambda z, who: (z[:0], who[:0]), "0 people"),
    (lambda z, who: (np.ones((8, 3)), np.arange(8)), "7 are copies of others"),
    (lambda z, who: (np.concatenate([z[:1], -z[:1], z]), np.r_[-5, -5, who]), r"cancel out.*\[-5\]"),
])
def test_input_without_an_answer_is_named(change, message):
    with pytest.raises(GeometryError, match=message):
        geometry(*change(*faces()))


@pytest.mark.parametrize("work, message", [
    (lambda z, who: alignments(z, np.arange(len(z))), r"all \d+ people have one"),
    (lambda z, who: geometry(z, who, k=1), r"k = 1 .* 2\.\.26"), (lambda z, who: geometry(z, who, k=27), r"2\.\.26"),
    (lambda z, who: nearest_person(z, who * 0), "1 people: at least 2"), (lambda z, who: nearest_person(z, who, "mean"), "'mean'"),
    (lambda z, who: intrinsic_dimension(z[:10], 10), "10 different points"), (lambda z, who: intrinsic_dimension(z, 1), "k = 1"),
    (lambda z, who: center_angles(z * 0), "centres are zero"), (lambda z, who: center_angles(z[:2]), "2 centres"),
    (lambda z, who: compare_geometry([geometry(z, who)], []), "1 and 0 seeds"),
    (lambda z, who: compare_geometry([geometry(z, who)], [geometry(z, who + 1)]), "different people"),
    (lambda z, who: compare_geometry([geometry(z, who)], [geometry(z, who, k=3)]), "another k"),
])
def test_questions_without_an_answer_are_named(work, message):
    with pytest.raises(GeometryError, match=message):
        work(*faces())


@pytest.mark.parametrize("people, k", [(5, 2), (10, 4), (11, 5), (20, 9), (21, 10), (60, 10)])
def test_few_people_have_few_neighbours(people, k):
    assert geometry(uniform(people, 8), np.arange(people)).k == k


def test_one_image_of_each_person_has_no_alignment():
    z = uniform(20, 6)
    found = geometry(z, np.arange(20))
    assert found.counts == {"images": 20, "people": 20, "people_with_pairs": 0, "people_copied": 0}
    assert found.values.keys() == MEASURES.keys() - {"alignment_images", "alignment_people"}
    assert found.values["uniformity_people"] == pytest.approx(found.values["uniformity_images"])


def test_copies_are_left_out_and_counted():
    z = uniform(200, 6)
    twice = np.concatenate([z, z[:30], z[:5] + 1e-7]).astype(np.float32)
    assert copies(unit_vectors(twice)).sum() == 35
    with_copies, without = intrinsic_dimension(twice), intrinsic_dimension(z)
    assert with_copies["copies"] == 35 and with_copies["points"] == 200
    assert with_copies["twonn"] == pytest.approx(without["twonn"], rel=1e-3)
    found = geometry(twice, np.arange(235))
    assert found.counts["people_copied"] == 35 and all(np.isfinite(list(found.values.values())))
    assert found.values["intrinsic_dimension_mle"] == pytest.approx(without["mle"], rel=1e-3)
    assert np.sum(found.nearest > 1 - 1e-6) == 2 * 30 + 5  # five lie there three times


def test_identical_files_of_cfp():
    "55 frontal files in 27 groups are byte for byte the same: 28 copies"
    if not (data := os.environ.get("FACENB_DATA")):
        pytest.skip("FACENB_DATA is not set")
    groups = {}
    with zipfile.ZipFile(Path(data) / "faces" / "cfp.zip") as files:
        for name in files.namelist():
            if "/frontal/" in name and name.endswith(".jpg") and "/Images/" in name:
                content = files.read(name)
                groups.setdefault(hashlib.sha256(content).hexdigest(), []).append(content)
    same = [content for group in groups.values() if len(group) > 1 for content in group]
    others = [group[0] for group in list(groups.values())[:200] if len(group) == 1]
    grey = np.array([np.asarray(Image.open(io.BytesIO(c)).convert("L").resize((16, 16)), float).ravel() for c in same + others])
    found = intrinsic_dimension(grey - grey.mean())
    assert (len(same), found["copies"]) == (55, 28) and 1 < found["twonn"] < 60


# Uncertainty

def test_what_is_left_out_is_left_out():
    "Each value without some people is what the measure of the others gives, copies among people included"
    z, who = faces(people=17, images=3)
    z, who = np.concatenate([z, z[who == who[0]]]), np.r_[who, np.full((who == who[0]).sum(), 2000)]
    found = geometry(z, who, k=4)
    rng, measured = np.random.default_rng(0), {1: [], 6: []}
    for people in [[person] for person in found.people] + [found.people[rng.permutation(18)[:6]] for _ in range(8)]:
        if len(people) == 1 or not {who[0], 2000} & {*people}:  # else the copy takes the place of the original
            rest = ~np.isin(who, people)
            measured[len(people)].append(geometry(z[rest], who[rest], k=4).values)
        else:
            measured[len(people)].append(None)
    for name, deleted in found.deleted.items():
        pairs = [(ours, values[name]) for ours, values in zip(found.without[name], measured[deleted]) if values]
        assert len(pairs) >= 3
        np.testing.assert_allclose(*zip(*pairs), atol=1e-9, err_msg=name)


def test_intervals_hold_the_truth():
    "Means over people about as often as said; measures of neighbours rather more often"
    found = [geometry(*faces(people=30, images=4, seed=seed)) for seed in range(100)]
    for name, measure in MEASURES.items():
        if name == "hubness_never_share":
            continue  # mostly 0 with nothing to tell how sure that is
        truth = np.mean([one.values[name] for one in found])
        holds = np.mean([low <= truth <= high for low, high in (one.interval(name) for one in found)])
        assert holds > 0.87, name
        change = np.log if measure.ratio else np.asarray
        spread = np.std(change([one.values[name] for one in found]))
        error = np.mean([jackknife_se(change(one.without[name]), 30, one.deleted[name]) for one in found])
        assert 0.85 < error / spread < 2.1, name


def test_models_that_differ_by_nothing_are_told_apart_seldom_and_others_always():
    "Two models of one kind on the same people, three seeds each"
    def model(seed, people, scale=1.0):
        rng = np.random.default_rng(seed)
        z = people + 0.3 * rng.normal(size=people.shape)
        z[:, 6:] *= scale
        return geometry(z, np.arange(len(z)))

    verdicts, flattened = [], []
    for trial in range(10):
        people = np.random.default_rng(trial).normal(size=(30, 24))
        first, second = [[model(1000 * trial + 10 * seed + side, people) for seed in range(3)] for side in range(2)]
        verdicts += compare_geometry(first, second).verdict.tolist()
        flat = [model(1000 * trial + 10 * seed + 5, people, 0.2) for seed in range(3)]
        flattened.append(compare_geometry(first, flat).verdict)
    assert np.mean([verdict != "cannot be told" for verdict in verdicts]) < 0.05
    for claim in ("uniformity_people", "participation_ratio", "intrinsic_dimension_mle", "nearest_person_similarity"):
        assert np.mean([verdict[claim] == "freer" for verdict in flattened]) > 0.9, claim


def test_comparison_adds_both_variances():
    z, who = faces(people=25)
    rng = np.random.default_rng(0)
    seeds = lambda spread: [geometry(z + spread * rng.normal(size=z.shape), who) for _ in range(3)]
    first, second = seeds(0.1), seeds(0.3)
    name = "nearest_person_similarity"
    row = compare_geometry(first, second, 0.9).loc[name]
    by_seed = np.array([a.values[name] - b.values[name] for a, b in zip(first, second)])
    rest = np.mean([a.without[name] - b.without[name] for a, b in zip(first, second)], axis=0)
    people, seed = (25 - 8) / 8 * np.var(rest), by_seed.var(ddof=1) / 3
    freedom = (people + seed) ** 2 / (people**2 / 24 + seed**2 / 2)
    reach = t.ppf(0.95, freedom) * math.sqrt(people + seed)
    assert [row.low, row.high] == pytest.approx([by_seed.mean() - reach, by_seed.mean() + reach])
    assert row.people_share == pytest.approx(people / (people + seed))
    one = compare_geometry(first[:1], second[:1]).loc["participation_ratio"]
    ratio = first[0].without["participation_ratio"] / second[0].without["participation_ratio"]
    assert [one.low, one.high] == pytest.approx(jackknife_interval(one.difference, ratio, 25, ratio=True))


def test_directions_of_the_verdict():
    z, who = faces(people=30, cone=0.0)
    free, crowded = geometry(z, who), geometry(z + 3 * np.eye(16)[0], who)
    there, back = [compare_geometry([a], [b]).verdict for a, b in ((free, crowded), (crowded, free))]
    swap = {"freer": "less free", "less free": "freer", "higher": "lower", "lower": "higher", "cannot be told": "cannot be told"}
    assert back.tolist() == there.map(swap).tolist()
    assert there["uniformity_people"] == there["nearest_person_similarity"] == "freer" and there["alignment_people"] == "higher"
    sentence = freedom_sentence(compare_geometry([free], [crowded]), "free", "crowded")
    claims = [name for name in MEASURES if MEASURES[name].claim]
    assert sentence.startswith("30 people, seeds: 1, each interval at 95% by itself. Of 6 claims") and all(name in sentence for name in claims)


def test_nothing_is_certain_because_nobody_made_a_difference():
    assert np.isnan(jackknife_interval(0.0, np.zeros(9), 9)).all()
    z, who = faces(people=30)
    found = geometry(z, who)
    found.values["hubness_never_share"], found.without["hubness_never_share"] = 0.1, np.full(200, 0.1)
    other = geometry(z, who)
    other.values["hubness_never_share"], other.without["hubness_never_share"] = 0.0, np.zeros(200)
    row = compare_geometry([found], [other]).loc["hubness_never_share"]
    assert math.isnan(row.low) and row.verdict == "cannot be told"
    another = geometry(z, who)  # seeds that differ do not help: it is the people who say nothing
    another.values["hubness_never_share"], another.without["hubness_never_share"] = 0.11, np.full(200, 0.11)
    row = compare_geometry([found, another], [other, other]).loc["hubness_never_share"]
    assert math.isnan(row.low) and row.verdict == "cannot be told"
    same = compare_geometry([found, another], [found, another])
    assert (same.low[same.scale == "difference"] == 0).all() and (same.verdict == "cannot be told").all()


# Records and figures

def test_metrics_fit_a_record():
    from facenb.runs import make_record
    found = geometry(*faces(people=6))
    record = make_record("g", {"seed": 0}, found.metrics(), found.units(), found.counts, {}, [])
    assert record["metrics"].keys() == {name + end for name in MEASURES for end in ("", "_low", "_high")}
    angles = center_angles(uniform(9, 16))
    assert angles.metrics().keys() == angles.units().keys() and angles.units()["center_angle_ks"] == "1"


def test_figure_shows_every_seed_and_the_law():
    models = {"a": [geometry(*faces(people=12, dim=8))] * 2, "b": [geometry(*faces(people=12, dim=8))]}
    figure = geometry_figure(models)
    claims = [name for name in MEASURES if MEASURES[name].claim]
    law = uniform_law(12, 8, models["a"][0].k)
    for ax, name in zip(figure.axes, claims):
        dots = [line for line in ax.lines if line.get_marker() == "o"]
        assert len(dots) == 3 and all(line.get_ydata()[0] == models["a"][0].values[name] for line in dots)
        assert [line.get_ydata()[0] for line in ax.lines if line.get_linestyle() == "--"] == [law[name]]
        assert sorted(ax.lines[1].get_ydata()) == sorted(models["a"][0].interval(name))
    plt.close(figure)
    figure = nearest_figure({"a": models["a"][0], "random": geometry(uniform(2000, 8), np.arange(2000))})
    bars, law = figure.axes[1].patches, figure.axes[1].lines[0].get_ydata()
    assert sum(bar.get_height() for bar in bars) * 0.02 == pytest.approx(1) and sum(law) * 0.02 == pytest.approx(1, abs=1e-6)
    assert np.abs(law - [bar.get_height() for bar in bars]).sum() * 0.02 < 0.2
    plt.close(figure)
    angles = {"random": center_angles(uniform(40, 8)), "axes": center_angles(np.eye(8))}
    figure = angle_figure(angles)
    for ax, found in zip(figure.axes, angles.values()):
        assert sum(patch.get_height() for patch in ax.patches[:180]) == pytest.approx(1)  # density a degree
        for line in ax.lines:
            assert line.get_ydata().sum() == pytest.approx(1, abs=1e-6)
        beyond = ax.lines[1].get_ydata()[60:].sum()  # nearest farther than 60 degrees
        assert beyond == pytest.approx(cosine_cdf(0.5, 8) ** (found.centers - 1), abs=1e-9)
        assert ax.get_xlim()[0] < math.degrees(math.acos(found.nearest.max())) < ax.get_xlim()[1]
    plt.close(figure)
