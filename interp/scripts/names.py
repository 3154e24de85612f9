"""`interp names NAME [--model MODEL] [--to TOOL]`: what other tools call a place, and what their names mean here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from interp.scripts.console import console, say
from interp.scripts.loading import Loading

if TYPE_CHECKING:
    from interp.names import Answer, Layout


@dataclass
class Names(Loading):
    """Translate a name between interp and other tools, or say why there is no faithful equivalent."""

    name: Annotated[str, tyro.conf.Positional]
    """An address such as mlp_out_post.4, or another tool's name such as blocks.4.hook_mlp_out or "model.layers.4.mlp
    output"."""
    model: str | None = None
    """Packaged name, checkpoint directory, GGUF file or hub id; without one only what holds on every family is told."""
    to: str | None = None
    """interp, transformer_lens, transformer_lens_legacy, nnsight, nnterp, hf, sae_lens, sparsify, dictionary_learning,
    gemma_scope, circuit_tracer or hooks; all of them if left out."""
    source: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """The tool whose name it is; found out if left out."""


def run(config: Names) -> None:
    """Print the translations; a refusal is one sentence and exit status 2."""
    from interp.errors import UserError
    from interp.names import TOOLS, meanings, spell

    for tool in (config.to, config.source):
        if tool is not None and tool != "interp" and tool not in TOOLS:
            raise UserError(f"No tool is called {tool!r} here; known: interp, {', '.join(TOOLS)}.")
    layout = None
    if config.model is not None:
        layout = config.load(config.model, report=lambda text: None).layout
    found = meanings(config.name, config.source, layout)
    if config.to is None:
        _print_all(config.name, found, layout)
    elif len({answer.address for answer in found.values()}) > 1:
        each = "; ".join(f"{answer.address} with --from {tool}" for tool, answer in found.items())
        raise UserError(f"{config.name!r} has more than one meaning: {each}.")
    elif config.to == "interp":
        answer = next(iter(found.values()))
        say(_with_note(str(answer.address), answer.note))
    else:
        address = next(iter(found.values())).address
        for spelling in spell(address, config.to, layout):
            say(_with_note(spelling.name, spelling.note))


def _with_note(name: str, note: str) -> str:
    return f"{name}  ({note})" if note else name


def _print_all(name: str, found: "Mapping[str, Answer]", layout: "Layout | None") -> None:
    """The meaning, or each of them, and every tool's names for it."""
    from rich.markup import escape
    from rich.table import Column, Table

    from interp.names import TOOLS, NameRefused, spell
    from interp.points import POINTS

    for address in dict.fromkeys(answer.address for answer in found.values()):
        tools = [tool for tool, answer in found.items() if answer.address == address]
        by = ", ".join(TOOLS[tool] for tool in tools if tool in TOOLS)
        note = next((found[tool].note for tool in tools if found[tool].note), "")
        where = f" on {layout.model}" if layout is not None else ""
        say(_with_note(f"{name} is {address}{where}{f', as a name of {by}' if by else ''}", note))
        say(f"  {POINTS[address.name].meaning}; per token {POINTS[address.name].shape_text}")
        if layout is not None:
            say(f"  at {layout.where[address.whole]}")
        table = Table(Column("tool", no_wrap=True), Column("name", overflow="fold"), Column("note", overflow="fold"))
        for tool, title in TOOLS.items():
            try:
                spellings = [(spelling.name, spelling.note) for spelling in spell(address, tool, layout)]
            except NameRefused as error:
                spellings = [("-", str(error).partition("; ")[2])]
            for row, (spelled, remark) in enumerate(spellings):
                table.add_row("" if row else title, escape(spelled), escape(remark))
        console.print(table)
