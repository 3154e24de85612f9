"""Two or more things timed in turn, so that a noisy machine slows all of them alike, and compared round by round."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Times = dict[str, list[float]]
"""Seconds by name, one per round."""


class Spread(NamedTuple):
    """What lies in the middle of several rounds."""

    median: float
    low: float
    """Lower quartile."""
    high: float
    """Upper quartile."""


def clocked(function: Callable[[], object]) -> Callable[[], float]:
    """The same, giving the seconds that it took."""

    def timed() -> float:
        started = time.perf_counter()
        function()
        return time.perf_counter() - started

    return timed


def measure(timed: Mapping[str, Callable[[], float]], rounds: int) -> Times:
    """Seconds of each, once per round; every other round runs backwards. Warm up before."""
    times: Times = {name: [] for name in timed}
    for number in range(rounds):
        for name in list(timed) if number % 2 == 0 else list(timed)[::-1]:
            times[name].append(timed[name]())
    return times


def ratio(over: Sequence[float], under: Sequence[float]) -> Spread:
    """`over` by `under`, round by round."""
    return spread([a / b for a, b in zip(over, under, strict=True)])


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles."""
    low, median, high = statistics.quantiles(values, n=4)
    return Spread(median, low, high)
