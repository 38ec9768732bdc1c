"""A missing record shows as missing: stories about single questions run to their end without their records, or with some of them."""
import os
import shutil

import pandas as pd
import pytest

import forked
from conftest import ROOT

STORIES = {"54_snapping": "ArcFace seed 0", "54a_geometry": "ArcFace seed 0", "55_batch_size": "InfoNCE 5 people seed 0", "56_overlap": "LFW in CFP"}
TELL = """
import json, sys
from pathlib import Path
from execnb.shell import CaptureShell
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
drawn, save = [], Figure.savefig
def noted(figure, *arguments, **options):
    drawn.append(figure.get_suptitle())
    return save(figure, *arguments, **options)
Figure.savefig = noted
said = {}
for story in sys.argv[1:]:
    shell, texts = CaptureShell(), []
    drawn.clear()
    for cell in json.loads(Path("nbs", story + ".ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            for output in shell.run("".join(cell["source"])):
                texts += ["".join(output.get("text") or output.get("data", {}).get("text/plain", ""))]
            if shell.exc:
                raise shell.exc
    said[story] = {"text": "\\n".join(texts), "titles": drawn[:]}
    plt.close("all")
Path("said.json").write_text(json.dumps(said))
"""


def checkout(folder, records: list[str]):
    "What stories need of a checkout, with only these folders of records"
    for name in ("nbs", "facenb", "figures", "data/reference", *(f"data/runs/{part}" for part in records)):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    shutil.copy(ROOT / "settings.ini", folder)
    return folder


def tell(folder, *stories) -> dict:
    "What each story prints and shows as text, and the titles of its figures"
    done = forked.run(TELL, *(stories or STORIES), cwd=folder, env=os.environ | {"MPLBACKEND": "Agg"})
    assert done.returncode == 0, done.stdout + done.stderr
    return pd.read_json(folder / "said.json", typ="series").to_dict()


def figures(folder) -> dict:
    return {path.name: path.read_bytes() for path in (folder / "figures").iterdir()}


@pytest.mark.parametrize("records", [[], ["published"]], ids=["nothing", "published"])
def test_stories_without_studies(records, tmp_path):
    said = tell(checkout(tmp_path, records))
    assert figures(tmp_path) == figures(ROOT)
    for story, first in STORIES.items():
        assert said[story]["titles"] == [] and f"{story}.png is not drawn" in said[story]["text"]
        assert f"missing: {first}" in said[story]["text"] and "nan" not in said[story]["text"].lower().split(), story
    for line in said["54a_geometry"]["text"].splitlines():
        assert not line.startswith("uniformity of people (nats):") or line.endswith(": missing")


def test_stories_with_all_but_one_record(tmp_path):
    "Left out: one run of the evaluations, one of the batches"
    shutil.rmtree(checkout(tmp_path, ["published", "studies"]) / "data/runs/studies/evaluations/evaluate-demo-arcface-seed1-demo")
    shutil.rmtree(tmp_path / "data/runs/studies/batch_size/demo-infonce-b5-seed2")
    said, before, after = tell(tmp_path), figures(ROOT), figures(tmp_path)
    for story, absent in (("54_snapping", "ArcFace seed 1"), ("54a_geometry", "ArcFace seed 1"), ("55_batch_size", "1 of 24 runs")):
        [title] = said[story]["titles"]
        assert f"missing: {absent}" in title and before[f"{story}.png"] != after[f"{story}.png"]
        rows, old = (pd.read_csv(where / "figures" / f"{story}.csv") for where in (tmp_path, ROOT))
        assert len(rows) == len(old) - 1 and {*rows.record} < {*old.record}
    assert "missing: InfoNCE 5 people seed 2" in said["55_batch_size"]["text"]
    assert "missing: pairs of runs with the same seed, 1 of 3" in said["54a_geometry"]["text"]
    for story in STORIES:
        assert "nan" not in said[story]["text"].lower().split(), story


@pytest.mark.parametrize("left_out", ["all", "one"])
def test_nearid_story_with_fewer_records(left_out, tmp_path):
    "Published tables stand there all the same, and nothing is said of runs that are not there"
    checkout(tmp_path, ["studies"])
    records = tmp_path / "data" / "runs" / "studies" / "nearid"
    shutil.rmtree(records if left_out == "all" else records / "nearid_demo-nearid-seed1")
    said = tell(tmp_path, "57_nearid")["57_nearid"]["text"]
    assert "99.17" in said and "missing" in said and "nan" not in said.lower().split()
    rows = pd.read_csv(tmp_path / "figures" / "57_demo.csv")
    assert ("0 seeds, 0 runs" in said and "SSR 0 %" not in said) if left_out == "all" else (len(rows) == 14 and "14 runs" in said)
