"""`facenb submit` and `facenb status` from outside: every parameter file, a Slurm of straw, and a real run on this machine."""
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from conftest import ROOT
from facenb.command import main
from facenb.runs import read_record

FILES = sorted((ROOT / "slurm").glob("*.yaml"))


@pytest.fixture
def facenb(tmp_path, monkeypatch, capsys):
    "The command `facenb`, in this process since torch takes seconds; data below `tmp_path`, programs of `tmp_path/bin` first"
    (tmp_path / "bin").mkdir()
    for name, value in {"DATA_DIR": tmp_path / "data", "SBATCH_ACCOUNT": "", "OMP_NUM_THREADS": "1",
                        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(ROOT)

    def call(*words):
        capsys.readouterr()
        code = main(list(map(str, words)))
        return SimpleNamespace(returncode=code, **capsys.readouterr()._asdict())
    return call


@pytest.fixture
def slurm(tmp_path, facenb) -> Path:
    "sbatch and squeue that write down what they were given; `queue` holds what squeue answers"
    (tmp_path / "queue").touch()
    sbatch = '{ echo "name=${FACENB_NAME-}"; printf "%s\\n" "$@"; echo; } >> CALLS\n' \
             'case " $* " in *refuse*) echo "sbatch: error: invalid account" >&2; exit 1;; *--test-only*) echo "sbatch: Job 1 to start" >&2; exit 0;; esac\n' \
             'n=$(grep -c ^--parsable CALLS); echo "$((100 + n));cluster"\n'
    for name, text in (("sbatch", sbatch.replace("CALLS", str(tmp_path / "calls"))), ("squeue", f"cat {tmp_path / 'queue'}\n")):
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}")
        path.chmod(0o755)
    return tmp_path


def calls(folder: Path) -> list[list[str]]:
    path = folder / "calls"
    return [call.splitlines() for call in path.read_text().strip().split("\n\n")] if path.exists() else []


# parameter files

@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_parameter_file_is_right_and_says_what_it_is(path):
    from facenb.submit import read_experiment
    text = path.read_text()
    head = [line for line in text.splitlines() if line.startswith("#")]
    for word in ("# Reproduces", "# Published:", "# Time:", f"# Command: facenb submit slurm/{path.name}"):
        assert any(line.startswith(word) for line in head), f"{path.name} has no line {word}"
    experiment = read_experiment(path, {})
    for name, value in yaml.safe_load(text).items():
        assert experiment.values[name] == value and type(experiment.values[name]) is type(value), name
    if images := re.search(r"_b(\d+)$", path.stem):
        assert 2 * experiment.values["pairs"] == int(images[1])


def test_published_scores_are_those_of_the_table():
    rows = [line.split(",") for line in (ROOT / "data" / "reference" / "published_results.csv").read_text().splitlines()[1:]]
    known = {row[0]: " / ".join(row[4:7]) for row in rows}
    named = {}
    for path in FILES:
        row = re.search(r"Reproduces the row (.+) of data/reference/published_results", path.read_text())
        if row:
            assert f"# Published: {known[row[1]]} (LFW" in path.read_text(), path.name
            named[row[1]] = path.stem
    assert set(named) == set(known)


def test_published_scores_of_nearid_are_those_of_its_tables():
    "Each number of the line, printed with a point and without the zero before it, stands in the row"
    import pandas as pd
    columns = {"NearID SSR": "nearid_ssr", "PA": "nearid_pa", "M-O": "mtg_mo", "M-O_pair": "mtg_mopair", "M-H": "dbpp_mh"}
    seen = 0
    for path in FILES:
        text = path.read_text()
        row = re.search(r"Reproduces the row (.+) of (data/reference/nearid/ref_\w+\.csv)", text)
        if not row:
            continue
        table, key = pd.read_csv(ROOT / row[2]), row[1]
        if key.split()[0] in ("alpha", "beta"):
            found = table[table[key.split()[0]] == float(key.split()[1])]
        else:
            found = table[table.iloc[:, 0] == key]
        assert len(found) == 1, (path.name, key)
        line = re.search(r"# Published: (.+)", text)[1]
        first = line.partition("; MTG")[0] + "; " + line.partition("MTG ")[2]
        for name, column in columns.items():
            if said := re.search(rf"{re.escape(name)} (\d*\.\d+)", first):
                assert float(said[1]) == found[column].iloc[0], (path.name, name)
                seen += 1
        ssr, pa = re.search(r"M-O_pair \S+, SSR (\S+), PA (\d+\.\d+)", line).groups()
        assert [float(ssr), float(pa)] == found[["mtg_ssr", "mtg_pa"]].iloc[0].tolist(), path.name
    assert seen > 80


