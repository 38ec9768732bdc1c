"""`python tests/alone.py`: imports every module of facenb as the first of its process; prints the error of each or null, as JSON.

An interpreter for each would import torch dozens of times. Modules that import the same libraries share a process in which
nothing but these was imported, and which forks for each: what a module needs and does not import itself stays missing.
"""
import ast
import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "facenb"


def imports(statements: list) -> list[tuple[int, str]]:
    "Level and module of what is imported when these statements run; functions do not run"
    found = []
    for statement in statements:
        if isinstance(statement, ast.Import):
            found += [(0, alias.name) for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            found.append((statement.level, statement.module or ""))
        elif not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found += imports([*getattr(statement, "body", []), *getattr(statement, "orelse", []), *getattr(statement, "finalbody", [])])
    return found


def libraries(module: str) -> set[str]:
    "Those that a module imports, and its own modules import for it"
    found = imports(ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8")).body)
    own = {name for level, name in found if level}
    outside = {name for level, name in found if not level and name.split(".")[0] not in sys.stdlib_module_names}
    return outside.union(*map(libraries, own))


def in_a_child(function):
    "What a function returns, or the error that it raises, in a process of its own"
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            said = function()
        except BaseException:
            said = traceback.format_exc()
        with open(write, "w") as file:
            json.dump(said, file)
            file.flush()
            os._exit(0)
    os.close(write)
    with open(read) as file:
        said = json.load(file)
    os.waitpid(child, 0)
    return said


def outcomes(needs: dict[str, list[str]], known: int = 0) -> dict:
    "The error of each module or None; all need the same first `known` libraries, and these are imported"
    found, groups = {}, {}
    for module, names in needs.items():
        if len(names) > known:
            groups.setdefault(names[known], {})[module] = names
        else:
            found[module] = in_a_child(lambda: importlib.import_module(f"facenb.{module}") and None)
    for library, group in groups.items():
        def deeper():
            importlib.import_module(library)
            gc.freeze()
            return outcomes(group, known + 1)
        said = in_a_child(deeper)
        found |= said if isinstance(said, dict) else dict.fromkeys(group, said)
    return found


if __name__ == "__main__":
    needed = {path.stem: libraries(path.stem) for path in PACKAGE.glob("*.py") if not path.stem.startswith("_")}
    every = [name for names in needed.values() for name in names]
    order = sorted(set(every), key=lambda name: (-every.count(name), name))  # what most need comes first
    json.dump(outcomes({module: sorted(names, key=order.index) for module, names in needed.items()}), sys.stdout)
