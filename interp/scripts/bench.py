"""`interp bench NAME [--json]`: tables of ratios, measured in turn on this machine; works in a checkout."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

CHECKOUT = Path(__file__).parents[2]
"""Where `benchmarks/` lies beside the package; a wheel does not hold it."""


@dataclass
class Bench:
    """Measure ratios of speed and memory against other tools, and print them with their spread."""

    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """capture (seconds) or generate (about ten minutes); all of them if left out."""
    json: bool = False
    """Print one line of JSON behind each table."""


def run(config: Bench) -> int:
    """The status of the benchmarks' own process, which nothing else runs in."""
    from interp.errors import UserError

    if not (CHECKOUT / "benchmarks" / "__main__.py").is_file():
        raise UserError(
            "The benchmarks are no part of the installed package: clone the repository and run `make bench` there."
        )
    command = [sys.executable, "-m", "benchmarks", *config.names, *(["--json"] if config.json else [])]
    return subprocess.run(command, cwd=CHECKOUT).returncode
