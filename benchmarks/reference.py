"""The reference engine, interp-engine: a worker process in an environment of its own, asked once per round."""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from interp.errors import UserError

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".peers" / "interp_engine" / "bin" / "python"
WORKER = Path(__file__).with_name("reference_worker.py")


class Worker:
    """A loaded reference engine."""

    def __init__(self, orders: IO[str], answers: IO[str]) -> None:
        self._orders, self._answers = orders, answers

    def generate(self, prompts: Sequence[Sequence[int]], point: str, new: int) -> dict[str, Any]:
        """`seconds` for all callers together, and per caller its new `tokens` and the `shapes` of what was captured."""
        print(json.dumps({"prompts": prompts, "point": point, "new": new}), file=self._orders, flush=True)
        return self.read()

    def read(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise UserError("The reference engine's process ended; what it said stands above.")
        return json.loads(line)


@contextmanager
def worker(folder: Path) -> Iterator[Worker]:
    """The reference engine with the model in `folder` loaded. Raises `UserError` where it has no environment."""
    if not PYTHON.exists():
        raise UserError("interp-engine has no environment: `make bench` creates it.")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [str(PYTHON), "-P", str(WORKER), str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            found = Worker(process.stdin, process.stdout)
            found.read()
            yield found
        finally:
            process.kill()
