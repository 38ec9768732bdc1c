"""Class centres: the same bits for any tiles, little memory, named errors, known answers of snapping."""
import numpy as np
import pytest
import torch
from scipy.stats import binom

from facenb import centers as module
from facenb.bench import fresh
from facenb.centers import CenterError, CentroidSum, class_centroids, head_centers, nearest_centers
from facenb.hybrid import Hybrid
from facenb.losses import InfoNCE
from facenb.margin import ArcFace
from facenb.sharded import ShardedHead
from facenb.snapping import (Snapping, _growing, association, metrics, people_intervals, random_closer, random_nearest, random_nearest_quantile,
                             same_center_chance, snapping, snapping_by_count)


def unit(x):
    x = np.asarray(x, float)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def all_cosines(z, w):
    "Best of K, float64 rounded to float32"
    w = unit(np.asarray(w, float).reshape(len(w), -1, w.shape[-1]))
    return np.einsum("nd,ckd->nck", unit(z), w).max(2).astype(np.float32)


def naive(z, w, k):
    cosine = all_cosines(z, w)
    order = np.argsort(-cosine, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(cosine, order, 1), order


def check(z, w, k, *tile):
    found, wanted = nearest_centers(z, w, k, *tile), naive(z, w, k)
    np.testing.assert_array_equal(found[1], wanted[1])
    np.testing.assert_array_equal(found[0], wanted[0])
    assert found[0].dtype == np.float32 and found[1].dtype == np.int64


TILES = [(1000, 4096), (7, 64), (50, 128), (25, 33)]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("seed", range(2))
def test_nearest_equals_a_stable_sort_of_all_cosines(seed, tile):
    rng = np.random.default_rng(seed)
    z, w = rng.standard_normal((50, 12)).astype(np.float32), rng.standard_normal((700, 12)).astype(np.float32)
    w[rng.integers(0, 700, 300)] = w[rng.integers(0, 700, 300)]  # many centres occur more than once
    z[:10] = 3 * w[:10]
    for k in (1, 2, 9):
        check(z, w, k, *tile)
        check(z, w[:512], k, *tile)
        check(z, w.reshape(175, 4, 12), k, *tile)


@pytest.mark.parametrize("tile", TILES)
def test_ties_of_small_whole_numbers(tile):
    rng = np.random.default_rng(0)
    z, w = rng.integers(-1, 2, (40, 4)).astype(float), rng.integers(-1, 2, (300, 4)).astype(float)
    z[~z.any(1)] = w[~w.any(1)] = 1
    for k in (1, 3, 300):
        check(z, w, k, *tile)


@pytest.mark.parametrize("tile", TILES)
def test_all_centres_alike_and_all_faces_alike(tile):
    w = np.tile(np.random.default_rng(0).standard_normal(20), (200, 1))
    cosine, ids = nearest_centers(w[:30], w, 3, *tile)
    np.testing.assert_array_equal(ids, np.tile([0, 1, 2], (30, 1)))
    np.testing.assert_array_equal(cosine, 1)


@pytest.mark.parametrize("tile", TILES)
def test_differences_below_the_rounding_of_float32_products_are_seen(tile):
    rng = np.random.default_rng(1)
    face, noise = unit(rng.standard_normal(64)), rng.standard_normal((300, 64))
    w = face + 0.5 * unit(noise - (noise @ face)[:, None] * face)  # all at one angle
    w = unit(w) + np.linspace(0, 2e-6, 300)[rng.permutation(300), None] * face
    check(face[None], w, 5, *tile)
    check(face[None].astype(np.float32), w.astype(np.float32), 5, *tile)
    assert len(np.unique(all_cosines(face[None], w))) > 5  # there was something to see


def test_a_row_in_doubt_is_taken_again_and_no_other(monkeypatch):
    rng = np.random.default_rng(2)
    z, w = rng.standard_normal((30, 32)), rng.standard_normal((500, 32))
    w[100:110] = z[4]
    seen, exact = [], module._exact
    monkeypatch.setattr(module, "_exact", lambda k, count, *rest: (seen.append(count), exact(k, count, *rest))[1])
    check(z, w, 2)
    assert seen == [1]


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", ">f4", "bfloat16"])
def test_types(kind):
    rng = np.random.default_rng(3)
    z, w = rng.standard_normal((20, 16)), rng.standard_normal((90, 16))
    if kind == "bfloat16":
        z, w = (torch.from_numpy(x).bfloat16().requires_grad_() for x in (z, w))
        wanted = naive(z.detach().double().numpy(), w.detach().double().numpy(), 2)
    else:
        z, w = z.astype(kind), w.astype(kind)
        wanted = naive(z, w, 2)
    found = nearest_centers(z, w)
    np.testing.assert_array_equal(found[1], wanted[1])
    np.testing.assert_array_equal(found[0], wanted[0])


def test_layouts_of_arrays(tmp_path, recwarn):
    rng = np.random.default_rng(4)
    z, w = rng.standard_normal((20, 16)).astype(np.float32), rng.standard_normal((90, 16)).astype(np.float32)
    np.save(tmp_path / "w.npy", w)
    mapped = np.load(tmp_path / "w.npy", mmap_mode="r")
    wanted = naive(z, w, 2)
    views = [mapped, np.asfortranarray(w), w[::-1][::-1], np.repeat(w, 2, 1)[:, ::2], torch.from_numpy(w), w.tolist()]
    for view in views:
        np.testing.assert_array_equal(nearest_centers(z, view)[1], wanted[1])
    np.testing.assert_array_equal(nearest_centers(z[::-1], w)[1], wanted[1][::-1])
    assert not recwarn.list


def test_shortcuts_of_the_program_do_not_count():
    rng = np.random.default_rng(5)
    z, w = rng.standard_normal((20, 64)).astype(np.float32), rng.standard_normal((900, 64)).astype(np.float32)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            found = nearest_centers(z, w, 200)  # so many that they lie close together
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    np.testing.assert_array_equal(found[1], naive(z, w, 200)[1])


def test_lengths_do_not_count_and_inputs_stay():
    rng = np.random.default_rng(6)
    z, w = rng.standard_normal((20, 16)), rng.standard_normal((90, 16))
    before = z.copy(), w.copy()
    plain, scaled = nearest_centers(z, w), nearest_centers(z * 2.0**20, w * 2.0 ** rng.integers(-30, 30, (90, 1)))
    for one, other in zip(plain, scaled):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(np.r_[z, w], np.r_[before])


@pytest.mark.parametrize("value", [0, np.nan, np.inf, 1e-30, 1e30])
def test_rows_without_a_direction_are_named(value):
    good = np.random.default_rng(7).standard_normal((9000, 4)).astype(np.float32)
    bad = good.copy()
    bad[[5, 8999]] = value
    with pytest.raises(CenterError, match=r"2 of 9000 embeddings .* first rows: \[5, 8999\]"):
        nearest_centers(bad, good[:5])
    with pytest.raises(CenterError, match=r"2 of 9000 centres .* first rows: \[5, 8999\]"):
        nearest_centers(good[:5], bad)
    with pytest.raises(CenterError, match=r"first rows: \[5, 8999\]"):
        class_centroids(bad, np.zeros(9000, int))
    with pytest.raises(CenterError, match=r"2 of 3000 centres .* first rows: \[1, 2999\]"):
        nearest_centers(good[:5], bad.reshape(3000, 3, 4))


def test_memory_stays_small():
    imports = """
import numpy as np, torch
from facenb.centers import nearest_centers
torch.set_num_threads(1)
rng = np.random.default_rng(0)
z, w = rng.standard_normal((3000, 32), np.float32), rng.standard_normal((20_000, 32), np.float32)
nearest_centers(z[:10], w[:100])
"""
    assert fresh(imports, "nearest_centers(z, w)")[2] < 64  # all cosines: 229 MiB


def test_centroids_of_many_parts_and_a_mapped_file(tmp_path):
    rng = np.random.default_rng(0)
    z, labels = rng.standard_normal((5000, 24)).astype(np.float32), rng.integers(0, 300, 5000)
    labels[:300] = rng.permutation(300)
    whole, counts = class_centroids(z, labels)
    sums = np.zeros((300, 24))
    np.add.at(sums, labels, unit(z))
    np.testing.assert_allclose(whole, unit(sums), atol=1e-6)
    np.testing.assert_array_equal(counts, np.bincount(labels))
    np.save(tmp_path / "z.npy", z)
    parts = CentroidSum(300, 24)
    cuts = np.sort(rng.integers(0, 5000, 20))
    mapped = np.load(tmp_path / "z.npy", mmap_mode="r")
    for first, last in zip(np.r_[0, cuts], np.r_[cuts, 5000]):
        parts.add(mapped[first:last], torch.from_numpy(labels[first:last]))
    np.testing.assert_array_equal(parts.centroids()[0], whole)
    np.testing.assert_array_equal(parts.centroids()[0], whole)  # asked twice


def test_centroids_of_a_hundred_thousand_images_of_one_person_stay_exact():
    rng = np.random.default_rng(1)
    z = (rng.standard_normal((100_000, 8)) + 1).astype(np.float32)
    np.testing.assert_allclose(class_centroids(z, np.zeros(100_000, int))[0][0], unit(unit(z).sum(0)), atol=5e-6)


def test_a_part_that_is_wrong_adds_nothing():
    parts = CentroidSum(2, 3).add(np.eye(3), [0, 1, 1])
    before = parts.centroids()[0]
    with pytest.raises(CenterError, match=r"first rows: \[4\]"):
        parts.add(np.eye(3) * [[1], [0], [1]], [0, 1, 1])
    for z, labels in [(np.eye(3) * [[1], [np.nan], [1]], [0, 1, 1]), (np.eye(3), [0, 1, 2]), (np.eye(4)[:3], [0, 1, 1]),
                      (np.eye(3), [0, 1])]:
        with pytest.raises(CenterError):
            parts.add(z, labels)
    np.testing.assert_array_equal(parts.centroids()[0], before)
    assert parts.rows == 3 and parts.counts.tolist() == [1, 2]


def test_classes_without_images():
    with pytest.raises(CenterError, match=r"1 of 3 classes have no images, first: \[1\]"):
        class_centroids(np.eye(3), [0, 2, 2])
    rows, counts = class_centroids(np.eye(3), [0, 2, 2], num_classes=5, empty="skip")
    assert counts.tolist() == [1, 0, 2, 0, 0]
    np.testing.assert_allclose(rows, unit([[1, 0, 0], [0, 1, 1]]), atol=1e-6)
    with pytest.raises(CenterError, match="3 images cannot be of 1000000000001 classes"):
        class_centroids(np.eye(3), [0, 1, 10**12])
    with pytest.raises(CenterError, match="label 2 of row 1 is outside 0..1"):
        class_centroids(np.eye(3), [0, 2, 1], num_classes=2)


def test_head_of_a_joint_loss_whose_head_is_shared_out():
    head = ArcFace(6, 4)
    wanted = unit(head.weight.detach().numpy())
    np.testing.assert_allclose(head_centers(Hybrid(ShardedHead(head), InfoNCE())), wanted, atol=1e-6)
    with torch.no_grad():
        head.weight[3] = 0
    with pytest.raises(CenterError, match=r"centres of ArcFace .* first rows: \[3\]"):
        head_centers(head)


def pairs_at_random(seed=0, images=60, pairs=400, dim=6):
    rng = np.random.default_rng(seed)
    z, w = rng.standard_normal((images, dim)), rng.standard_normal((25, dim))
    a, b = rng.integers(0, images, (2, pairs))
    return z, a, b, rng.random(pairs) < 0.6, w


def test_snapping_pair_by_pair():
    z, a, b, same, w = pairs_at_random()
    result, cosines = snapping(z, a, b, same, w), all_cosines(z, w)
    for pair in range(len(a)):
        i, j = a[pair], b[pair]
        partner = np.float32(unit(z[i]) @ unit(z[j]))
        assert abs(result.similarity[pair] - partner) < 1e-6
        assert result.center[pair].tolist() == [cosines[i].argmax(), cosines[j].argmax()]
        assert result.nearest[pair].tolist() == [cosines[i].max(), cosines[j].max()]
        if i != j:
            assert result.closer[pair].tolist() == [cosines[i].max() > partner, cosines[j].max() > partner]
    numbers, swapped = metrics(result), metrics(snapping(z, b, a, same, w))
    for name in ("closer_to_center", "nearest_center_similarity"):
        assert numbers[f"{name}_a"] == swapped[f"{name}_b"] != numbers[f"{name}_b"]
    alike = result.center[:, 0] == result.center[:, 1]
    assert numbers["same_center"] == alike[same].mean() and numbers["same_center_different_pairs"] == alike[~same].mean()
    shuffled = [alike_of(result.center[same], seed) for seed in range(2000)]
    assert abs(numbers["same_center_chance"] - np.mean(shuffled)) < 4 * np.std(shuffled) / 2000**0.5


def alike_of(center, seed):
    return np.mean(center[:, 0] == np.random.default_rng(seed).permutation(center[:, 1]))


def test_snapping_at_known_angles():
    "Centres on the axes; A is `turn` off its axis, B as much on the other side, in the plane of axes 2i and 2i + 1"
    turn, dim = np.radians([5, 15, 25, 44]), 8
    z = np.zeros((8, dim))
    for pair, angle in enumerate(turn):
        z[2 * pair, 2 * pair:2 * pair + 2] = np.cos(angle), np.sin(angle)
        z[2 * pair + 1, 2 * pair:2 * pair + 2] = np.sin(angle), np.cos(angle)
    result = snapping(z, [0, 2, 4, 6], [1, 3, 5, 7], [True] * 4, np.eye(dim))
    np.testing.assert_allclose(result.similarity, np.cos(np.pi / 2 - 2 * turn), atol=1e-6)
    np.testing.assert_allclose(result.nearest, np.cos(np.stack([turn, turn], 1)), atol=1e-6)
    assert result.closer.tolist() == [[True] * 2, [True] * 2, [True] * 2, [False] * 2]  # nearer when 90 - 2 turn > turn
    assert not result.same_center.any() and metrics(result)["same_center_chance"] == 0
    middle = snapping(z, [0, 2, 4, 6], [1, 3, 5, 7], [True] * 4, unit(np.eye(dim)[::2] + np.eye(dim)[1::2]))
    assert middle.same_center.all() and middle.closer.all()  # the middle is always nearer than the other side
    assert metrics(middle)["same_center_chance"] == 0.25


def test_a_partner_on_the_centre_is_a_tie():
    z, _, _, _, w = pairs_at_random()
    z[1], z[3] = 7 * w[4], w[9]
    z[0], z[2] = w[4] + 1e-3, w[9] - 1e-3
    result = snapping(z.astype(np.float32), [0, 2], [1, 3], [1, 1], w.astype(np.float32))
    assert result.center.tolist() == [[4, 4], [9, 9]] and result.closer[:, 0].tolist() == [False, False]


@pytest.mark.parametrize("count, dim", [(1, 2), (7, 2), (30, 5), (500, 64)])
def test_the_law_of_random_directions(count, dim):
    rng = np.random.default_rng(0)
    draws = 1000
    best = np.array([unit(rng.standard_normal((count, dim)))[:, 0].max() for _ in range(draws)])
    assert abs(best.mean() - random_nearest(count, dim)) < 4 * best.std() / draws**0.5
    for share in (0.1, 0.5, 0.9):
        below = np.mean(best <= random_nearest_quantile(share, count, dim))
        assert abs(below - share) < 4 * (share * (1 - share) / draws)**0.5
        cosine = random_nearest_quantile(share, count, dim)
        assert abs(random_closer([cosine], count, dim) - (1 - share)) < 1e-9


def test_growing_parts_of_the_centres():
    z, a, b, same, w = pairs_at_random(3)
    curve = snapping_by_count(z, a, b, same, w, [25, 3, 8, 3], draws=2, seed=5)
    assert curve.groupby(["kind", "draw"]).centers.agg(list).tolist() == [[3, 8, 25]] * 4
    for draw in range(2):
        order = np.random.default_rng([5, draw]).permutation(25)
        for count in (3, 8, 25):
            row = curve[(curve.kind == "these") & (curve.draw == draw) & (curve.centers == count)].iloc[0]
            wanted = metrics(snapping(z, a, b, same, w[order[:count]]))
            for name in set(wanted) & set(row.index) - {"centers"}:
                assert row[name] == pytest.approx(wanted[name], abs=1e-12), name
    again = snapping_by_count(z, a, b, same, w, [3, 8, 25], draws=2, seed=5)
    assert curve.equals(again)
    random = curve[(curve.kind == "random") & (curve.centers == 25)]
    assert random.nearest_center_similarity_a.nunique() == 2  # other directions in each draw


def test_growing_parts_larger_than_a_block():
    rng = np.random.default_rng(0)
    z, w = rng.standard_normal((6, 4)), rng.standard_normal((20_000, 4))
    curve = snapping_by_count(z, [0, 2, 4], [1, 3, 5], [1, 1, 1], w, [9_000, 20_000], draws=1)
    wanted = metrics(snapping(z, [0, 2, 4], [1, 3, 5], [1, 1, 1], w))
    row = curve[(curve.kind == "these") & (curve.centers == 20_000)].iloc[0]
    assert row.nearest_center_similarity_a == wanted["nearest_center_similarity_a"] and row.same_center == wanted["same_center"]
    w[10_000:] = w[:10_000]
    order = rng.permutation(20_000)
    *_, (count, cosine, ids) = _growing(torch.from_numpy(z), torch.from_numpy(w)[:, None], order, [9_000, 20_000], None)
    found = nearest_centers(z, w, 1)
    np.testing.assert_array_equal(ids, found[1][:, 0])
    np.testing.assert_array_equal(cosine, found[0][:, 0])
    assert count == 20_000 and (ids < 10_000).all()


def test_intervals_draw_people():
    "A person has one centre for all ten pairs or for none: the share is that of people, and binomial"
    people, hits = 40, 28
    one = np.repeat(np.arange(people) < hits, 10)
    center = np.stack([np.zeros(400, int), (~one).astype(int)], 1)
    result = Snapping(np.where(one, 0.9, 0.2), np.ones(400, bool), np.full((400, 2), 0.5), center, 2)
    table = people_intervals(result, np.repeat(np.arange(people), 10), 0.5, draws=4000)
    row = table.loc["same_center"]
    wanted = binom.ppf([0.025, 0.975], people, hits / people) / people
    assert row.value == hits / people and np.abs([row.low, row.high] - wanted).max() <= 1 / people
    assert table.loc["verified_difference", ["value", "low", "high"]].tolist() == [1, 1, 1]
    low, high = association(result, 0.5).one_center_interval
    assert low > 0.98 and association(result, 0.5).p < 1e-50  # that is what taking pairs as independent claims
    shuffled = np.random.default_rng(0).permutation(400)
    again = people_intervals(Snapping(*(x[shuffled] for x in (result.similarity, result.same, result.nearest, center)), 2),
                             np.repeat(np.arange(people), 10)[shuffled], 0.5, draws=4000)
    np.testing.assert_allclose(again, table)


def test_intervals_without_pairs_of_a_kind():
    result = Snapping(np.array([0.9, 0.8]), np.ones(2, bool), np.zeros((2, 2)), np.zeros((2, 2), int), 3)
    table = people_intervals(result, [1, 2], 0.5, draws=50)
    assert table.loc["verified_two_centers"].isna().tolist() == [True, True, True, False]
    assert table.loc["verified_one_center", "value"] == 1


def test_association_by_fold_and_of_different_pairs():
    score, same = np.array([0.6, 0.6, 0.6, 0.6]), np.array([True, True, False, False])
    result = Snapping(score, same, np.zeros((4, 2)), np.array([[0, 0], [0, 1], [2, 2], [0, 1]]), 3)
    found = association(result, np.array([0.5, 0.7, 0.7, 0.5]))
    assert found.table.tolist() == [[1, 0], [0, 1]] and found.difference == 1
    assert association(result, np.array([0.5, 0.7, 0.7, 0.5]), same=False).table.tolist() == [[1, 0], [0, 1]]
    assert association(result, 0.6).table.tolist() == [[1, 0], [1, 0]]  # a score at the threshold is verified


def test_chance_counts_the_marginals():
    assert same_center_chance(np.array([[0, 1], [0, 1], [1, 1], [5, 7]])) == pytest.approx(1 / 4 * 3 / 4)
    assert np.isnan(same_center_chance(np.empty((0, 2), int)))
