"""`interp demo --quick` in an empty folder, then once more through `make demo`: two runs for every test that asks."""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from interp.models.checkpoint import resolve

ROOT = Path(__file__).parent.parent
SCRIPTS = Path(sys.executable).parent


@dataclass(frozen=True)
class Run:
    """A finished command."""

    status: int
    out: str
    err: str
    seconds: float
    crowd: float
    """Load average when it ended, per core: above 1, somebody waits."""


@dataclass(frozen=True)
class QuickDemo:
    """Both runs and the folder that they wrote to."""

    folder: Path
    first: Run
    written: dict[Path, int]
    """Files below `folder` after the first run, and when each was written, in nanoseconds."""
    again: Run

    @property
    def transcoders(self) -> Path:
        (folder,) = (self.folder / "transcoders-quick").iterdir()
        return folder


def environment() -> dict[str, str]:
    """This one with the installed commands in front, and without the variables of a `make` around the tests."""
    kept = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return kept | {"PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "200"}


def execute(command: list[str], folder: Path) -> Run:
    """Run one command in `folder`."""
    started = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    seconds = time.perf_counter() - started
    return Run(done.returncode, done.stdout, done.stderr, seconds, os.getloadavg()[0] / (os.cpu_count() or 1))


@cache
def run_quick_demo() -> QuickDemo:
    """Train the dictionaries and trace, then trace again with `make demo`, which finds the dictionaries.

    The model is fetched and converted before: its time, once per machine, is no part of what is measured.
    """
    resolve("gemma-3-270m", lambda line: None)
    place = Path(tempfile.mkdtemp(prefix="interp-demo-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    first = execute(["interp", "demo", "--quick"], place)
    folder = place / "demo"
    written = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    # The environment that runs the tests is the one that `setup` would make, so make takes it as made (-o).
    arguments = f"ARGS=--quick --output-dir '{folder}'"
    again = execute(["make", "-o", ".venv/.setup-done", "demo", arguments], ROOT)
    return QuickDemo(folder, first, written, again)
