"""Parameter files and the batch script, without a cluster."""
import subprocess
from types import SimpleNamespace

import pytest
import yaml

from conftest import ROOT, SHORT
from facenb.params import train_parameters
from facenb.runs import load_runs

FILES = sorted((ROOT / "slurm").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_parameter_file_names_and_types(path):
    text = path.read_text()
    assert all(word in text for word in ("Reproduces", "Time", f"Command: sbatch slurm/train.sbatch slurm/{path.name}"))
    for name, value in yaml.safe_load(text).items():
        assert name in train_parameters(), f"{path.name} names {name}, which nbs/train.ipynb does not know"
        train_parameters()[name].check(name, value)


def test_batch_script_runs_a_parameter_file(tmp_path):
    if not (ROOT / ".venv" / "bin" / "python").exists():
        pytest.skip("the batch script uses .venv, which make builds")
    script = ["bash", str(ROOT / "slurm" / "train.sbatch"), "slurm/demo_arcface.yaml"]
    done = subprocess.run([*script, *SHORT, "-p", "seed", "2", "-r", "runs", str(tmp_path / "runs")],
                          env={"PATH": "/usr/bin:/bin", "DATA_DIR": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    row = SimpleNamespace(**load_runs(tmp_path / "runs").iloc[0])
    assert (row.loss, row.seed, row.epochs) == ("arcface", 2, 1)
    assert len(list((tmp_path / "out").glob("demo_arcface-*.ipynb"))) == 1
