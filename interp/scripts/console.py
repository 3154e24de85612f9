"""What commands share on the terminal: one console, progress bars, and errors as one sentence with exit status 2."""

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from rich.console import Console, ConsoleDimensions
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from interp.errors import InterpError, PointRefused

Config = TypeVar("Config")
WIDE = 200
"""Columns in a file or a pipe, which have no width of their own: a table that is folded cannot be searched there."""


class _Console(Console):
    """Asks how wide it is whenever it prints: `COLUMNS`, else the terminal, else `WIDE`."""

    @property
    def size(self) -> ConsoleDimensions:
        columns, found = os.environ.get("COLUMNS", ""), super().size
        if columns.isdigit():
            return found._replace(width=int(columns))
        return found if self.is_terminal else found._replace(width=WIDE)


console = _Console(highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """One line of plain text."""
    console.print(escape(text))


def run_command(config_type: type[Config], run: Callable[[Config], int | None], prog: str) -> None:
    """Parse the flags of one command, run it, and exit with its status."""
    import tyro

    finish(run, tyro.cli(config_type, prog=prog))


def finish(run: Callable[[Config], int | None], config: Config) -> None:
    """Run a command; an `InterpError` becomes one sentence on stderr and exit status 2."""
    quiet_libraries()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        status = run(config) or 0
    except InterpError as error:
        print(  # noqa: T201
            f"{type(error).__name__}: {error}" if isinstance(error, PointRefused) else str(error),
            file=sys.stderr,
        )
        status = 2
    except KeyboardInterrupt:
        print("Interrupted; finished parts are kept.", file=sys.stderr)  # noqa: T201
        status = 130
    sys.exit(status)


def _terminate(number: int, frame: object) -> None:
    """End as Ctrl-C does, so that what is half done is cleared away."""
    raise KeyboardInterrupt


def check_output(folder: Path) -> None:
    """`UserError` where nothing can be written to `folder`. A folder made for the proof goes again.

    So that bad input, which may show only after a model is loaded, leaves nothing behind.
    """
    from interp.files import check_writable

    made = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    check_writable(folder)
    for path in made:
        with suppress(OSError):
            path.rmdir()


def quiet_libraries() -> None:
    """Libraries' own progress bars and warnings stay off; what matters we say ourselves."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)


@contextmanager
def bars() -> Iterator[Callable[[str, int, int, str], None]]:
    """Progress by stage: call the result with (stage, done, total, unit). Bars on a terminal, a few lines elsewhere."""
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (TextColumn("  {task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[unit]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def update(stage: str, done: int, total: int, unit: str) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total, unit=unit)
            progress.update(tasks[stage], completed=done, total=total, visible=done < total)

        yield update


class _Lines:
    """Progress in a file or a pipe: a line every few seconds."""

    EVERY = 10.0
    """Seconds between two lines, at least."""

    def __init__(self) -> None:
        self.said = time.monotonic()

    def __call__(self, stage: str, done: int, total: int, unit: str) -> None:
        if time.monotonic() - self.said >= self.EVERY:
            self.said = time.monotonic()
            say(f"  {stage}: {done:,} of {total:,} {unit}")
