"""Conditions from outside: facts that mean what they are called, rates that recover what was planted, nothing dropped."""
import matplotlib
import numpy as np
import pandas as pd
import pytest
from PIL import Image
from scipy.ndimage import gaussian_filter
from scipy.stats import norm

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

from facenb.conditions import (COLUMNS, ConditionError, association, association_table, by_condition, condition_figure,  # noqa: E402
                               condition_table, detection_counts, fact_strips, image_facts, pair_value,
                               pixel_facts, point_facts)
from facenb.dyads import design_effect
from facenb.demo import demo_store  # noqa: E402
from facenb.errors import pair_thresholds, wrong_by  # noqa: E402
from facenb.faces import FaceDataset  # noqa: E402
from facenb.pairs import PairSet  # noqa: E402
from facenb.verify import verify  # noqa: E402


@pytest.fixture(scope="module")
def pixels(tmp_path_factory):
    store = demo_store(tmp_path_factory.mktemp("demo") / "demo.lmdb")
    return FaceDataset(store, 112, np.arange(0, 400, 8)).all_pixels().numpy()


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def resized(pixels, edge):
    "Made small and large again"
    small = [Image.fromarray(face.transpose(1, 2, 0)).resize((edge, edge), Image.Resampling.BOX) for face in pixels]
    return np.stack([np.asarray(face.resize((112, 112), Image.Resampling.BICUBIC)) for face in small]).transpose(0, 3, 1, 2)


def test_every_blur_lowers_sharpness_and_resolution(pixels):
    facts = [pixel_facts(gaussian_filter(pixels, (0, 0, sigma, sigma))) for sigma in (0, 1, 2, 4)]
    assert all((low.sharpness < high.sharpness).all() for high, low in zip(facts, facts[1:]))
    assert all((low.resolution_pixels <= high.resolution_pixels).all() for high, low in zip(facts, facts[1:]))


def test_small_crops_are_found_out_whatever_their_size_says(pixels):
    facts = {edge: pixel_facts(resized(pixels, edge)).resolution_pixels for edge in (80, 40, 20, 10)}
    assert all((facts[less] < facts[more]).mean() > 0.95 for more, less in ((80, 40), (40, 20), (20, 10)))
    assert 28 < facts[40].median() < 52 and facts[20].median() < 30


@pytest.mark.parametrize("periods", [8, 20, 40])
def test_a_wave_needs_two_pixels_a_period_in_any_direction(periods):
    wave = (127 + 100 * np.sin(2 * np.pi * periods * np.arange(112) / 112)).astype(np.uint8)
    across, along = np.broadcast_to(wave, (3, 112, 112)), np.broadcast_to(wave[:, None], (3, 112, 112))
    found = pixel_facts(np.stack([across, along])).resolution_pixels
    assert found.tolist() == pytest.approx([2 * periods + 2] * 2, abs=2.1) and found[0] == pytest.approx(found[1])


def test_sharpness_is_free_of_brightness_and_contrast_but_not_of_noise(pixels):
    plain, dim = pixel_facts(pixels), pixel_facts((pixels * 0.5 + 40).round().astype(np.uint8))
    assert (dim.sharpness / plain.sharpness).median() == pytest.approx(1, abs=0.1)
    assert (dim.contrast / plain.contrast).median() == pytest.approx(0.5, abs=0.02)
    noisy = np.clip(pixels + np.random.default_rng(0).normal(0, 12, pixels.shape), 0, 255).astype(np.uint8)
    assert (pixel_facts(noisy).sharpness > plain.sharpness).all()  # the confusion that the notebook warns of


def test_what_alignment_filled_with_black_is_not_sharpness(pixels):
    wedge = pixels.copy()
    wedge[:, :, np.add.outer(np.arange(112), np.arange(112)) < 70] = 0
    plain, cut = pixel_facts(pixels), pixel_facts(wedge)
    ratio = (cut / plain)[["sharpness", "resolution_pixels", "brightness"]].median()
    assert (ratio - 1).abs().max() < 0.15, ratio
    assert cut.filled.min() > 0.15 and (cut.filled >= plain.filled).all()