def test_every_file_of_the_paper_is_there():
    models = {"clip", "dinov2", "ijepa"}
    wanted = {"arcface", "infonce", "hybrid", *models, *(f"{model}_lora" for model in models)}
    wanted |= {f"infonce_b{images}" for images in (1450, 4096, 8192, 16384, 32768)}
    wanted |= {f"nearid_{loss}" for loss in ("infonce", "infonce_r", "infonce_oracle", "infonce_r_oracle", "siglip", "circle", "cohesion")}
    wanted |= {"nearid", "nearid_only", "nearid_one_source", "nearid_mtg_only", "nearid_recipe"}
    wanted |= {f"nearid_alpha{alpha}" for alpha in ("00", "01", "025", "10", "20")} | {f"nearid_beta{beta}" for beta in ("01", "02", "03")}
    assert wanted | {"demo_arcface", "demo_infonce", "demo_hybrid", "demo_nearid"} == {path.stem for path in FILES}


# a Slurm of straw

def test_submits_one_array_a_file(slurm, facenb, monkeypatch):
    monkeypatch.setenv("SBATCH_ACCOUNT", "def-you")
    done = facenb("submit", "slurm/demo_infonce.yaml", "slurm/demo_arcface.yaml", "--seeds", "0-2,5", "-p", "lr", "0.01",
                  "-p", "verify", "", "--", "--time=0:30:00")
    assert done.returncode == 0, done.err
    first, second = calls(slurm)
    assert first[0] == "name=" and "--array=0-2,5" in first and "--job-name=demo_infonce" in first and "--account=def-you" in first
    assert f"--output={slurm}/data/logs/demo_infonce-%A_%a.log" in first and (slurm / "data" / "logs").is_dir()
    assert "--gpus-per-node=0" in first and first.index("--time=0:30:00") < first.index("slurm/train.sbatch")
    copy, *words = first[first.index("slurm/train.sbatch") + 1:]
    assert words == ["-p", "lr", "0.01", "-r", "verify"]  # and ""
    assert copy.endswith("/demo_infonce.yaml") and Path(copy).is_relative_to(slurm / "data" / "logs")  # edits come too late
    assert Path(copy).read_bytes() == (ROOT / "slurm" / "demo_infonce.yaml").read_bytes()
    runs = slurm / "data" / "runs"
    note = json.loads((runs / "demo_arcface-seed5" / "job.json").read_text())
    assert note == {"job": "102_5", "log": f"{slurm}/data/logs/demo_arcface-102_5.log", "file": "slurm/demo_arcface.yaml"}
    for said in ("job 101", "101_0", note["log"], str(runs / "demo_infonce-seed2" / "record.json")):
        assert said in done.out


def test_what_is_queued_or_finished_is_refused(slurm, facenb):
    words = ["submit", "slurm/demo_infonce.yaml", "--seeds", "0-1"]
    assert facenb(*words).returncode == 0
    (slurm / "queue").write_text("101_0 RUNNING\n101_1 PENDING\n")
    again = facenb(*words)
    assert again.returncode == 2 and "demo_infonce-seed0 is job 101_0 already, running" in again.err
    table = facenb("status").out
    assert re.search(r"demo_infonce-seed0 +running", table) and re.search(r"demo_infonce-seed1 +queued", table)
    (slurm / "queue").write_text("")
    groups = dict.fromkeys(["parameters", "metrics", "units", "counts", "seconds", "git"], {})
    record = {"format": 1, "name": "x", **groups, "parameters": {"lr": 0.5, "epochs": 150}, "metrics": {"eer": 0.1}}
    (slurm / "data" / "runs" / "demo_infonce-seed0" / "record.json").write_text(json.dumps(record))
    again = facenb(*words)
    assert again.returncode == 2 and "lr: was 0.5, now 0.02" in again.err and "--seeds 1 are left" in again.err
    assert len(calls(slurm)) == 1, "something was submitted"
    assert facenb(*words, "--dry-run").returncode == 0
    assert facenb(*words, "--name", "new").returncode == 0 and calls(slurm)[1][0] == "name=new"
    table = facenb("status", "demo_infonce").out
    assert re.search(r"demo_infonce-seed0 +finished +150/150 +EER 0.100", table) and "new-seed0" not in table


