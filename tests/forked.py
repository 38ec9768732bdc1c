"""Processes that have the libraries at once: forked from one that imports them, once, and does nothing else.

`run(code, ...)` is `subprocess.run([sys.executable, "-c", code, ...])` without the seconds that torch takes to import.
What must hold in an interpreter that nothing was imported in, or whatever its hash seed, is no test for it.
"""
import functools
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

LIBRARIES = ["papermill.cli", "execnb.shell", "torch", "timm", "transformers", "accelerate", "peft", "seaborn", "sklearn.datasets", "cv2", "lmdb"]


def run(code: str, *arguments, cwd=None, env=None, timeout: int = 300) -> subprocess.CompletedProcess:
    "Runs Python code; after `timeout` seconds its process is killed by SIGALRM"
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, name) for name in ("stdout", "stderr")]
        job = {"code": code, "arguments": [*map(str, arguments)], "cwd": str(cwd or os.getcwd()), "timeout": timeout,
               "env": {**(os.environ if env is None else env)}, "said": [*map(str, said)]}
        server().stdin.write(json.dumps(job) + "\n")
        server().stdin.flush()
        status = int(server().stdout.readline())
        return subprocess.CompletedProcess(code, status, *(path.read_text() for path in said))


@functools.cache
def server() -> subprocess.Popen:
    "It ends when this process does, which closes its input"
    return subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def serve() -> str:
    "Answers every job with the exit status of a child; in the child, returns its code"
    import signal
    for name in LIBRARIES:
        importlib.import_module(name)
    assert "facenb" not in sys.modules  # it is the children's to import
    gc.collect(), gc.freeze()  # or each child spends seconds on tidying up what it never used
    for line in iter(sys.stdin.readline, ""):
        job = json.loads(line)
        if child := os.fork():
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            continue
        signal.alarm(job["timeout"])
        for number, path in enumerate([os.devnull, *job["said"]]):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
        os.environ.clear(), os.environ.update(job["env"]), os.chdir(job["cwd"])
        sys.argv, sys.path[0] = ["-c", *job["arguments"]], ""
        return job["code"]
    sys.exit()


def papermill() -> None:
    "papermill's command, its cells in this process instead of a kernel's"
    from execnb.shell import CaptureShell
    from nbformat import from_dict
    from papermill.cli import papermill as command
    from papermill.engines import Engine, papermill_engines

    class Here(Engine):
        @classmethod
        def execute_managed_notebook(cls, manager, kernel_name, **options):
            shell = CaptureShell()
            for index, cell in enumerate(manager.nb.cells):
                manager.cell_start(cell, index)
                if cell.cell_type == "code":
                    cell.outputs = [from_dict(joined(output)) for output in shell.run(cell.source)]
                    if shell.exc:
                        return manager.cell_exception(cell, index)
                manager.cell_complete(cell, index)

    def joined(output: dict) -> dict:
        "As in memory, where a kernel's text is one string"
        text = {"text": "".join(output["text"])} if "text" in output else {}
        data = {kind: "".join(value) if isinstance(value, list) else value for kind, value in output.get("data", {}).items()}
        return output | text | ({"data": data} if data else {})

    papermill_engines.register("here", Here)
    command([*sys.argv[1:], "--engine", "here"])


if __name__ == "__main__":
    sys.modules["forked"] = sys.modules["__main__"]
    exec(compile(serve(), "<string>", "exec"), {"__name__": "__main__"})
