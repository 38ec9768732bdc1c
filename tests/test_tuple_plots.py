"""Pictures of tuples: the story runs from any number of small files beside records, and the figures show what they are given."""
import json
import shutil

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from conftest import ROOT
from facenb.margins import published
from facenb.nearid import SOURCES
from facenb.objects import identity
from facenb.runs import Run
from facenb.tuple_pictures import DISTRACTOR, FILE, VIEW, PicturesError, identity_of, picture_of, read_pictures
from facenb.tuple_plots import (TuplePlotError, align_frames, alpha_figure, anchor_grid, attention_overlay, dreambench_figure, ecdf_figure, heat_of,
                                kernel_pca, kernel_pca_figure, not_below, source_figure, source_table)
from test_stories import checkout, figures, tell

matplotlib.use("Agg")
KINDS = ("frozen", "ignored", "denominator", "nearid")
DRAWN = ("kernel_pca", "grid", "ecdf", "attention")


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def fabricate(folder, kind: str, context: float, seed: int = 0) -> None:
    "A record and its pictures: embeddings that read the thing and, `context` times, the background"
    rng, of = np.random.default_rng(seed), [identity(number) for number in range(7)]
    images = [(one, role, slot) for one in of for role in (VIEW, DISTRACTOR) for slot in range(len(one.views))]
    things, others, scenes = rng.normal(size=(7, 32)), rng.normal(size=(7, 3, 32)), rng.normal(size=(7, 3, 32))
    rows = [(things[one.number] if role == VIEW else others[one.number, slot]) + context * scenes[one.number, slot] for one, role, slot in images]
    oracle = rng.uniform(0.4, 0.95, 20)
    name = f"nearid_demo-{kind}-seed0"
    run = Run(folder / name, {"loss": "nearid", "data": "nearid_demo", "seed": 0})
    record = run.finish({}, {}, {}, {})
    ids = [2 * one.number + one.number // 3 for one, _, _ in images]
    facts = {"run": name, "commit": record["git"]["commit"], "source": "sdxl", "fingerprint": "0" * 16, "id": ids,
             "role": [role for _, role, _ in images], "slot": [slot for *_, slot in images], "embeddings": np.round(rows, 4).tolist(),
             "edits": np.round(oracle / (1 + context), 4).tolist(), "oracle": oracle.tolist(), "attended": [[0, 0, 0], [0, 1, 0], [2, 0, 0], [2, 1, 0]],
             "attention": rng.dirichlet(np.ones(64), 4).reshape(4, 8, 8).tolist()}
    (folder / name / FILE).write_text(json.dumps(facts))


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict:
    "The story with no, one and four pictures: what it says, and the figures it leaves"
    said = {}
    for number in (0, 1, 4):
        place = checkout(tmp_path_factory.mktemp(str(number)), [])
        (place / "figures").mkdir(exist_ok=True)
        for path in (place / "figures").glob("57a_*"):
            path.unlink()
        for kind in KINDS[:number]:
            fabricate(place / "data" / "runs" / "studies" / "nearid", kind, 5 if kind == "frozen" else 0.1)
        said[number] = tell(place, "57a_pictures")["57a_pictures"]["text"], figures(place)
    return said


def test_story_without_pictures(told):
    said, drawn = told[0]
    assert "missing: frozen, InfoNCE, ignored, InfoNCE, denominator, L_NearID" in said
    assert all(f"57a_{name}.png is not drawn: every run is missing" in said for name in DRAWN)
    assert "57a_people.png" in drawn and not any(f"57a_{name}.png" in drawn for name in DRAWN)
    assert "published: NearID above SigLIP2's mean over patches by object +0.030" in said and "correlation" not in said


@pytest.mark.parametrize("number", [1, 4])
def test_story_tells_what_the_pictures_say(told, number):
    said, drawn = told[number]
    views = sum(len(identity(n).views) for n in range(7))
    assert f"frozen: {views} of {views} views are nearer to the distractor" in said  # it reads the background
    assert (f"L_NearID: 0 of {views} views" in said) == (number == 4)
    assert ("missing: InfoNCE, ignored" in said) == (number == 1) and "nan" not in said.lower().split()
    assert all(drawn[f"57a_{name}.png"] for name in DRAWN)
    assert said.count("correlation with the oracle 1.00") == number  # scores were made in proportion


def test_pictures_of_another_run_are_refused(tmp_path):
    fabricate(tmp_path, "nearid", 0.1), fabricate(tmp_path, "frozen", 0.1)
    one, other = (tmp_path / f"nearid_demo-{kind}-seed0" for kind in ("nearid", "frozen"))
    assert read_pictures(one)["embeddings"].ndim == 2
    shutil.copy(other / FILE, one / FILE)
    with pytest.raises(PicturesError, match="made from nearid_demo-frozen-seed0"):
        read_pictures(one)


def test_published_pictures_belong_to_their_records():
    folders = [path.parent for path in (ROOT / "data" / "runs" / "studies").glob(f"*/*/{FILE}")]
    if not folders:
        pytest.skip("no pictures of runs are here")
    prints = {read_pictures(folder)["fingerprint"] for folder in folders}
    assert len(prints) == 1 and {f"nearid_demo-{kind}-seed0" for kind in KINDS} == {folder.name for folder in folders}
    assert all((folder / FILE).stat().st_size < 60_000 for folder in folders)
    assert all((ROOT / "figures" / f"57a_{name}.png").is_file() for name in DRAWN)


def test_story_numbers_are_those_of_a_slow_count():
    "Counted image by image, from the committed files"
    folders = sorted((ROOT / "data" / "runs" / "studies" / "nearid").glob(f"*/{FILE}"))
    if not folders:
        pytest.skip("no pictures of runs are here")
    cells = json.loads((ROOT / "nbs" / "57a_pictures.ipynb").read_text())["cells"]
    said = "".join("".join(output.get("text", [])) for cell in cells for output in cell.get("outputs", []))
    for path in folders:
        of, lost, views = read_pictures(path.parent), 0, 0
        cosine = lambda a, b: sum(x * y for x, y in zip(a, b)) / np.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
        for a in range(len(of["id"])):
            if of["role"][a] == VIEW:
                same = [b for b in range(len(of["id"])) if of["id"][b] == of["id"][a] and b != a]
                own = [b for b in same if of["role"][b] == DISTRACTOR and of["slot"][b] == of["slot"][a]]
                best = max(cosine(of["embeddings"][a], of["embeddings"][b]) for b in same if of["role"][b] == VIEW)
                lost, views = lost + (cosine(of["embeddings"][a], of["embeddings"][own[0]]) >= best), views + 1
        assert f": {lost} of {views} views are nearer" in said, path


def test_every_id_has_its_identity():
    for number in range(40):
        assert identity_of(2 * number + number // 3).number == number
    gaps = {*range(80)} - {2 * n + n // 3 for n in range(40)}
    for gap in sorted(gaps)[:10]:
        with pytest.raises(PicturesError):
            identity_of(gap)
    assert (picture_of(0, VIEW, 0, "sdxl") != picture_of(0, DISTRACTOR, 0, "sdxl")).any()


def test_kernel_pca_keeps_cosines_of_a_plane():
    "On a circle, two components hold all there is: centred inner products are kept"
    angle = np.linspace(0, 5, 9)
    table = np.stack([np.cos(angle), np.sin(angle)], 1)
    points, centred = kernel_pca(table * np.linspace(1, 9, 9)[:, None]), table - table.mean(0)
    assert np.allclose(points @ points.T, centred @ centred.T, atol=1e-9)


@pytest.mark.parametrize("same", [np.ones((5, 4)), np.repeat(np.eye(4)[:2], 3, 0)], ids=["one point", "two points"])
def test_kernel_pca_of_hardly_any_points_is_finite(same):
    assert np.isfinite(kernel_pca(same)).all()


def test_frames_are_moved_rigidly():
    rng = np.random.default_rng(0)
    frames = rng.normal(size=(4, 8, 2))
    moved = align_frames(frames)
    distance = lambda x: np.linalg.norm(x[:, None] - x[None], axis=2)
    for before, after in zip(frames, moved):
        ratio = distance(after)[np.triu_indices(8, 1)] / distance(before)[np.triu_indices(8, 1)]
        assert np.allclose(ratio, ratio[0])
    assert np.allclose(moved[-1], frames[-1] - frames[-1].mean(0))
    gap = lambda x: ((x - moved[-1]) ** 2).sum()
    for angle in (-0.01, 0.01):  # no other turn or size is nearer
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        assert gap(moved[0]) < min(gap(moved[0] @ turn), gap(moved[0] * (1 + angle)))


@pytest.mark.parametrize("identities", [1, 10, 12])
def test_colours_tell_identities_apart(identities):
    rng = np.random.default_rng(1)
    number, role = np.repeat(np.arange(identities), 4), np.tile([0, 0, 1, 1], identities)
    figure = kernel_pca_figure({str(n): rng.normal(size=(len(role), 6)) for n in range(5)}, number, role)
    assert sum(ax.axison for ax in figure.axes) == 5  # the rest of the last row stays empty
    for ax in figure.axes[:5]:
        colours = {tuple(part.get_edgecolor()[0][:3]) for part in ax.collections}
        assert len(colours) == identities and len(ax.collections) == 2 * identities


def test_views_are_circles_and_distractors_crosses():
    table = np.random.default_rng(2).normal(size=(6, 5))
    figure = kernel_pca_figure({"": table}, ["a"] * 6, [0, 0, 0, 0, 1, 1])
    views, others = figure.axes[0].collections
    assert np.allclose(views.get_offsets(), kernel_pca(table)[:4]) and np.allclose(others.get_offsets(), kernel_pca(table)[4:])
    assert len(views.get_paths()[0].vertices) > 8 and len(others.get_paths()[0].vertices) == 4  # a circle, two strokes


def test_missing_scores_are_said_in_the_legend():
    oracle = np.linspace(0, 1, 10)
    figure = ecdf_figure({"a": {"all": oracle, "none": np.full(10, np.nan)}, "b": {}}, oracle)
    labels = [[text.get_text() for text in ax.get_legend().get_texts()] for ax in figure.axes]
    assert labels == [["all", "none (10 missing)", "oracle"], ["oracle"]]


@pytest.mark.parametrize("scores, lost", [([0.9, 0.8, 0.85], [False, False, True]), ([0.9, 0.8, 0.8], [False, False, True]), ([0.9, 0.8, 0.79], [False] * 3),
                                          ([np.nan, np.nan, 0.1], [False] * 3), ([0.9, np.nan, 0.89], [False] * 3), ([np.nan, 0.5, 0.6], [False, False, True])], ids=str)
def test_a_tie_loses(scores, lost):
    assert not_below(scores, [False, False, True]).tolist() == lost


def test_grid_puts_scores_below_their_own_tiles():
    images = [[np.full((6, 6, 3), 40 * column, np.uint8) for column in range(3)] for _ in range(2)]
    table = np.array([[np.nan, 0.11, 0.12], [np.nan, 0.21, 0.22]])
    figure = anchor_grid(images, ["Anchor", "Positive 1", "Distractor 1"], {"S": table, "N": -table})
    texts = [[text.get_text() for text in ax.texts] for ax in figure.axes]
    assert texts == [[], ["S 0.11", "N -0.11"], ["S 0.12", "N -0.12"], [], ["S 0.21", "N -0.21"], ["S 0.22", "N -0.22"]]
    assert [ax.images[0].get_array()[0, 0, 0] for ax in figure.axes] == [0, 40, 80] * 2


def test_contours_are_left_out_where_there_is_no_edge():
    image, none, full = np.zeros((6, 6, 3), np.uint8), np.zeros((6, 6)), np.ones((6, 6))
    half = np.repeat([[0, 255]], 6, 0).repeat(3, 1)
    masks = {(0, 0): (half, half), (0, 1): (none, full), (0, 2): (half, None)}
    figure = anchor_grid([[image] * 3], ["Anchor", "Positive", "Distractor 1"], {}, masks)
    lines = [[part.get_linestyles()[0] for part in ax.collections] for ax in figure.axes]
    assert [len(of) for of in lines] == [2, 0, 1]


def test_attention_stands_where_it_was_paid():
    "The brightest patch keeps its place at any size of the picture, also one that is not square"
    for place in ((0, 0), (3, 6), (6, 1)):
        weights = np.full((7, 7), 0.01)
        weights[place] = 1
        heat = heat_of(weights, (70, 140), quantile=1)
        row, column = np.unravel_index(heat.argmax(), heat.shape)
        assert heat.shape == (70, 140) and (row // 10, column // 20) == place


def test_an_outlier_does_not_hide_the_rest():
    weights = np.linspace(0, 1, 100).reshape(10, 10)
    weights[0, 0] = 1e6
    assert heat_of(weights, (10, 10)).std() > 0.2 > 0.15 > heat_of(weights, (10, 10), quantile=1).std()
    with pytest.raises(TuplePlotError, match="titles must have 1 entries"):
        attention_overlay([np.zeros((8, 8, 3), np.uint8)], {"a": weights[None]}, ["one", "two"])


def test_published_tables_can_be_drawn():
    names = {"siglip2": "SigLIP2", "vsm": "VSM", "nearid": "NearID"}
    table = source_table(published("table5_per_source"), names)
    assert len(table) == 27 and {*table.tag} == {*SOURCES} and table.ssr.max() == 0.998
    ax = source_figure(table).axes[0]
    assert ax.get_legend_handles_labels()[1] == [f"{name}, published" for name in names.values()]
    seen = [label.get_text() for label in ax.get_xticklabels()][:4]
    assert all(SOURCES[tag].seen for tag in seen) and sum(of.seen for of in SOURCES.values()) == 4
    assert [len(panel.lines) for panel in alpha_figure(published("table8_alpha")).axes] == [1, 1, 1]
    assert alpha_figure(published("table9_beta"), weight="beta").axes[2].get_xlabel() == "beta"
    figure = dreambench_figure(published("dbpp_category"))
    assert [ax.get_title() for ax in figure.axes][-2:] == ["Qwen3-VL 30B", ""] and len(figure.axes) == 8


def test_ours_stand_beside_published_and_missing_ones_nowhere():
    table = source_table(published("table5_per_source"), {"nearid": "NearID"})
    ours = pd.DataFrame({"model": "NearID", "tag": ["flux", "sdxl"], "ssr": [0.98, np.nan], "n": 120, "status": "facenb"})
    labels = source_figure(pd.concat([table, ours])).axes[0].get_legend_handles_labels()
    assert labels[1] == ["NearID, facenb", "NearID, published"]
    assert len(labels[0][0].lines[0].get_xdata()) == 1
    assert [handle.lines[0].get_marker() for handle in labels[0]] == ["o", "D"] and labels[0][1].lines[0].get_markerfacecolor() == "white"
