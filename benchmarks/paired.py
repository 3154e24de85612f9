"""Two or more functions timed in turn, so that a noisy machine slows all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Ratio(NamedTuple):
    """How much longer one function took than the first, over rounds in which both ran."""

    name: str
    median: float
    low: float
    """Lower quartile of the per-round ratios."""
    high: float
    """Upper quartile."""
    seconds: float
    """Median time of one call."""


def compare(functions: Mapping[str, Callable[[], object]], rounds: int = 15) -> list[Ratio]:
    """Each function's time over the first one's, round by round; the order turns around every other round."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for number in range(rounds):
        names = list(functions) if number % 2 == 0 else list(functions)[::-1]
        for name in names:
            started = time.perf_counter()
            functions[name]()
            times[name].append(time.perf_counter() - started)
    base = next(iter(times.values()))
    results = []
    for name, taken in times.items():
        ratios = [mine / first for mine, first in zip(taken, base, strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        results.append(Ratio(name, median, low, high, statistics.median(taken)))
    return results


def table(title: str, results: list[Ratio]) -> str:
    """The comparison as text."""
    lines = [title, f"{'':44} {'ratio':>7} {'quartiles':>15} {'seconds':>9}"]
    for r in results:
        lines.append(f"{r.name:44} {r.median:7.3f} {f'{r.low:.3f}-{r.high:.3f}':>15} {r.seconds:9.3f}")
    return "\n".join(lines)
