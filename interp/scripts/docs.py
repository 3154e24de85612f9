"""`python -m interp.scripts.docs [--check]`: the generated pages of docs/, written anew or checked for drift."""

import sys
from dataclasses import dataclass
from pathlib import Path

from interp.scripts.console import run_command, say

DOCS = Path(__file__).parents[2] / "docs"


@dataclass
class Docs:
    """Write the generated pages; with --check only compare, exit status 1 where a page is out of date."""

    check: bool = False
    """Compare with what is on disk and write nothing."""


def run(config: Docs) -> int:
    """Every generated page."""
    from interp.files import atomic_path

    stale = []
    for name, text in pages().items():
        path = DOCS / name
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if config.check:
            stale.append(name)
            continue
        with atomic_path(path) as beside:
            beside.write_text(text, encoding="utf-8")
        say(f"Wrote docs/{name}.")
    if stale:
        say(f"Out of date: {', '.join(f'docs/{name}' for name in stale)}; run `make docs`.")
    return 1 if stale else 0


def pages() -> dict[str, str]:
    """Generated pages by file name."""
    return {"points.md": points_page()}


def points_page() -> str:
    """The table of points and other tools' names for them."""
    from interp.names import TOOLS, names_of
    from interp.points import POINTS, Address
    from interp.points import table as definitions

    notation = (definitions.__doc__ or "").split("\n\n", 1)[1].strip()
    lines = [
        "# Points",
        "",
        "Generated from the point table; `make docs` writes it anew.",
        "",
        notation,
        "",
        "An address is a point and a layer: `mlp_out_post.4`; a head where there are heads: `z.3.head-2`.",
        "`*_post` is safe on every family: without a norm behind the sublayer it is the raw tensor itself.",
        "`interp points MODEL` says which of these a model has, where, and which proofs they passed.",
        "",
        "| point | shape per token | meaning | written | proof |",
        "|---|---|---|---|---|",
    ]
    for point in POINTS.values():
        written = "yes" if point.writable else "no"
        lines.append(f"| `{point.name}` | {point.shape_text} | {point.meaning} | {written} | {point.proof} |")
    lines += [
        "",
        "## Names in other tools that mean the same on every family",
        "",
        "All others depend on the model: `interp names NAME --model MODEL` translates them, `docs/names.md` says why.",
        "",
        "| point | tool | names |",
        "|---|---|---|",
    ]
    layer = 4321
    for point in POINTS.values():
        for tool, title in TOOLS.items():
            names = names_of(Address(point.name, layer if point.per_layer else None), tool)
            spelled = ", ".join(f"`{name.replace(str(layer), 'N')}`" for name in names)
            lines += [f"| `{point.name}` | {title} | {spelled} |"] if names else []
    return "\n".join(lines) + "\n"


def main() -> None:
    """Entry point."""
    run_command(Docs, run, "python -m interp.scripts.docs")


if __name__ == "__main__":
    sys.exit(main())
