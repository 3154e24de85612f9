"""What long work tells whoever watches it."""

from collections.abc import Callable
from typing import NamedTuple


class Progress(NamedTuple):
    """One report; a stage begins with done = 0 and ends with done = total."""

    stage: str
    """What is being done, in a few words: `harvest`, `layer 3`."""
    done: int
    """Units finished."""
    total: int
    """Units of the whole stage."""
    unit: str = "tokens"
    """What is counted."""


ProgressCallback = Callable[[Progress], None]


def ignore(_: Progress) -> None:
    """For callers that do not watch."""