def test_grey_images_without_any_difference_have_no_sharpness():
    facts = pixel_facts(np.full((2, 3, 112, 112), 90, np.uint8))
    assert facts[["sharpness", "resolution_pixels"]].isna().all(axis=None) and facts.brightness.tolist() == pytest.approx([90, 90])
    for wrong in (np.zeros((1, 3, 4, 4), np.uint8), np.zeros((1, 1, 64, 64), np.uint8), np.zeros((1, 3, 64, 64))):
        with pytest.raises(ConditionError, match="must be"):
            pixel_facts(wrong)


def test_cfp_says_who_is_turned(golden):
    stored = np.load(golden / "cfp_landmarks5.npz")
    profile = np.char.find(stored["keys"], "profile") > 0
    found = stored["yunet_score"] > 0
    facts = point_facts(np.where(found[:, None, None], stored["yunet5"], np.nan))
    assert facts.isna().all(axis=1).sum() == (~found).sum() == 1
    assert facts.turn_degrees[~profile].median() < 6 and facts.turn_degrees[profile].median() > 45
    apart = facts.turn_degrees.to_numpy()
    assert ((apart > 25) == profile)[found].mean() > 0.99
    theirs = point_facts(stored["fid5"])  # the other points agree on the side
    assert (np.sign(theirs.yaw_degrees) == np.sign(facts.yaw_degrees))[profile & found].mean() > 0.99
    assert theirs.turn_degrees[~profile].median() < 2, "the fiducials of frontal faces are mirrored"