def test_nothing_is_submitted_while_one_file_is_wrong(slurm, facenb):
    wrong, twice = slurm / "wrong.yaml", slurm / "twice.yaml"
    wrong.write_text("# head\nloss: infonce\nlr: 1e-3\npairz: 3\n")
    twice.write_text("lr: 0.1\nlr: 0.2\n")
    done = facenb("submit", "slurm/demo_infonce.yaml", wrong, twice)
    assert done.returncode == 2 and calls(slurm) == []
    for said in (f"{wrong}, line 3", "write 0.001", f"{wrong}, line 4", "did you mean pairs?", f"{twice}, line 2"):
        assert said in done.err
    missing = facenb("submit", "slurm/demo_infonce.yaml", "slurm/clip.yaml")
    assert missing.returncode == 2 and calls(slurm) == []
    assert "facenb prepare ms1m" in missing.err and "facenb prepare weights clip_vit_b32" in missing.err
    dry = facenb("submit", "slurm/clip.yaml", "--seeds", "3", "--dry-run")
    assert dry.returncode == 0 and calls(slurm) == [] and "facenb prepare ms1m" in dry.err
    assert re.search(r"^sbatch --array=3 --job-name=clip .* slurm/train.sbatch slurm/clip.yaml$", dry.out, re.M)
    assert not (slurm / "data" / "runs").exists() and not (slurm / "data" / "logs").exists()


def test_what_slurm_says_is_passed_on(slurm, facenb):
    tested = facenb("submit", "slurm/clip.yaml", "slurm/demo_hybrid.yaml", "--test-only")
    assert tested.returncode == 0 and tested.out.count("Job 1 to start") == 2 and "--test-only" in calls(slurm)[0]
    refused = facenb("submit", "slurm/demo_hybrid.yaml", "--", "--account=refuse")
    assert refused.returncode == 1 and "invalid account" in refused.err
    assert not (slurm / "data" / "runs" / "demo_hybrid-seed0").exists()


