"""The batch scripts in a real Slurm: two nodes that are none, with runs of seconds on demo faces, all at the same time."""
import json
import os
import re
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest
from cluster import ENDED, Cluster, NoCluster

from conftest import ROOT
from facenb.command import main
from facenb.demo import demo_store

pytestmark = pytest.mark.xdist_group("slurm")  # one cluster: pytest -n 2 --dist loadgroup, or loadfile
SBATCH = sorted((ROOT / "slurm").glob("*.sbatch"))
FILES = sorted((ROOT / "slurm").glob("*.yaml"))
TRAIN, EVALUATE = ROOT / "slurm" / "train.sbatch", ROOT / "slurm" / "evaluate.sbatch"
SMALL = ["--gpus-per-node=0", "--cpus-per-task=1", "--mem=4G", "--time=20"]
PARAMETERS = """
loss: infonce
data: "store:{store}"
image_size: 24
embedding_dim: 16
epochs: 30
device: cpu
checkpoint: 0  # after every step
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if not (ROOT / ".venv" / "bin" / "python").exists():
        pytest.skip("the scripts use .venv, which make builds")
    folder = tmp_path_factory.mktemp("slurm")
    cluster = Cluster(folder / "daemons", DATA_DIR=str(folder / "my data"), PYTHONPATH=str(ROOT),
                      OMP_NUM_THREADS="1", FACENB_HEAD_ADDR="127.0.0.1")  # nobody knows a host g1
    try:
        cluster.start()
    except NoCluster as error:
        pytest.skip(str(error))
    demo_store(folder / "my data" / "faces.lmdb")
    (folder / "small.yaml").write_text(PARAMETERS.format(store=folder / "my data" / "faces.lmdb"))
    yield cluster
    cluster.stop()


def facenb(cluster: Cluster, *words) -> tuple[int, str]:
    "Exit code and words of the command, in this process since torch takes seconds"
    said = StringIO()
    with patch.dict(os.environ, cluster.environment, clear=True), redirect_stdout(said), redirect_stderr(said):
        return main([str(word) for word in words]), said.getvalue()


class Job:
    "A job, and the run it makes"

    def __init__(self, cluster: Cluster, number: str, log: Path, name: str):
        self.cluster, self.number, self.log = cluster, number, log
        self.run = cluster.folder.parent / "my data" / "runs" / name

    @classmethod
    def submitted(cls, cluster: Cluster, stem: str, *words: str) -> list["Job"]:
        "By `facenb submit`: a job for each seed"
        code, said = facenb(cluster, "submit", cluster.folder.parent / "small.yaml", "--name", stem, *words)
        assert code == 0, said
        found = re.findall(r"^  (\d+_(\d+))  log (.+)$", said, re.M)
        return [cls(cluster, number, Path(log), f"{stem}-seed{seed}") for number, seed, log in found]

    @classmethod
    def batch(cls, cluster: Cluster, name: str, script: Path, *words: str) -> "Job":
        "By sbatch"
        log = cluster.folder.parent / "my data" / f"{name}.log"
        return cls(cluster, cluster.run("sbatch", "--parsable", *SMALL, f"--output={log}", *words[:1], script, *words[1:], cwd=ROOT), log, name)

    def facts(self) -> dict:
        return self.cluster.jobs(self.number)[0]

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def until(self, happens, limit: float = 400):
        end = time.monotonic() + limit
        while not (result := happens()):
            assert self.facts()["JobState"] not in ENDED and time.monotonic() < end, self.said()
            time.sleep(0.05)
        return result

    def until_it_trains(self) -> None:
        self.until(lambda: list(self.run.glob("checkpoints/step-*")))

    def end(self) -> dict:
        return self.cluster.wait(self.number, 400)[0]

    def record(self) -> dict:
        assert self.end()["JobState"] == "COMPLETED", self.said()
        return json.loads((self.run / "record.json").read_text())


@pytest.fixture(scope="module")
def jobs(cluster) -> dict[str, Job]:
    "All of them, started together; most of their time is that of imports"
    top = cluster.folder.parent
    (top / "wrong.yaml").write_text((top / "small.yaml").read_text() + "temperature: -1.0\n")
    started = dict(zip(("seed0", "seed1"), Job.submitted(cluster, "small", "--seeds", "0-1", "--", "--time=20")))
    started["preempted"], = Job.submitted(cluster, "preempted")
    started["nodes"], = Job.submitted(cluster, "nodes", "--nodes", "2", "--processes", "2", "-p", "epochs", "3")
    started["cancelled"], = Job.submitted(cluster, "cancelled", "--processes", "2", "-p", "epochs", "4000")
    started["wrong"] = Job.batch(cluster, "wrong-seed0", TRAIN, "--requeue", str(top / "wrong.yaml"))
    array = started["seed0"].number.split("_")[0]
    started["evaluated"] = Job.batch(cluster, "evaluate-small-seed0", EVALUATE, f"--dependency=afterok:{array}_0", str(top / "small.yaml"))
    return started


@pytest.fixture(scope="module")
def pre_empted(cluster, jobs) -> Job:
    "Asked to stop while it trained, and queued again; so is the one of two nodes, before its first step"
    job, nodes = jobs["preempted"], jobs["nodes"]
    job.until_it_trains()
    copy = str(cluster.folder / "scratch" / job.facts()["JobId"] / "faces.lmdb")
    assert any(copy in text for text in texts("maps")), "the copy on the node's disk is not read"
    cluster.run("scancel", "--batch", "--signal=USR1", job.number)
    nodes.until((nodes.run / "train.log").exists)
    cluster.run("scancel", "--batch", "--signal=USR1", nodes.number)
    job.until(lambda: job.facts()["Restarts"] == "1")
    return job


def texts(pattern: str) -> list[str]:
    "Files of all processes in /proc, without those that ended meanwhile or are not ours"
    found = []
    for path in Path("/proc").glob(f"[0-9]*/{pattern}"):
        try:
            found.append(path.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return found


def processes(job: Job) -> int:
    "How many were started by a job, whatever session they are in"
    own = (f"SLURM_JOB_ID={job.facts()['JobId']}\0", f"SLURM_CONF={job.cluster.environment['SLURM_CONF']}\0")
    return sum(all(word in text for word in own) for text in texts("environ"))


def test_the_queue_is_known(cluster, jobs):
    jobs["seed0"].until_it_trains()
    code, said = facenb(cluster, "status", "small")
    assert code == 0 and re.search(r"small-seed0 +running +\d+/30 ", said), said
    code, said = facenb(cluster, "submit", cluster.folder.parent / "small.yaml", "--seeds", "0-1")
    assert code == 2 and f"small-seed0 is job {jobs['seed0'].number} already" in said and "nothing was started" in said


def test_pre_empted_job_is_queued_again(cluster, pre_empted):
    assert "preempted-seed0 is queued again" in pre_empted.said() and not (pre_empted.run / "record.json").exists()
    assert re.search(r"preempted-seed0 +(queued|running) ", facenb(cluster, "status")[1])


def test_cancelled_job_leaves_no_process(cluster, jobs):
    job = jobs["cancelled"]
    job.until_it_trains()
    assert processes(job) > 5  # the script, papermill, its kernel, the launcher and two ranks
    cluster.run("scancel", job.number)
    assert job.end()["JobState"] == "CANCELLED"
    end = time.monotonic() + 30
    while processes(job) and time.monotonic() < end:
        time.sleep(0.2)
    assert not processes(job) and not (job.run / "record.json").exists()


@pytest.mark.parametrize("script", SBATCH, ids=lambda path: path.name)
def test_slurm_accepts_every_script(cluster, script):
    for more in ([], ["--array=0-2", "--nodes=2"]):
        cluster.run("sbatch", "--test-only", *more, script, FILES[0], cwd=ROOT)


def test_slurm_accepts_what_would_be_submitted(cluster):
    code, said = facenb(cluster, "submit", *FILES, "--seeds", "0-2", "--test-only")
    assert code == 0 and said.count("Job ") == len(FILES) and "refused" not in said, said
    code, said = facenb(cluster, "submit", FILES[0], "--test-only", "--", "--gpus-per-node=a100:2")
    assert code == 1 and "refused" in said and "not available" in said


def test_asks_for_gpus(cluster):
    job = cluster.run("sbatch", "--parsable", "--hold", TRAIN, FILES[0], cwd=ROOT)
    asked = cluster.jobs(job)[0]
    assert (asked["TresPerNode"], asked["CPUs/Task"], asked["Requeue"]) == ("gres:gpu:h100:2", "24", "1")
    cluster.run("scancel", job)


def test_pre_empted_run_ends_like_an_uninterrupted_one(pre_empted, jobs):
    resumed, through = pre_empted.record(), jobs["seed0"].record()
    assert re.search(r"goes on at step [1-9]", pre_empted.said()) and (pre_empted.run / "out.1.ipynb").exists()
    assert resumed["parameters"] == through["parameters"] and resumed["metrics"] == through["metrics"]
    for name in ("backbone.safetensors", "history.csv"):
        assert resumed["files"][name]["sha256"] == through["files"][name]["sha256"], name


def test_an_array_counts_seeds(cluster, jobs):
    records = [jobs[name].record() for name in ("seed0", "seed1")]
    assert [record["seed"] for record in records] == [0, 1]
    weights = {record["files"]["backbone.safetensors"]["sha256"] for record in records}
    assert len(weights) == 2
    assert re.search(r"small-seed0 +finished +30/30 ", facenb(cluster, "status")[1])
    code, said = facenb(cluster, "submit", cluster.folder.parent / "small.yaml", "--seeds", "0-2")
    assert code == 2 and "small-seed0 is finished" in said and "--seeds 2 are left" in said


def test_evaluation_says_what_the_run_said(jobs):
    run, again = jobs["seed0"].record(), jobs["evaluated"].record()
    assert again["parameters"]["weights_sha256"] and "report.html" in again["files"]
    assert again["metrics"]["held_out_eer"] == run["metrics"]["eer"]


def test_two_nodes_of_two_processes_are_pre_empted_too(pre_empted, jobs):
    job = jobs["nodes"]
    assert job.record()["parameters"].items() >= {"nodes": 2, "processes": 2}.items()
    assert job.end()["Restarts"] == "1" and "goes on at step 1 of 18" in job.said()
    steps = [line.split(",")[1] for line in (job.run / "history.csv").read_text().splitlines()]
    assert steps == ["step", "6", "12", "18"]


def test_wrong_file_is_a_failed_job(jobs):
    assert jobs["wrong"].end()["JobState"] == "FAILED"
    said = jobs["wrong"].said()
    assert "temperature" in said and "without a record" in said, said
