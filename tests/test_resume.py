"""Runs that are killed, stopped and starved of disk, and go on by the same command as if nothing had happened."""
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
import warnings
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import ROOT, SHORT, papermill
from conftest import train as train_notebook
from ranks import PRELOAD

from facenb import checkpoint
from facenb.checkpoint import newest_checkpoint, read_checkpoint, read_shards, remove_checkpoints
from facenb.cards import save_trained
from facenb.embed import embed
from facenb.judge import judge
from facenb.loop import Keeper
from facenb.optimise import learning_rate
from facenb.params import read_train, used
from facenb.runs import file_hash
from facenb.state import Journal
from facenb.train import Experiment, read_trained, train, train_here

CHILDREN = multiprocessing.get_context("forkserver")  # a clean process imports once, its children start at once
CHILDREN.set_forkserver_preload(PRELOAD)
FILES = ("backbone.safetensors", "loss.safetensors", "embeddings.safetensors", "history.csv", "evaluations.csv")


def defaults() -> dict:
    "The parameters cell of the notebook"
    cells, values = json.loads((ROOT / "nbs" / "train.ipynb").read_text(encoding="utf-8"))["cells"], {}
    exec(next("".join(cell["source"]) for cell in cells if "parameters" in cell["metadata"].get("tags", [])), values)
    return {name: value for name, value in values.items() if name != "__builtins__"}


def experiment(changes: dict) -> tuple[Experiment, dict]:
    "As the notebook makes it, small; and what a run that goes on must share"
    small = {"device": "cpu", "image_size": 24, "embedding_dim": 16, "weights": "random", "checkpoint": 0.0}
    parameters, settings = read_train(defaults() | small | changes)
    return Experiment(parameters, settings), used(parameters) | settings