def test_without_slurm_one_is_told_of_local(tmp_path, facenb, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    done = facenb("submit", "slurm/demo_infonce.yaml")
    assert done.returncode == 2 and "--local" in done.err and "Traceback" not in done.err


def test_status_survives_damaged_files(slurm, facenb):
    runs = slurm / "data" / "runs"
    for name, file, text in (("a-seed0", "status.json", '{"state": "tra'), ("b-seed0", "record.json", "[]"),
                             ("c-seed0", "status.json", json.dumps({"state": "stopped", "epoch": 2, "epochs": 9, "time": 1}))):
        (runs / name).mkdir(parents=True)
        (runs / name / file).write_text(text)
    done = facenb("status", "--runs", runs)
    assert done.returncode == 0 and "a-seed0/status.json" in done.err and "b-seed0/record.json" in done.err
    assert re.search(r"a-seed0 +broken", done.out) and re.search(r"c-seed0 +stopped +2/9", done.out)
    assert facenb("status", "nobody").returncode == 1


def test_status_is_calm_where_no_slurm_answers(slurm, facenb):
    (slurm / "bin" / "squeue").write_text("#!/bin/sh\necho 'squeue: error: resolve_ctls_from_dns_srv: Unknown host' >&2\nexit 1\n")
    done = facenb("status")
    assert done.returncode == 0 and done.err == "facenb: no Slurm answers, so jobs are not shown\n"
    done = facenb("submit", "slurm/demo_infonce.yaml")
    assert done.returncode == 2 and "Unknown host" in done.err and "nothing was started" in done.err and not calls(slurm)


@pytest.mark.parametrize("word", ["--array=5", "-a5", "--export=NONE", "--output=x", "--chdir=/tmp"])
def test_what_submit_decides_is_no_option_of_sbatch(slurm, facenb, word):
    done = facenb("submit", "slurm/demo_infonce.yaml", "--", "--mem=4G", word)
    assert done.returncode == 2 and f"{word} behind `--`" in done.err and not calls(slurm)


# this machine

def test_a_run_here(tmp_path, facenb):
    file = tmp_path / "good.yaml"
    file.write_text("loss: infonce\ndata: demo\ndevice: cpu\nimage_size: 24\nembedding_dim: 16\n")
    words = ["submit", file, "--seeds", "1", "--local", "-p", "epochs", "1"]
    done = facenb(*words)
    assert done.returncode == 0 and re.search(r"good-seed1 +finished$", done.out, re.M), done.out + done.err
    run = tmp_path / "data" / "runs" / "good-seed1"
    assert read_record(run / "record.json")["parameters"]["seed"] == 1
    assert (run / "train.ipynb").exists() and not (run / ".out.ipynb").exists()
    before = (run / "record.json").stat().st_mtime_ns
    again = facenb(*words)
    assert again.returncode == 0 and "finished before" in again.out and (run / "record.json").stat().st_mtime_ns == before
    other = facenb(*words, "-p", "lr", "0.5")
    assert other.returncode == 1 and "lr: was 0.02, now 0.5" in other.out


# `facenb submit --local` with something quick in place of the notebook: `STRAW` is run with the folder of the run
DRIVER = """
import sys
from pathlib import Path
import facenb.submit as submit
if (straw := sys.argv[1]) != "real":
    submit.local_command = lambda experiment, seed: [sys.executable, "-m", "facenb.guard", sys.executable, "-uc",
                                                     straw, str(experiment.folder(seed)), str(seed)]
experiment = submit.Experiment(Path("slurm/demo_infonce.yaml"), "x", {}, ())
sys.exit(submit.run_all([experiment], [0, 1, 2]))
"""
WAITS = "import sys, time; from pathlib import Path; print('here')\nwhile not (Path(sys.argv[1]) / 'stop').exists(): time.sleep(0.05)"
DEAF = "import time; print('here'); time.sleep(600)"


@pytest.fixture
def local(tmp_path):
    "Start the driver; it and what it started are gone after the test"
    started, below = [], set()

    def start(straw):
        started.append(subprocess.Popen([sys.executable, "-c", DRIVER, straw], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                        text=True, env={**os.environ, "DATA_DIR": str(tmp_path / "data"), "OMP_NUM_THREADS": "1"}))
        return started[0], below
    yield start
    for pid in below | {process.pid for process in started}:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
    for process in started:
        process.communicate()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(of: int) -> set[int]:
    "Process ids below one"
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            pass
    below, more = set(), {of}
    while more:
        below |= more
        more = {pid for pid, parent in parents.items() if parent in below} - below
    return below - {of}


def until(condition, limit: float = 60):
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "this took too long"
        time.sleep(0.05)


def test_a_run_that_fails_does_not_keep_back_the_others(local, tmp_path):
    process, _ = local("import sys, pathlib; folder = pathlib.Path(sys.argv[1]); sys.argv[2] == '1' and sys.exit(7)\n"
                       "print('said by', folder.name); (folder / 'record.json').write_text('{}')")
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 1 and "said by x-seed0" in said, said
    states = dict(re.findall(r"^(x-seed\d) +(.+)$", said, re.M))
    assert states == {"x-seed0": "finished", "x-seed1": "failed, code 7", "x-seed2": "finished"}


@pytest.mark.parametrize("straw, presses", [(WAITS, 1), (DEAF, 2)])
def test_ctrl_c_asks_once_and_ends_at_the_second(straw, presses, local, tmp_path):
    process, _ = local(straw)
    until(lambda: "here" in process.stdout.readline())
    for press in range(presses):
        process.send_signal(signal.SIGINT)
        until((tmp_path / "data" / "runs" / "x-seed0" / "stop").exists)
    said = process.communicate(timeout=60)[0]
    state = "stopped" if presses == 1 else "failed, code -15"
    assert process.returncode == 1 and re.search(f"x-seed0 +{state}$", said, re.M) and re.search(r"x-seed1 +not begun", said), said
    assert "the same command goes on" in said


def test_nothing_survives_when_it_is_killed(local, tmp_path):
    process, below = local("real")
    until(lambda: len(descendants(process.pid)) >= 2)  # papermill and its kernel
    below |= descendants(process.pid)
    process.kill()
    until(lambda: not any(map(alive, below)))
