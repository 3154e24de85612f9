"""Ratios are taken round by round, and the order turns around, so that a slow spell hits all alike."""

import json

from benchmarks.paired import clocked, measure, ratio, spread
from benchmarks.report import Report, Row, Table


def test_ratios_pair_rounds() -> None:
    slow_machine = [1.0, 10.0, 2.0]
    assert ratio([2 * s for s in slow_machine], slow_machine) == (2.0, 2.0, 2.0)
    assert spread([4.0, 1.0, 3.0, 2.0, 5.0]) == (3.0, 1.5, 4.5)


def test_every_other_round_runs_backwards() -> None:
    order: list[str] = []

    def call(name: str) -> float:
        order.append(name)
        return float(len(order))

    times = measure({name: lambda name=name: call(name) for name in "abc"}, rounds=3)
    assert "".join(order) == "abccbaabc"
    assert times == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}


def test_a_clock_sees_what_runs() -> None:
    seen: list[int] = []
    assert clocked(lambda: seen.extend(range(200_000)))() > 1e-5
    assert len(seen) == 200_000


def test_the_report_says_the_same_to_people_and_programs() -> None:
    row = Row("one_over_two", "one thing", ratio([1.0, 1.0, 3.0, 1.0], [2.0] * 4), "5 ms")
    report = Report("made_up", "Title", [Table("Time over another's", [row])], ["A note."], {"seconds": 3})
    lines = report.text().splitlines()
    assert lines[0] == "Title" and lines[-1] == "A note."
    assert lines[2].split() == ["one", "thing", "0.500", "0.500-1.250", "5", "ms"]
    assert json.loads(report.json()) == {
        "benchmark": "made_up",
        "one_over_two": 0.5,
        "quartiles": {"one_over_two": [0.5, 1.25]},
        "seconds": 3,
    }