def live(folder: Path, said: Path, changes: dict, rank: int, port: int) -> None:
    "One process of a run, in a child: it leaves `result.json`, or `error.txt` and an exit code"
    log = os.open(said / "child.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    of, made_by = experiment(changes)
    if of.world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(of.world),
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        accelerator = of.accelerator(of.world)
        if of.world > 1:
            state, _ = train_here(of, folder, made_by, accelerator)
            trained = read_trained(of, folder) if rank == 0 else None
        else:
            trained = train(of, folder, made_by, accelerator)
    except Exception as error:
        (said / "error.txt").write_text(f"{type(error).__name__}: {error}")
        raise
    if trained:
        leave(said, trained, of)


def leave(folder: Path, trained, of: Experiment) -> None:
    "What a run has learned, in the files that the notebook makes, and in one small one"
    made, pairs = folder / "made", of.data.benchmarks[0][1]
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    save_trained(trained.network, made)
    save_file({key: value.contiguous() for key, value in trained.criterion.state_dict().items()}, made / "loss.safetensors")
    save_file({"embeddings": torch.from_numpy(embed(trained.network, of.pixels(of.verified[0]))), "images": torch.from_numpy(pairs.images)},
              made / "embeddings.safetensors")
    for name in ("history", "evaluations"):
        (made / f"{name}.csv").write_text(getattr(trained, name).to_csv(index=False))
    sets = [(of.pixels(shared), shared.sets) for shared in of.verified]
    result = {"state": trained.state, "score": judge(trained.network, sets)[1], "best": trained.best,
              "files": {path.name: file_hash(path) for path in made.iterdir()}}
    (folder / ".result").write_text(json.dumps(result))
    os.replace(folder / ".result", folder / "result.json")


class Life:
    "The processes of one start of a run"

    def __init__(self, folder: Path, changes: dict, said: Path | None = None):
        folder.mkdir(exist_ok=True)
        self.said = said or folder
        for name in ("result.json", "error.txt"):
            (self.said / name).unlink(missing_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.folder = folder
        self.ranks = [CHILDREN.Process(target=live, args=(folder, self.said, changes, rank, port), daemon=True)
                      for rank in range(changes.get("processes", 1))]
        for rank in self.ranks:
            rank.start()

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.join()

    def end(self, seconds: float = 120) -> dict | str:  # the result, or the error
        for rank in self.ranks:
            rank.join(seconds)
        if any(rank.exitcode is None for rank in self.ranks):
            self.kill()
            raise AssertionError(f"still running: {(self.said / 'child.log').read_text()[-2000:]}")
        codes = [rank.exitcode for rank in self.ranks]
        if not any(codes):
            return json.loads((self.said / "result.json").read_text())
        assert (self.said / "error.txt").exists(), (self.said / "child.log").read_text()[-2000:]
        return (self.said / "error.txt").read_text()


def steps_of(folder: Path) -> list[int]:
    "Of the checkpoints that a reader would see"
    try:
        return sorted(int(path.name[5:]) for path in (folder / "checkpoints").iterdir() if path.name.startswith("step-"))
    except FileNotFoundError:
        return []


def wait_for(condition, seconds: float = 120, every: float = 0.005):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(every)
    return found


def all_are_whole(folder: Path) -> None:
    "Every checkpoint that has a name, in every part"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        newest_checkpoint(folder / "checkpoints")
    for step in steps_of(folder):
        path = folder / "checkpoints" / f"step-{step:08d}"
        found, _, shared, _ = read_checkpoint(path)
        assert found == step == shared["journal"]["step"] and read_shards(path)


def killed_often(folder: Path, changes: dict, steps: int, kills: int, seed: int) -> tuple[dict, list[int]]:
    "The result in the end, and the steps that were on disk when it was killed"
    rng, at = random.Random(seed), []
    while True:
        before = max(steps_of(folder), default=0)
        life = Life(folder, changes | {"checkpoint": rng.choice([0.0, 0.0, 0.001])})
        if len(at) == kills or before >= steps - 1:
            return life.end(), at
        if rng.random() < 0.2:  # while it begins or reads
            time.sleep(rng.uniform(0, 1))
        else:
            wanted = min(before + rng.randint(1, max(2 * steps // kills, 1)), steps - 1)
            wait_for(lambda: max(steps_of(folder), default=0) >= wanted or not life.ranks[0].is_alive())
            time.sleep(rng.uniform(0, 0.05))
        life.kill()
        all_are_whole(folder)
        at.append(max(steps_of(folder), default=0))


RUNS = {
    "keeps the best": {"loss": "infonce", "epochs": 6, "evaluate_every": 1, "keep": "best", "lr": 1.0},
    "hybrid, AdamW, two batches a step": {"loss": "cosface+supcon", "steps": 24, "optimizer": "adamw", "lr": 0.002, "clip": 1.0,
                                          "accumulate": 2, "chunk": 20, "checkpoint": 0.001},
    "draws dropout": {"loss": "coreface", "steps": 24, "dropout": 0.3},
    "adapters": {"loss": "adaface", "backbone": "timm:test_vit", "train": "lora", "lora_targets": "all", "image_size": 32, "steps": 24,
                 "pairs": 6},
    "two processes": {"loss": "arcface+infonce", "steps": 24, "processes": 2, "evaluate_every": 1, "keep": "best"},
}
STEPS = 24


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    "Results of runs that nobody disturbed, made when asked for"
    known = {}

    def result(changes: dict) -> dict:
        key = json.dumps(changes, sort_keys=True)
        if key not in known:
            life = Life(tmp_path_factory.mktemp("alone"), changes | {"checkpoint": 10.0})
            known[key] = life.end()
            assert isinstance(known[key], dict), known[key]
            known[key]["folder"] = str(life.folder)
        return known[key]
    return result


@pytest.mark.parametrize("name", RUNS)
def test_killed_at_random_steps_ends_as_if_it_had_not_been(tmp_path, alone, name):
    changes = RUNS[name]
    whole, steps = alone(changes), 30 if "epochs" in changes else STEPS
    found, at = killed_often(tmp_path / "run", changes, steps, kills=5, seed=list(RUNS).index(name))
    assert len({step for step in at if 0 < step < steps}) >= 3, at  # truly in the middle
    assert found == {key: value for key, value in whole.items() if key != "folder"}
    assert whole["state"] == "done" and ("adapter_model.safetensors" in whole["files"]) == (name == "adapters")
    if changes.get("keep") == "best":  # judged then, by one or two processes, as it is now
        assert found["score"] == pytest.approx(found["best"]["score"], abs=1e-6)


# stopped and changed


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    "A run that stopped after its first step"
    def make(changes: dict) -> Path:
        folder = tmp_path_factory.mktemp("stopped") / "run"
        folder.mkdir()
        (folder / "stop").touch()
        assert Life(folder, changes).end()["state"] == "stopped"
        (folder / "stop").unlink()
        assert json.loads((folder / "status.json").read_text())["state"] == "stopped" and steps_of(folder) == [1]
        return folder
    known = {}
    return lambda changes: known.get(json.dumps(changes)) or known.setdefault(json.dumps(changes), make(changes))


SIMPLE = {"loss": "cosface", "steps": 4}


@pytest.mark.parametrize("change, says", [
    ({"lr": 0.5}, "lr: was 0.02, now 0.5"),
    ({"embedding_dim": 32}, "embedding_dim: was 16, now 32"),
    ({"loss": "infonce"}, "loss: was 'cosface', now 'infonce'"),
    ({"data": "demo-tune", "pairs": 20}, "data: was 'demo', now 'demo-tune'"),
    ({"scale": 8.0}, "scale: was "),
    ({"seed": 1}, "seed: was 0, now 1"),
    ({"processes": 2}, "written by 1 processes, here are 2, which would learn something else: batch normalisation"),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_changed_parameters_are_refused_by_name(stopped, change, says):
    folder = stopped(SIMPLE)
    error = Life(folder, SIMPLE | change).end()
    assert error.startswith("CheckpointError") and says in error and str(folder) in error
    assert steps_of(folder) == [1]
    all_are_whole(folder)


VIT = {"backbone": "timm:test_vit", "image_size": 32, "steps": 6, "lr": 0.02, "pairs": 8}


@pytest.mark.parametrize("loss, before, after", [("cosface+supcon", 1, 2), ("arcface", 2, 1)])
def test_another_number_of_processes_goes_on_where_that_is_exact(stopped, alone, loss, before, after):
    changes = VIT | {"loss": loss}
    folder = stopped(changes | {"processes": before})
    found = Life(folder, changes | {"processes": after}).end()
    assert isinstance(found, dict), found
    assert f"{before} processes began this run, {after} go on" in (folder / "child.log").read_text()
    whole = alone(changes)
    print("largest difference", apart := difference(folder, whole["folder"]))
    assert apart < 2e-5 and found["state"] == "done"


def difference(folder: Path, other: str) -> float:
    "Largest, over all weights"
    parts = [[load_file(Path(of) / "made" / f"{name}.safetensors") for of in (folder, other)] for name in ("backbone", "loss")]
    assert all(one.keys() == two.keys() for one, two in parts)
    return max(float((one[key] - two[key]).abs().max()) for one, two in parts for key in one)


def test_the_best_epoch_and_the_learning_rate_outlive_a_stop(tmp_path, alone):
    changes = RUNS["keeps the best"]
    whole, folder = alone(changes), tmp_path / "run"
    best, steps = whole["best"]["epoch"], 30
    assert best < 5, "choose another learning rate: the best epoch must lie before the stop"
    life = Life(folder, changes)
    wait_for(lambda: max(steps_of(folder), default=0) >= 5 * best + 2)
    (folder / "stop").touch()
    assert life.end()["state"] == "stopped" and 5 * best < max(steps_of(folder)) < steps
    (folder / "stop").unlink()
    found = Life(folder, changes).end()
    assert found["best"] == whole["best"] and found["files"] == whole["files"]
    assert Life(folder, changes).end() == found  # killed when all was trained and nothing recorded
    rates = pd.read_csv(folder / "made" / "history.csv").lr
    assert rates.tolist() == pytest.approx([learning_rate(step, steps, 1.0, 0.05) for step in range(4, 30, 5)], rel=1e-12)


# no room


@pytest.fixture
def small_disk(tmp_path):
    folder, mount = tmp_path / "disk", shutil.which("mount")
    folder.mkdir()
    done = mount and subprocess.run([mount, "-t", "tmpfs", "-o", "size=16m", "none", folder], capture_output=True, text=True)
    if not done or done.returncode:
        pytest.skip(f"mounting a small disk needs root: {done.stderr.strip() if done else 'there is no mount'}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("name", ["keeps the best", "two processes"])
def test_a_full_disk_is_a_named_error_and_the_run_goes_on_when_there_is_room(small_disk, tmp_path, alone, name):
    changes, folder = RUNS[name], small_disk / "run"
    whole = alone(changes)
    life = Life(folder, changes, tmp_path)
    wait_for(lambda: max(steps_of(folder), default=0) >= 5)
    with open(small_disk / "others", "wb", buffering=0) as others, pytest.raises(OSError, match="No space"):
        while True:  # what was pruned meanwhile is filled as well
            others.write(bytes(1 << 16))
    error = life.end()
    assert error.startswith("CheckpointError") and "No space left" in error and str(folder) in error, error
    assert all(rank.exitcode for rank in life.ranks)
    all_are_whole(folder)
    assert 5 <= max(steps_of(folder)) < 24
    (small_disk / "others").unlink()
    found = Life(folder, changes, tmp_path).end()
    assert found["files"] == whole["files"] and found["best"] == whole["best"]


def test_a_status_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="status.json of .* was not written"):
        Keeper(tmp_path / "file" / "run", {}).tell("training", Journal(), 10, 1, 0.0, True)


def test_checkpoints_of_a_finished_run_whose_removal_was_killed(tmp_path, stopped, monkeypatch):
    folder = shutil.copytree(stopped(SIMPLE), tmp_path / "run")
    Life(folder, SIMPLE).end()
    assert steps_of(folder) == [3, 4]

    def one_file(path, **options):
        next(path.glob("shared.json")).unlink()
        raise KeyboardInterrupt
    monkeypatch.setattr(checkpoint.shutil, "rmtree", one_file)
    left = []
    while steps_of(folder):
        with pytest.raises(KeyboardInterrupt):
            remove_checkpoints(folder / "checkpoints")
        all_are_whole(folder)
        left.append(steps_of(folder))
    assert left == [[4], []] and newest_checkpoint(folder / "checkpoints") is None
    monkeypatch.undo()
    remove_checkpoints(folder / "checkpoints")
    remove_checkpoints(folder / "checkpoints")
    assert not (folder / "checkpoints").exists()


# the notebook


CHOICE = {"loss": "arcface+infonce", "epochs": 12, "lr": 0.1, "evaluate_every": 4, "keep": "best", "checkpoint": 0.0, "device": "cpu"}
LONG = [*SHORT, "-p", "name", "run", *[word for name, value in CHOICE.items() for word in ("-p", name, str(value))]]


def begin(folder: Path, *arguments: str) -> subprocess.Popen:
    "papermill, as a user starts it"
    with open(folder / "papermill.log", "ab") as log:
        return papermill(folder / "out.ipynb", *LONG, "-r", "runs", str(folder), *arguments, start=subprocess.Popen,
                         stdout=log, stderr=log, start_new_session=True)


def tree(top: int) -> list[int]:
    "A process and all below it, sessions of their own or not"
    below = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            below.setdefault(int(parent), []).append(int(path.parent.name))
    found = [top]
    for process in found:
        found += below.get(process, [])
    return found


def kill_tree(top: subprocess.Popen) -> int:  # how many there were
    processes = tree(top.pid)
    for process in processes:
        os.kill(process, signal.SIGKILL)
    top.wait()
    return len(processes)


def wait_for_step(folder: Path, more: int, process: subprocess.Popen) -> int:
    "Until a run is so many steps further than before, truly in the middle"
    wanted = max(steps_of(folder), default=0) + more
    wait_for(lambda: max(steps_of(folder), default=0) >= wanted or process.poll() is not None)
    assert process.poll() is None, (folder.parent / "papermill.log").read_text()[-3000:]
    assert json.loads((folder / "status.json").read_text())["state"] in ("training", "evaluating")
    return wanted


def facts(run: Path) -> dict:
    "What must be equal in a record"
    record = json.loads((run / "record.json").read_text())
    assert {name: file_hash(run / name) for name in FILES} == {name: record["files"][name]["sha256"] for name in FILES}
    return {"files": {name: record["files"][name] for name in FILES}, **{key: record[key] for key in ("parameters", "metrics", "counts")}}


def nothing_is_left(run: Path) -> None:
    assert not [path.name for path in run.iterdir() if path.name in ("checkpoints", "stop", "status.json", "resolved.json", ".staging")]


def finished(folder: Path, *arguments: str) -> dict:
    "The same command, its cells in a process that has the libraries already"
    folder.mkdir(exist_ok=True)
    done = train_notebook(folder, *LONG, "-r", "runs", str(folder), *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    nothing_is_left(folder / "run")
    return facts(folder / "run")


def test_notebook_whose_papermill_is_terminated_and_that_is_stopped_and_run_again_in_its_kernel(tmp_path):
    run = tmp_path / "run"
    first = begin(tmp_path)
    wait_for_step(run, 8, first)
    first.terminate()  # papermill alone; its kernel finds out
    assert first.wait() == -signal.SIGTERM and not (run / "record.json").exists()

    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = prepared(tmp_path)
    client = NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": ROOT / "nbs"}})
    with client.setup_kernel():
        before = max(steps_of(run))
        stopper = threading.Thread(target=lambda: (wait_for(lambda: max(steps_of(run)) >= before + 8), (run / "stop").touch()))
        stopper.start()
        with pytest.raises(CellExecutionError, match="SystemExit"):
            run_all(client)
        stopper.join()
        assert json.loads((run / "status.json").read_text())["state"] == "stopped"
        assert before + 8 <= max(steps_of(run)) < 60 and not (run / "record.json").exists() and not (run / "stop").exists()
        all_are_whole(run)
        run_all(client)  # Run All once more
    assert "goes on at step" in str(notebook.cells)
    nothing_is_left(run)
    assert facts(run) == finished(tmp_path / "whole")


def prepared(folder: Path):
    "The notebook with its parameters"
    done = papermill(folder / "prepared.ipynb", *LONG, "-r", "runs", str(folder), "--prepare-only", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    import nbformat  # not at the top, where each child would wait for it
    return nbformat.read(folder / "prepared.ipynb", as_version=4)


def run_all(client) -> None:
    for number, cell in enumerate(client.nb.cells):
        client.execute_cell(cell, number)


def test_notebook_with_two_processes_killed_stopped_and_run_again(tmp_path, alone):
    run, two = tmp_path / "run", ["-p", "processes", "2"]
    first = begin(tmp_path, *two)
    wait_for_step(run, random.Random(0).randint(4, 16), first)
    assert kill_tree(first) >= 5  # papermill, kernel, torchrun, two workers
    assert not (run / "record.json").exists()
    all_are_whole(run)

    second = begin(tmp_path, *two)
    wanted = wait_for_step(run, random.Random(1).randint(4, 16), second)
    (run / "stop").touch()
    assert second.wait(120) == 0, (tmp_path / "papermill.log").read_text()[-3000:]
    assert json.loads((run / "status.json").read_text())["state"] == "stopped"
    assert wanted <= max(steps_of(run)) < 60 and not (run / "record.json").exists() and not (run / "stop").exists()

    found, whole = finished(tmp_path, *two), alone(CHOICE | {"processes": 2, "weights": ""})
    assert {name: about["sha256"] for name, about in found["files"].items()} == {name: whole["files"][name] for name in FILES}
    assert whole["best"] == {"epoch": found["counts"]["best_epoch"], "score": found["metrics"]["best_mean_eer"]}
