"""Training processes started from one cell: what they say, why they failed, and that none is left behind."""
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from facenb.launch import WorkerError, command, launch

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
TOY = '''
import argparse, json, os, signal, sys, time
from pathlib import Path
from facenb.launch import reporting

parser = argparse.ArgumentParser()
parser.add_argument("--config")
config = Path(parser.parse_args().config)
what, rank = json.loads(config.read_text())["what"], int(os.environ["RANK"])

def reduce():
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    one = torch.ones(1)
    dist.all_reduce(one)
    print(f"rank {rank}: {int(one)} ranks, {torch.get_num_threads()} threads")
    if what == "raise" and rank == 1:
        time.sleep(1)  # rank 0 waits in the next one
        raise ValueError("a face too many")
    dist.all_reduce(one)
    dist.destroy_process_group()

with reporting(config.parent):
    if what in ("reduce", "raise"):
        reduce()
    elif what == "kill" and rank == 1:
        print("about to be killed")
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        if what == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (config.parent / f"ready-{rank}").touch()
        time.sleep(120)
'''
CELL = "import sys; from facenb.launch import launch; launch(sys.argv[1], 2, module='toy_of_launch')"


@pytest.fixture
def toy(tmp_path, monkeypatch):
    "Makes the folder of a run whose workers do `what`; returns its config"
    (tmp_path / "toy_of_launch.py").write_text(TOY)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in {"RANK": "7", "WORLD_SIZE": "9", "MASTER_PORT": "1", "ACCELERATE_USE_CPU": "true"}.items():
        monkeypatch.setenv(name, value)  # as inside another torchrun

    def make(what: str, name: str = "run") -> Path:
        (tmp_path / name).mkdir()
        config = tmp_path / name / "resolved.json"
        config.write_text(f'{{"what": "{what}", "threads": 2}}')
        return config
    yield make
    for pid in processes_of(tmp_path):  # of a test that failed
        os.kill(pid, signal.SIGKILL)


def start(config: Path) -> subprocess.Popen:
    "Somebody else who launches, as a notebook's kernel would"
    return subprocess.Popen([sys.executable, "-c", CELL, str(config)], text=True, start_new_session=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)


def processes_of(config: Path) -> dict[int, str]:
    "All processes with this run on their command line"
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(config) in words:
            found[int(path.parent.name)] = words
    return found


def wait_until(condition, seconds: float = 60) -> bool:
    limit = time.monotonic() + seconds
    while not (true := condition()) and time.monotonic() < limit:
        time.sleep(0.1)
    return bool(true)


def test_two_launches_at_once_on_one_node(toy, capfd):
    mine, others = toy("reduce", "mine"), toy("reduce", "others")
    other = start(others)
    (mine.parent / "errors").mkdir()
    (mine.parent / "errors" / "rank-0.txt").write_text("of the last time")
    launch(mine, 2, module="toy_of_launch")
    said, _ = other.communicate(timeout=60)
    assert other.returncode == 0, said
    log = (mine.parent / "train.log").read_text()
    for text in (capfd.readouterr().out, said, log, (others.parent / "train.log").read_text()):
        assert sorted(re.findall(r"rank (\d): (\d) ranks, (\d) threads", text)) == [("0", "2", "2"), ("1", "2", "2")]
    assert "torch.distributed.run" in log.splitlines()[0]
    assert not (mine.parent / "errors").exists()


def test_the_traceback_of_the_rank_that_failed(toy):
    config = toy("raise")
    with pytest.raises(WorkerError) as error:
        launch(config, 2, module="toy_of_launch")
    message = str(error.value)
    assert message.startswith("rank 1 failed:\nTraceback")
    assert 'raise ValueError("a face too many")' in message and "ValueError: a face too many" in message
    assert "onnection" not in message
    assert str(config.parent / "train.log") in message
    if (other := config.parent / "errors" / "rank-0.txt").exists():  # unless it was ended in time
        assert other.read_text().split("\n")[0].endswith("looks like the end of another process")


def test_a_rank_that_was_killed_is_named(toy):
    with pytest.raises(WorkerError) as error:
        launch(toy("kill"), 2, module="toy_of_launch")
    message = str(error.value)
    assert message.startswith("rank 1 was ended by signal 9 (SIGKILL), which usually means that memory ran out")
    assert "about to be killed" in message and "torch/distributed" not in message


def test_a_module_that_is_not_there(toy):
    with pytest.raises(WorkerError, match="No module named toy_of_lunch") as error:
        launch(toy("reduce"), 2, module="toy_of_lunch")
    assert "torch/distributed" not in str(error.value)


