"""The batch script, without a cluster."""
import subprocess
from types import SimpleNamespace

import pytest

from conftest import ROOT, SHORT
from facenb.runs import load_runs


def test_batch_script_runs_a_parameter_file(tmp_path):
    if not (ROOT / ".venv" / "bin" / "python").exists():
        pytest.skip("the batch script uses .venv, which make builds")
    script = ["bash", str(ROOT / "slurm" / "train.sbatch"), "slurm/demo_arcface.yaml"]
    done = subprocess.run([*script, *SHORT, "-p", "seed", "2", "-r", "runs", str(tmp_path / "runs")],
                          env={"PATH": "/usr/bin:/bin", "DATA_DIR": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    row = SimpleNamespace(**load_runs(tmp_path / "runs").iloc[0])
    assert (row.loss, row.seed, row.epochs) == ("arcface", 2, 1)
    assert (tmp_path / "runs" / "demo_arcface-seed2" / "out.0.ipynb").exists()
