"""What the tests share: the checkout, the data folder of CI, and running the training notebook."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

import forked

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def golden() -> Path:
    "Folder of numbers that must be reproduced; beside the folder that FACENB_DATA names"
    data = os.environ.get("FACENB_DATA")
    if not data:
        pytest.skip("FACENB_DATA is not set: it names the data folder that golden/ lies beside")
    return Path(data).parent / "golden"


def papermill(output: Path, *arguments: str, notebook: Path = ROOT / "nbs" / "train.ipynb", start=subprocess.run, **options):
    "Run the training notebook as a user would"
    command = [sys.executable, "-m", "papermill", str(notebook), str(output), "-k", "python3", "--no-progress-bar", *arguments]
    return start(command, stdin=subprocess.DEVNULL, **options)


SHORT = ["-p", "epochs", "1", "-p", "image_size", "24", "-p", "embedding_dim", "16"]


def train(folder: Path, *arguments: str, fresh: bool = False):
    "A run of one epoch on small images; its output and what the process said. fresh: in a new interpreter with a kernel"
    folder.mkdir(parents=True, exist_ok=True)
    everything = [folder / "out.ipynb", *SHORT, "-r", "runs", str(folder / "runs"), *arguments]
    if fresh:
        return papermill(*everything, capture_output=True, text=True, timeout=300)
    return forked_papermill("train", *everything)


def evaluate(folder: Path, *arguments: str):
    "`evaluate.ipynb` with few replicates; its output and what the process said"
    folder.mkdir(parents=True, exist_ok=True)
    return forked_papermill("evaluate", folder / "out.ipynb", "-r", "runs", str(folder / "runs"), "-p", "replicates", "100", *arguments)


def forked_papermill(notebook: str, *arguments):
    path = ROOT / "nbs" / f"{notebook}.ipynb"
    return forked.run("from forked import papermill; papermill()", path, *arguments, "-k", "python3", "--no-progress-bar")
