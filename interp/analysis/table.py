"""How results are printed: plain text in columns."""

from collections.abc import Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table
from rich.text import Text


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A title and right-aligned columns, of which the first is aligned left."""
    drawn = Table(box=None, pad_edge=False)
    for number, name in enumerate(header):
        drawn.add_column(Text(name), justify="right" if number else "left", no_wrap=True)
    for row in rows:
        drawn.add_row(*map(Text, row))
    out = StringIO()
    Console(file=out, width=100_000, color_system=None).print(drawn)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return "\n".join([title, *lines])
