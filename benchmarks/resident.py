"""How much memory this process holds and has held at most: resident pages, in bytes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""What the kernel takes in clear_refs as the order to start the peak anew (man 5 proc)."""
EVERY = 0.001
"""Seconds between two samples where the kernel does not keep the peak."""


@dataclass
class Peak:
    """The most that was held inside the context; 0 until it ends."""

    bytes: int = 0
    measured: str = ""
    """By whom: the kernel, which misses nothing, or samples."""


def held() -> int:
    """Resident bytes now."""
    return psutil.Process().memory_info().rss


@contextmanager
def peak() -> Iterator[Peak]:
    """Watch what the process holds inside the context."""
    found = Peak()
    try:
        CLEAR.write_text(RESET_PEAK)
    except OSError:
        with _sampled(found):
            yield found
        return
    yield found
    found.bytes, found.measured = _high_water(), "kernel"


def _high_water() -> int:
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


@contextmanager
def _sampled(found: Peak) -> Iterator[None]:
    found.bytes, found.measured = held(), f"samples every {EVERY * 1000:.0f} ms"
    done = threading.Event()

    def watch() -> None:
        while not done.wait(EVERY):
            found.bytes = max(found.bytes, held())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with suppress(psutil.Error):
            found.bytes = max(found.bytes, held())