@linux
def test_no_process_outlives_the_one_that_launched_it(toy):
    ends = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}
    configs = {name: toy("sleep", name) for name in ends}
    launching = {name: start(config) for name, config in configs.items()}
    for name, config in configs.items():
        assert wait_until(lambda: all((config.parent / f"ready-{rank}").exists() for rank in (0, 1))), name
        assert len(processes_of(config)) == 4  # launching, torch.distributed.run, two workers
    for name, number in ends.items():
        launching[name].send_signal(number)
    for name, config in configs.items():
        assert wait_until(lambda: set(processes_of(config)) <= {launching[name].pid}, 15), processes_of(config)
    said = {name: process.communicate(timeout=15)[0] for name, process in launching.items()}
    assert {name: process.returncode for name, process in launching.items()} == {
        "kill": -signal.SIGKILL, "terminate": -signal.SIGTERM, "interrupt": -signal.SIGINT}
    assert said["interrupt"].splitlines()[-1] == "KeyboardInterrupt"


@linux
def test_workers_do_not_hear_slurm_and_end_with_torchrun(toy):
    config = toy("deaf")  # to SIGTERM: only their own request ends them
    launching = start(config)
    assert wait_until(lambda: all((config.parent / f"ready-{rank}").exists() for rank in (0, 1)))
    there = processes_of(config)
    for pid in there.keys() - {launching.pid}:
        os.kill(pid, signal.SIGUSR1)
        os.kill(pid, signal.SIGUSR2)
    time.sleep(1)
    assert processes_of(config) == there
    agent, = (pid for pid, words in there.items() if "torch.distributed.run" in words)
    os.kill(agent, signal.SIGKILL)
    said, _ = launching.communicate(timeout=30)
    assert "WorkerError: the training processes were ended by signal 9 (SIGKILL)" in said
    assert processes_of(config) == {}


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    "A stand-in that answers as on a cluster"
    tool = tmp_path / "bin" / "scontrol"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\ntest "$*" = "show hostnames node[08-09]" || exit 1\nprintf "node08\\nnode09\\n"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    return tool


def job(**more) -> dict:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "FACENB"))}
    return clean | {"SLURM_JOB_ID": "123456", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[08-09]",
                    "SLURM_CPUS_PER_TASK": "24"} | more


def option(words: list[str], name: str) -> str:
    value, = (word.removeprefix(f"{name}=") for word in words if word.startswith(f"{name}="))
    return value


def test_command_for_several_nodes(scontrol, tmp_path):
    words = command(tmp_path / "resolved.json", 2, 2, environ=job())
    srun, run = words.index("srun"), words.index("torch.distributed.run")
    assert words[:srun] == words[run - 5:run - 2] == [sys.executable, "-m", "facenb.guard"]
    assert option(words, "--nodes") == option(words, "--ntasks") == option(words, "--nnodes") == "2"
    assert option(words, "--ntasks-per-node") == "1" and option(words, "--cpus-per-task") == "24"
    assert option(words, "--nproc_per_node") == "2" and "--standalone" not in words
    host, port = option(words, "--rdzv_endpoint").split(":")
    assert host == "node08" and 10_000 <= int(port) < 30_000
    assert words[-4:] == ["-m", "facenb.train", "--config", str(tmp_path / "resolved.json")]
    assert words == command(tmp_path / "resolved.json", 2, 2, environ=job())  # every node and restart alike
    other = command(tmp_path / "other.json", 2, 2, environ=job())
    assert option(other, "--rdzv_endpoint") != option(words, "--rdzv_endpoint")
    halves = command(tmp_path / "resolved.json", 2, 2, environ=job(SLURM_NTASKS_PER_NODE="2", SLURM_CPUS_PER_TASK="12"))
    assert option(halves, "--cpus-per-task") == "24"


def test_command_for_nodes_without_names(tmp_path):
    words = command(tmp_path / "c.json", 2, 2, environ=job(PATH="", FACENB_HEAD_ADDR="127.0.0.1"))
    assert option(words, "--rdzv_endpoint").startswith("127.0.0.1:")


@pytest.mark.parametrize("environ, says", [
    ({}, "submit it \\(facenb submit FILE --nodes 2\\), or choose nodes=1"),
    (job(SLURM_JOB_NUM_NODES="4"), "job 123456 has 4: submit it with --nodes 2, or choose nodes=4"),
    (job(PATH=""), "set FACENB_HEAD_ADDR"),
    (job(SLURM_JOB_NODELIST="nowhere"), "set FACENB_HEAD_ADDR"),
])
def test_nodes_that_are_not_there(environ, says, scontrol):
    with pytest.raises(WorkerError, match=says):
        command("c.json", 2, 2, environ=environ)
