"""Every committed figure stands beside the rows it shows, and every row names a tracked record."""
import json
import os
import subprocess

import pandas as pd
import pytest

from conftest import ROOT
from facenb.registry import LOSSES
from test_readme import readme

RUNS = ROOT / "data" / "runs"
OTHERS = ("53_", "57_objects", "57_sources", "57_alpha", "57a_")  # below; of files beside records (test_tuple_plots.py); of the synthetic objects and of published tables only
FIGURES = [path for path in sorted((ROOT / "figures").glob("5*.png")) if not path.stem.startswith(OTHERS)]


@pytest.mark.parametrize("figure", FIGURES, ids=lambda path: path.name)
def test_figure_has_rows_from_records(figure):
    rows = pd.read_csv(figure.with_suffix(".csv"))
    assert len(rows)
    for _, row in rows.iterrows():
        folder = RUNS / row.record if "/" in row.record else RUNS / "published" / row.record
        record = json.loads((folder / "record.json").read_text())
        facts = {**record["parameters"], **record["metrics"], **record["counts"], **record["git"]}
        for name, value in row.drop("record").items():
            if pd.isna(value):
                assert facts.get(name) is None, name
            else:
                assert value == pytest.approx(facts[name]) if isinstance(value, float) else value == facts[name], name


def test_there_are_figures():
    names = {path.name for path in FIGURES}
    assert {"51_main.png", "52_losses.png", "54_snapping.png", "54a_geometry.png", "55_batch_size.png", "56_overlap.png"} <= names


def test_stories_leave_figures_as_they_were():
    "`make test` has run them before, in a clean clone: bytes of PNG files are reproducible"
    if not os.environ.get("CI"):
        pytest.skip("figures in work may differ from the last commit; CI starts from a clean clone")
    changed = subprocess.run(["git", "status", "--porcelain", "figures"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert changed == ""


def test_foundation_rows_are_published_or_from_records():
    rows = pd.read_csv(ROOT / "figures" / "53_foundation.csv")
    published = pd.read_csv(ROOT / "data" / "reference" / "published_results.csv").set_index("experiment")
    assert len(rows) >= 18
    for row in rows.itertuples():
        if row.status == "published":
            assert row.percent == published.loc[row.experiment, row.benchmark] and pd.isna(row.record)
        else:
            assert row.status == "facenb" and (RUNS / "published" / row.record / "record.json").exists()


def test_published_records_are_tracked_and_clean():
    from facenb.runs import PUBLISHED, STUDIES, load_runs
    runs, studies = load_runs(PUBLISHED), load_runs(STUDIES)
    demo = runs[runs.data == "demo"]
    assert set(zip(demo.loss, demo.seed)) >= {(loss, seed) for loss in LOSSES for seed in range(3)}
    assert not runs.dirty.any() and runs.commit.notna().all()
    tracked = subprocess.run(["git", "ls-files", "data"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout")
    records = {f"data/runs/published/{folder}/record.json" for folder in runs.folder}
    records |= {f"data/runs/studies/{folder}/record.json" for folder in studies.folder}
    assert records <= set(tracked) and not studies.dirty.any() and studies.commit.notna().all()
    assert [path for path in tracked if not path.endswith((".json", ".csv"))] == []


def test_numbers_in_readme_come_from_records():
    from facenb.plots import seed_table
    from facenb.runs import PUBLISHED, load_runs
    runs = load_runs(PUBLISHED)
    columns = {"tar_at_far_0.01": "a", "tar_at_far_0.001": "b", "eer": "c", "auc": "d", "accuracy_best": "e", "accuracy_at_far": "f"}
    table = seed_table(runs[runs.data == "demo"], "loss", columns, ["arcface", "infonce", "hybrid"])
    for loss, row in table.iterrows():
        assert "| " + " | ".join([loss, *map(str, row)]) + " |" in readme()


def test_published_numbers_are_marked():
    reference = pd.read_csv(ROOT / "data" / "reference" / "published_results.csv")
    assert (reference.status == "published").all() and reference.metric.notna().all()


@pytest.mark.parametrize("figure, run", [("60_speed", "speed"), ("60a_speed_losses", "speed-losses"),
                                         ("60c_speed_evaluation", "speed-evaluation")])
def test_a_speed_figure_is_its_record(figure, run):
    rows = pd.read_csv(ROOT / "figures" / f"{figure}.csv").set_index("key")
    record = json.loads((ROOT / "data" / "runs" / "benchmarks" / run / "record.json").read_text())
    assert (ROOT / "figures" / f"{figure}.png").exists() and not record["git"]["dirty"]
    for key, row in rows.iterrows():
        for column in ("facenb", "ratio"):
            if pd.notna(row[column]):
                assert record["metrics"][key if column == "facenb" else f"{key}_ratio"] == pytest.approx(row[column], rel=1e-4), key
