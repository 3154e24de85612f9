"""What a benchmark found: ratios with their spread, as tables to read and as one JSON object."""

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks.paired import Spread


class Row(NamedTuple):
    """One ratio."""

    key: str
    """Its name in the JSON object, such as `one_tap_over_plain`."""
    text: str
    """What is compared with what."""
    ratio: Spread
    amount: str = ""
    """What one call took or gave, with its unit."""


class Table(NamedTuple):
    """Ratios of one kind."""

    unit: str
    """What the ratios are ratios of, and which direction is good."""
    rows: list[Row]


@dataclass
class Report:
    """Tables, and what else is to be said about them."""

    benchmark: str
    title: str
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """Further entries of the JSON object."""

    def text(self) -> str:
        """The tables."""
        lines = [self.title]
        for table in self.tables:
            width = max(len(table.unit), *(len(row.text) for row in table.rows)) + 2
            lines.append(f"{table.unit:{width}}{'median':>7} {'quartiles':>13}")
            for row in table.rows:
                median, low, high = row.ratio
                lines.append(f"{row.text:{width}}{median:7.3f} {f'{low:.3f}-{high:.3f}':>13}  {row.amount}".rstrip())
        return "\n".join([*lines, *self.notes])

    def json(self) -> str:
        """One line: every ratio's median by its key, quartiles under `quartiles`, and the facts."""
        rows = [row for table in self.tables for row in table.rows]
        medians = {row.key: round(row.ratio.median, 4) for row in rows}
        quartiles = {row.key: [round(row.ratio.low, 4), round(row.ratio.high, 4)] for row in rows}
        return json.dumps({"benchmark": self.benchmark, **medians, "quartiles": quartiles, **self.facts})
