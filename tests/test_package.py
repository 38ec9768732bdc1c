"""The package from outside: it imports, it equals the notebooks, and the notebooks are in order."""
import ast
import configparser
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from conftest import ROOT

NOTEBOOKS = sorted(path for path in (ROOT / "nbs").glob("*.ipynb") if not path.name.startswith("_"))
MODULES = sorted(path.stem for path in (ROOT / "facenb").glob("*.py") if not path.stem.startswith("_"))
STORIES = [path for path in NOTEBOOKS if re.match(r"5[1-9][a-z]?_|6|index", path.name)]


def cells(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def module_numbers() -> dict[str, str]:
    "Number of the notebook that each module is exported from"
    numbers = {}
    for path in NOTEBOOKS:
        source = "".join("".join(cell["source"]) + "\n" for cell in cells(path))
        for name in re.findall(r"^#\| default_exp (\w+)", source, re.M):
            assert name not in numbers, f"two notebooks export {name}: one would overwrite the other"
            numbers[name] = path.name.split("_")[0]  # "02" < "02a" < "03"
    return numbers


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    "The checkout without its environment and data"
    target = tmp_path_factory.mktemp("copy") / "facenb"
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(".venv", "data", ".git", "__pycache__"))
    return target


def differences(copy: Path, folder: str, pattern: str) -> list[str]:
    names = {path.name for root in (ROOT, copy) for path in (root / folder).glob(pattern)}
    read = lambda path: path.read_bytes() if path.exists() else None
    return sorted(name for name in names if read(ROOT / folder / name) != read(copy / folder / name))


def run(tool: str, folder: Path) -> None:
    done = subprocess.run([Path(sys.executable).parent / tool], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_notebook_of_the_layout_is_there():
    names = {path.stem for path in NOTEBOOKS}
    assert {"00_runs", "02_store", "05_faces", "06_sampler", "10_backbones", "20_losses", "30_loop", "40_embed",
            "41_verify", "50_plots", "51_main", "train", "index"} <= names


def test_every_module_imports_alone():
    done = subprocess.run([sys.executable, ROOT / "tests" / "alone.py"], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert sorted(errors) == MODULES
    assert not (failed := {module: error for module, error in errors.items() if error}), failed


def test_modules_import_only_from_lower_numbers():
    numbers = module_numbers()
    assert set(MODULES) == set(numbers)
    for module in MODULES:
        for node in ast.walk(ast.parse((ROOT / "facenb" / f"{module}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                assert numbers[node.module] < numbers[module], f"{module} imports {node.module}"
                assert [alias.name for alias in node.names] != ["*"], f"{module} imports everything from {node.module}"


def test_verification_depends_on_nothing_of_facenb():
    tree = ast.parse((ROOT / "facenb" / "verify.py").read_text())
    assert [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level] == []


def test_export_gives_the_committed_package(copy):
    run("nbdev_export", copy)
    assert differences(copy, "facenb", "*.py") == [], "run: make export"


def test_notebooks_are_clean(copy):
    run("nbdev_clean", copy)
    assert differences(copy, "nbs", "*.ipynb") == [], "run: make export"


def test_only_stories_carry_outputs_and_small_ones():
    for path in NOTEBOOKS:
        outputs = [cell["outputs"] for cell in cells(path) if cell["cell_type"] == "code" and cell["outputs"]]
        assert bool(outputs) == (path in STORIES), path.name
        assert path.stat().st_size < 200_000, path.name


def test_parameters_cell_is_tagged_and_agrees_with_what_is_checked():
    from facenb.params import TRAIN
    tagged = [cell for cell in cells(ROOT / "nbs" / "train.ipynb") if "parameters" in cell["metadata"].get("tags", [])]
    assert len(tagged) == 1
    lines = [line for line in "".join(tagged[0]["source"]).splitlines() if line]
    given = {}
    for line in lines:
        name, value, comment = re.fullmatch(r"(\w+) = (.+?)  # (.+)", line).groups()
        given[name] = TRAIN[name].check(name, ast.literal_eval(value))
        missing = [choice for choice in TRAIN[name].choices if choice not in comment]
        assert not missing, f"the comment of {name} does not mention {missing}"
    assert list(given) == list(TRAIN)


def test_no_paths_or_hosts_of_a_machine():
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
    if not tracked[0]:
        pytest.skip("not a git checkout")
    texts = [path for path in tracked if path and not path.endswith(".png") and path != "LICENSE"]
    pattern = re.compile(r"(?<![\w.])/(home|root|work|Users|scratch)/\w|https?://[\w.-]*(pypi|jfrog|nexus|artifact)[\w.-]*/simple")
    assert [path for path in texts if pattern.search((ROOT / path).read_text(encoding="utf-8"))] == []


def test_package_lines_are_short():
    for path in (ROOT / "facenb").glob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            generated = path.name == "_modidx.py" or number < 12 and "'" in line
            assert generated or len(line) <= 110, f"{path.name}:{number}"


def test_settings_are_the_one_place():
    ini = configparser.ConfigParser(delimiters=["="])
    ini.read(ROOT / "settings.ini")
    facts = ini["DEFAULT"]
    import facenb
    assert facenb.__version__ == facts["version"]
    assert f"version: {facts['version']}" in (ROOT / "CITATION.cff").read_text()
    assert facts["tst_flags"] == "slow gpu" and facts["allowed_cell_metadata_keys"] == "tags"


def test_lock_pins_everything_that_settings_ask_for():
    lines = [line.strip() for line in (ROOT / "requirements.lock").read_text().splitlines()]
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"==[^*]+", str(pin.specifier)) and pin.url is None for pin in pins)
    version = {canonicalize_name(pin.name): str(pin.specifier)[2:] for pin in pins}
    ini = configparser.ConfigParser(delimiters=["="])
    ini.read(ROOT / "settings.ini")
    for line in (ini["DEFAULT"]["requirements"] + " " + ini["DEFAULT"]["dev_requirements"]).split():
        wanted = Requirement(line)
        assert wanted.specifier.contains(version[canonicalize_name(wanted.name)]), line


def test_a_second_make_installs_nothing():
    if not (ROOT / ".venv" / ".ready").exists():
        pytest.skip("the environment was not made by make")
    say = lambda *more: subprocess.run(["make", "-n", "test", *more], cwd=ROOT, capture_output=True, text=True).stdout
    assert "pip install" not in say()
    assert "pip install" in say("--what-if=requirements.lock")
