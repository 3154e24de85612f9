"""`interp points MODEL`: every point, whether it can be read and written or why not, where it lives, its proof."""

import re
from dataclasses import dataclass
from typing import Annotated

import tyro

from interp.scripts.console import console, say
from interp.scripts.loading import Loading


@dataclass
class Points(Loading):
    """Print the table of points of a model, proven on it."""

    model: Annotated[str, tyro.conf.Positional]
    """Packaged name, checkpoint directory, GGUF file or hub id."""
    engine: str = "auto"
    """auto, eager or nnsight; docs/engines.md says what each serves."""


def run(config: Points) -> None:
    """Print one row per point and distinct answer, with the layers that give it."""
    from rich.markup import escape
    from rich.table import Column, Table

    from interp.points import POINTS

    engine = config.load(config.model, engine=config.engine)
    table = Table(
        Column("point", no_wrap=True),
        "layers",
        "",
        Column("where", overflow="fold"),
        Column("shape per token", overflow="fold"),
        "proof",
        title=f"{engine.model.name}, {engine.model.family}",
    )
    for point in POINTS.values():
        for layers, (mark, where) in _answers(engine, point.name, point.per_layer).items():
            table.add_row(point.name, layers, mark, escape(where), point.shape_text, point.proof if mark != "-" else "")
    console.print(table)
    say("r: readable, w: writable, -: refused for the reason that follows.")


def _answers(engine, name: str, per_layer: bool) -> dict[str, tuple[str, str]]:
    """By layers as text: what can be done and where, or why nothing can."""
    from interp.models.anatomy import Refusal
    from interp.points import Address

    groups: dict[tuple[str, str], list[int]] = {}
    for layer in range(engine.model.n_layers) if per_layer else [None]:
        address = Address(name, layer)
        support, tap = engine.support(address), engine.anatomy.tap(address)
        if isinstance(tap, Refusal):
            nearest = f"; nearest: {', '.join(tap.nearest)}" if tap.nearest else ""
            answer = ("-", support.reason + _without_layer(nearest, layer, everywhere=True))
        else:
            where = f"{tap.path or 'model'} {tap.side}" + (f", {tap.transform}" if tap.transform else "")
            answer = ("rw" if support.writable else "r", _without_layer(where, layer))
        groups.setdefault(answer, []).append(-1 if layer is None else layer)
    return {"" if layers == [-1] else _ranges(layers): answer for answer, layers in groups.items()}


def _without_layer(text: str, layer: int | None, *, everywhere: bool = False) -> str:
    """The layer's number as N, once in a path or everywhere in addresses: layers that answer alike share a row."""
    return text if layer is None else re.sub(rf"(?<=\.){layer}(?=[.,\s]|$)", "N", text, count=0 if everywhere else 1)


def _ranges(layers: list[int]) -> str:
    """`0-4, 6` for [0, 1, 2, 3, 4, 6]."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][-1] + 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