def planted(effect, seed=0, people=300, images=6, pairs=6000):
    "A pair set, labels, a fact of each image and scores whose genuine part falls with it"
    rng = np.random.default_rng(seed)
    labels, fact = np.repeat(np.arange(people), images), rng.normal(size=people * images)
    who, same = rng.integers(0, people, (2, pairs)), np.arange(pairs) % 2 == 0
    who[1] = np.where(same, who[0], (who[0] + 1 + rng.integers(0, people - 1, pairs)) % people)
    first = rng.integers(0, images, pairs)
    a, b = who[0] * images + first, who[1] * images + (first + 1 + rng.integers(0, images - 1, pairs)) % images
    hard = rng.normal(0, 0.3, people)
    scores = np.where(same, 1.0 + hard[who[0]] + effect * np.minimum(fact[a], fact[b]), 0.0) + rng.normal(0, 0.4, pairs)
    return PairSet("planted", np.arange(people * images), a, b, same, np.arange(pairs) // 600), labels, fact, scores


def test_a_planted_effect_is_recovered_and_only_where_it_is():
    pairs, labels, fact, scores = planted(0.3)
    facts = pd.DataFrame({"sharpness": fact, "age": np.random.default_rng(3).normal(size=len(fact))})
    limits = verify(scores, pairs.same, pairs.fold).accuracy_best.thresholds
    table = condition_table(scores, pairs, limits, facts, labels)
    sharp = table[table.condition == "sharpness (min)"]
    assert (np.diff(sharp.fnmr) < 0).all() and sharp.fnmr_low.iloc[0] > sharp.fnmr_high.iloc[-1]
    assert sharp.fmr_low.max() < sharp.fmr_high.min()  # different pairs have no effect
    age = table[table.condition == "age (min)"]
    assert age.fnmr_low.max() < age.fnmr_high.min()
    rho = association_table(scores, pairs, facts, labels).set_index(["condition", "kind"])
    assert rho.rho_low["sharpness (min)", "same"] > 0.3 and abs(rho.rho["sharpness (min)", "different"]) < 0.06
    assert rho.rho_low["age (min)", "same"] < 0 < rho.rho_high["age (min)", "same"]


def test_every_pair_is_in_one_level_of_each_condition():
    pairs, labels, fact, scores = planted(0.1)
    rng = np.random.default_rng(1)
    facts = pd.DataFrame({"sharpness": np.where(rng.random(len(fact)) < 0.1, np.nan, fact), "many_zeros": (fact > 1) * fact,
                          "rare": np.where(np.arange(len(fact)) < 3, "yes", "no"), "lost": np.nan})
    lost = PairSet("lost", pairs.images, pairs.a, pairs.b, pairs.same, pairs.fold, [[0, 1], [4, 0]])
    table = condition_table(scores, lost, 0.5, facts, labels)
    assert list(table.columns) == COLUMNS
    wrong = ~np.isnan(wrong_by(scores, pairs.same, 0.5))
    for name, levels in table.groupby("condition"):
        asked, errors = (2, 2) if name == "detection" else (6000, wrong.sum())
        assert (levels.pairs.sum(), levels.errors.sum()) == (asked, errors), name
        assert (levels.pairs == levels.pairs_same + levels.pairs_different).all() and (levels.pairs > 0).all()
    assert table[table.condition == "lost (min)"].level.tolist() == ["unknown"]
    assert "unknown" in table[table.condition == "sharpness (min)"].level.tolist()
    assert len(table[table.condition == "many_zeros (min)"]) == 2
    rare = table[table.condition == "rare"].set_index("level")
    assert np.isnan(rare.fnmr["yes + yes"]) and rare.note["yes + yes"] == "fewer than 20 pairs of a kind"
    assert table.iloc[-1].accuracy == 0 and table.iloc[-1].pairs_same == 1 and np.isnan(table.iloc[-1].fnmr)
    assert np.isnan(condition_table(scores, pairs, 0.5, facts, labels).iloc[-1].accuracy)


def test_thresholds_are_never_chosen_within_a_level():
    pairs, labels, fact, scores = planted(0.0)
    shifted = scores + 0.5 * (np.minimum(fact[pairs.a], fact[pairs.b]) > 0)
    limits = verify(shifted, pairs.same, pairs.fold).accuracy_best.thresholds
    value = pair_value(np.where(fact > 0, "above", "below"), pairs.a, pairs.b)
    value[value != "above + above"] = "other"
    table = by_condition(shifted, pairs.same, pair_thresholds(pairs.fold, limits), value).set_index("level")
    assert abs(table.eer["above + above"] - table.eer["other"]) < 0.03
    assert table.fmr_low["above + above"] > table.fmr_high["other"]
    assert table.fnmr_high["above + above"] < table.fnmr_low["other"]


@pytest.mark.parametrize("arguments, message", [
    (dict(least=2000), r"blur: fewer than 2000 pairs of a kind in \{'.* to .*': \{'same': "),
    (dict(bins=[99.0]), "fewer than"), (dict(bins=2.5), "bins=2.5"), (dict(few="skip"), "few='skip'"),
    (dict(value=np.zeros(3)), r"\(3,\) values"), (dict(value=np.full(6000, np.inf)), "pair 0 is infinite"),
])
def test_bins_that_cannot_answer_are_refused_by_name(arguments, message):
    pairs, _, fact, scores = planted(0.1)
    usual = dict(value=np.minimum(fact[pairs.a], fact[pairs.b]), name="blur", least=3001 if "bins" in arguments else 20)
    with pytest.raises(ConditionError, match=message):
        by_condition(scores, pairs.same, 0.5, **{**usual, **arguments})


def test_bins_are_given_cuts_or_quantiles():
    scores, same, value = np.linspace(0, 1, 100), np.arange(100) % 2 == 0, np.arange(100) * 1.0
    cut = by_condition(scores, same, 0.5, value, bins=[10, 40, 1000], least=1)
    assert cut.pairs.tolist() == [10, 30, 60] and cut.low.tolist() == [0, 10, 40] and cut.high.tolist() == [9, 39, 99]
    assert by_condition(scores, same, 0.5, value, bins=5, least=1).pairs.tolist() == [20] * 5
    assert by_condition(scores, same, 0.5, value.astype(np.float16), bins=1, least=1).pairs.tolist() == [100]
    assert len(by_condition(scores[:0], same[:0], 0.5, value[:0])) == 0
    alone = by_condition(scores, np.ones(100, bool), 0.5, value)
    assert alone.fmr.isna().all() and alone.fnmr.notna().all()


def test_points_and_names_become_facts_and_missing_faces_a_level(tmp_path, pixels):
    from facenb.benchmarks import png
    from facenb.store import FaceStore, write_store
    names = ["001/frontal/01", "001/profile/02", "002/frontal/01"]
    faces = [(png(face.transpose(1, 2, 0)), number // 2) for number, face in enumerate(pixels[:3])]
    source = {"aligned_by": {"yunet": 3}, "failures": [["009/profile/01", "no face found"]]}
    store = FaceStore(write_store(tmp_path / "some.lmdb", faces, ["a", "b"], source, extras={"names": names}))
    five = np.array([[30, 50], [70, 50], [50, 70], [35, 90], [65, 90]], float)
    facts = image_facts(store, [2, 1, 0], {names[0]: five * 3, names[1]: None, names[2]: five})
    assert facts["view"].tolist() == ["frontal", "profile", "frontal"]
    assert facts.detection.tolist() == ["face found", "no face found", "face found"]
    assert facts.eye_mouth_pixels[[0, 2]].tolist() == [40, 120] and facts.eye_distance_pixels[0] == 40
    assert facts.sharpness.tolist() == pixel_facts(pixels[[2, 1, 0]]).sharpness.tolist()
    assert detection_counts(store).images.to_dict() == {"aligned by yunet": 3, "lost: no face found": 1}
    with pytest.raises(ConditionError, match="001/profile/02"):
        image_facts(store, [1], {names[0]: five})
    with pytest.raises(ConditionError, match="points of image 0: two points coincide"):
        image_facts(store, [0], {names[0]: five * 0 + 9})


def test_what_a_pair_makes_of_facts_is_said_and_can_be_chosen():
    pairs, labels, fact, scores = planted(0.1, people=20, images=4, pairs=600)
    facts = pd.DataFrame({"yaw_degrees": fact, "turn_degrees": fact, "eye_distance_pixels": fact, "age": fact})
    usual = condition_table(scores, pairs, 0.5, facts, labels, bins=1).condition.tolist()
    assert usual == ["all", "yaw_degrees (difference)", "turn_degrees (max)", "eye_distance_pixels (min)", "age (min)", "detection"]
    table = condition_table(scores, pairs, 0.5, facts, labels, bins=1, how={"age": "mean"})
    row = table[table.condition == "age (mean)"].iloc[0]
    assert row.high == pytest.approx(((fact[pairs.a] + fact[pairs.b]) / 2).max())
    with pytest.raises(ConditionError, match="how='sum'"):
        condition_table(scores, pairs, 0.5, facts, labels, how={"age": "sum"})


def test_text_numbers_and_missing_ones_in_any_of_pandas_types():
    a, b = np.array([0, 0]), np.array([1, 2])
    for numbers in ([3, None, 5], pd.array([3, None, 5], "Int64"), pd.Series([3, np.nan, 5], dtype=object)):
        value = pair_value(numbers, a, b, "difference")
        assert np.isnan(value[0]) and value[1] == 2 and value.dtype == float
    for texts in (["x", None, "y"], pd.Categorical(["x", None, "y"]), pd.array(["x", None, "y"], "string")):
        assert pair_value(texts, a, b).tolist() == [None, "x + y"]
    assert pair_value(np.array([True, False, True]), a, b).tolist() == ["False + True", "True + True"]


def test_a_design_effect_of_shared_people():
    rng = np.random.default_rng(0)
    person = np.repeat(np.arange(200), 10)
    effect = rng.normal(size=200)[person]
    assert design_effect(effect, person, person) == pytest.approx(10, rel=0.05)
    assert design_effect(rng.normal(size=2000), person, person) < 1.3
    names = np.array([f"p{number}" for number in person])
    assert design_effect(effect, names, names) == design_effect(effect, person, person)
    assert design_effect(effect, person, person, np.arange(2000) % 10) == pytest.approx(1, abs=0.1)  # one pair each in a group
    assert design_effect(np.zeros(9), np.arange(9), np.arange(9)) == 1
    assert np.isfinite(design_effect(np.array([1.0, -1]), np.array([0, 0]), np.array([1, 1])))


def test_pairs_of_two_people_are_counted_once():
    rng = np.random.default_rng(1)
    a, b = np.triu_indices(30, 1)
    own = rng.normal(size=len(a))  # nothing shared by people: 435 pairs are worth 435
    assert 1 <= design_effect(own, a, b) < 1.6
    total = sum(own[i] * own[j] for i in range(435) for j in range(435) if {a[i], b[i]} & {a[j], b[j]})
    twice = np.r_[a, b], np.r_[b, a]  # each pair again, turned around
    assert design_effect(np.r_[own, own], *twice) == pytest.approx(2 * total / sum(own ** 2) * (30 * 29 / (28 * 27)) * 1.0887, rel=1e-3)


def test_levels_of_different_rates_do_not_make_pairs_dependent():
    same, value = np.ones(400, bool), np.repeat([0.0, 1.0], 200)
    person = np.arange(400) // 4
    rng = np.random.default_rng(2)
    scores = np.where(rng.random(400) < np.where(value > 0, 0.9, 0.1), 0.0, 1.0)
    table = by_condition(scores, same, 0.5, value, bins=[0.5], person_a=person, person_b=person)
    width = table.fnmr_high - table.fnmr_low
    assert (width < 1.3 * 2 * 1.96 * np.sqrt(table.fnmr * (1 - table.fnmr) / 200)).all(), width
    assert (1 - table.accuracy).tolist() == pytest.approx(table.fnmr.tolist())
    assert (table.accuracy_low < table.accuracy).all() and (table.accuracy < table.accuracy_high).all()
    assert association(scores + value, (scores + value) * 2, person, person)["rho_low"] == pytest.approx(1)


def test_intervals_cover_a_rate_that_does_not_depend_on_the_condition():
    truth, hits, without, rhos = norm.cdf(-1 / np.hypot(0.5, 0.5)), [], [], []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        hard, who = rng.normal(0, 0.5, 100), rng.integers(0, 100, (2, 2000))
        same = np.arange(2000) % 2 == 0
        who[1] = np.where(same, who[0], (who[0] + 1 + rng.integers(0, 99, 2000)) % 100)
        noise, value = rng.normal(0, 0.5, 2000), rng.normal(size=2000)
        scores = np.where(same, 1 + hard[who[0]], -1 + (hard[who[0]] + hard[who[1]]) / np.sqrt(2)) + noise
        for people, found in ((who, hits), ((None, None), without)):
            table = by_condition(scores, same, 0.0, value, "noise", 3, person_a=people[0], person_b=people[1])
            found += [row[rate + "_low"] <= truth <= row[rate + "_high"] for _, row in table.iterrows() for rate in ("fnmr", "fmr")]
        by_person = rng.normal(size=100)
        for part in (same, ~same):
            rho = association(scores[part], np.minimum(by_person[who[0]], by_person[who[1]])[part], who[0][part], who[1][part])
            rhos.append(rho["rho_low"] <= 0 <= rho["rho_high"])
    assert 0.92 <= np.mean(hits) <= 0.98, np.mean(hits)
    assert np.mean(without) < 0.9, "people do not matter here, so the test above shows nothing"
    assert 0.88 <= np.mean(rhos) <= 0.99, np.mean(rhos)


def test_figures_show_the_table(pixels):
    pairs, labels, fact, scores = planted(0.3, people=20, images=5, pairs=3000)
    facts = pd.DataFrame({"sharpness": fact, "view": np.where(fact > 0, "frontal", "profile")})
    lost = PairSet("lost", pairs.images, pairs.a, pairs.b, pairs.same, pairs.fold, [[0, 1]])
    table = condition_table(scores, lost, 0.5, facts, labels)
    figure = condition_figure(table, columns=2)
    assert [ax.get_xlabel() for ax in figure.axes] == ["sharpness (min)", "view"]
    for ax, name in zip(figure.axes, ("sharpness (min)", "view")):
        levels = table[table.condition == name]
        for bars, rate in zip(ax.containers, ("fnmr", "fmr")):
            assert bars.lines[0].get_ydata().tolist() == levels[rate].tolist()
            ends = np.array([segment[:, 1] for segment in bars.lines[2][0].get_segments()])
            assert ends == pytest.approx(levels[[rate + "_low", rate + "_high"]].to_numpy())
        assert [text.get_text().split("\n")[-1] for text in ax.get_xticklabels()] == [f"{n:,}" for n in levels.pairs]
    assert figure.legends[0].get_title().get_text() == "1 pairs have no score and are in no panel"
    facts = pixel_facts(pixels).assign(some=lambda table: table.sharpness.where(table.index < 2))
    strip = fact_strips(pixels, facts, ["brightness", "some"], count=5)
    order = facts.brightness.argsort().to_numpy()
    assert (strip.axes[0].images[0].get_array() == pixels[order[0]].transpose(1, 2, 0)).all()
    assert (strip.axes[4].images[0].get_array() == pixels[order[-1]].transpose(1, 2, 0)).all()
    shown = [float(ax.get_xlabel()) for ax in strip.axes[:5]]
    assert shown == sorted(shown) and len(strip.axes[5].images) == 1
