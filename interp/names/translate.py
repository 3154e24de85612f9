"""Translation in both directions: what a tool's name means, and what a tool calls a point.

A name is handed out only if it reads back as the very Address that was asked for, so the two directions cannot differ.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from interp.errors import UserError
from interp.names import dictionaries, hooks, modules, transformer_lens
from interp.names.answer import Answer, NameRefused, Spelling, served
from interp.names.layout import Layout
from interp.points import POINTS, Address
from interp.points.table import nearest_names


class Tool(NamedTuple):
    """One tool's dialect."""

    title: str
    read: Callable[[str, Layout | None], Answer]
    names: Callable[[Address, Layout | None], Iterator[str]]
    """Names that may mean an Address; each is read back before it is used."""


DIALECTS = {
    "transformer_lens": Tool(
        "TransformerLens", transformer_lens.read_bridge, lambda a, layout: transformer_lens.hooks_bridge(a.layer)
    ),
    "transformer_lens_legacy": Tool(
        "TransformerLens 2.x", transformer_lens.read_legacy, lambda a, layout: transformer_lens.hooks_legacy(a.layer)
    ),
    "nnsight": Tool("nnsight", modules.read_nnsight, modules.nnsight_names),
    "nnterp": Tool("nnterp", modules.read_nnterp, modules.nnterp_names),
    "hf": Tool("Hugging Face", modules.read_hf, modules.hf_names),
    "sae_lens": Tool("SAELens", dictionaries.read_sae_lens, dictionaries.sae_lens_names),
    "sparsify": Tool("sparsify", modules.read_sparsify, modules.sparsify_names),
    "dictionary_learning": Tool(
        "dictionary_learning", modules.read_dictionary_learning, modules.dictionary_learning_names
    ),
    "gemma_scope": Tool("Gemma Scope", dictionaries.read_gemma_scope, dictionaries.gemma_scope_names),
    "circuit_tracer": Tool("circuit-tracer", dictionaries.read_circuit_tracer, dictionaries.circuit_tracer_names),
    "hooks": Tool("hook names by group", hooks.read, hooks.names),
}
TOOLS = {tool: dialect.title for tool, dialect in DIALECTS.items()}


def read(name: str, tool: str, layout: Layout | None = None) -> Answer:
    """What `tool` calls `name`, on the model of `layout` or on every family.

    Raises `NameRefused` with the reason and the nearest points where it has no faithful equivalent.
    """
    return _dialect(tool).read(name.strip(), layout)


def point_of(name: str, tool: str, layout: Layout | None = None) -> Address:
    """The Address that `tool` calls `name`; see `read`, which also says how shapes differ."""
    return read(name, tool, layout).address


def spell(address: Address | str, tool: str, layout: Layout | None = None) -> list[Spelling]:
    """Every name that `tool` has for `address`, the usual one first. Raises `NameRefused` where it has none."""
    address, dialect = Address.parse(address), _dialect(tool)
    if layout is not None and address.whole not in layout.where:
        reason = layout.refused.get(address.whole, f"it has layers 0 to {len(layout.blocks) - 1}")
        raise NameRefused(f"{address} does not exist on {layout.model}: {reason}.")
    found = _spellings(address, dialect, layout)
    if not found:
        raise NameRefused(_no_name(address, tool, layout))
    return found


def _spellings(address: Address, dialect: Tool, layout: Layout | None) -> list[Spelling]:
    exact, same = [], []
    for name in dialect.names(address, layout):
        try:
            answer = dialect.read(name, layout)
        except NameRefused:
            continue
        if answer.address == address:
            exact.append(Spelling(name, answer.note))
        elif address in answer.also:
            note = f"on this model the same tensor as {answer.address}"
            same.append(Spelling(name, f"{note}; {answer.note}" if answer.note else note))
    return exact or same


def names_of(address: Address | str, tool: str, layout: Layout | None = None) -> list[str]:
    """Every name that `tool` has for `address`; empty where it has none (`spell` says why)."""
    return [spelling.name for spelling in _spellings(Address.parse(address), _dialect(tool), layout)]


def meanings(name: str, tool: str | None = None, layout: Layout | None = None) -> dict[str, Answer]:
    """What `name` means, by every tool whose name it may be: an Address is `interp`'s own.

    Raises `NameRefused` with the reason of the tool whose dialect it looks like, `UserError` where it looks like none.
    """
    if tool not in (None, "interp"):
        return {tool: read(name, tool, layout)}
    if tool is None:
        tools = ("interp", *DIALECTS)
        found = {other: answer for other in tools if (answer := _understood(name, other, layout)) is not None}
        if found:
            return found
        if (likely := _looks_like(name)) is not None:
            read(name, likely, layout)
    return {"interp": _own(name, layout)}


def _own(name: str, layout: Layout | None) -> Answer:
    return served(layout, name, Answer(Address.parse(name)))


def _understood(name: str, tool: str, layout: Layout | None) -> Answer | None:
    try:
        return _own(name, layout) if tool == "interp" else read(name, tool, layout)
    except UserError:
        return None


_LOOKS = {
    r"(\S*\.)?(layers|attentions|mlps)_(input|output)\[.*|attention_probabilities.*": "nnterp",
    r"(resid|mlp|attn|attention)_(post|out)_layer_.*": "dictionary_learning",
    r"(.*/)?layer_\d+.*": "gemma_scope",
    r"feature_(input|output)_hook.*": "circuit_tracer",
    r".*hook_head_index.*": "sae_lens",
    r"blocks\.\w+\..*hook_.*|hook_.*|(ln_final|embed|unembed|pos_embed|rotary_emb)\.hook_.*": "transformer_lens",
    r".*hidden_states\[.*|\S+[ :](in|out)put.*": "hf",
    r".*\.(in|out)puts?(\[.*)?": "nnsight",
    rf"(\w+\.)+\w+\.({'|'.join(POINTS)})": "hooks",
    r"(\w+\.)*(layers|h|blocks)[.\[]\d+.*": "sparsify",
}
"""Whose name a text looks like, for the reason that is given when nobody's name it is; the first that fits."""


def _looks_like(name: str) -> str | None:
    return next((tool for pattern, tool in _LOOKS.items() if re.fullmatch(pattern, name.strip(), re.ASCII)), None)


def _dialect(tool: str) -> Tool:
    if tool not in DIALECTS:
        raise UserError(f"No tool is called {tool!r} here; known: {', '.join(DIALECTS)}.")
    return DIALECTS[tool]


def _no_name(address: Address, tool: str, layout: Layout | None) -> str:
    title = TOOLS[tool]
    if address != address.whole:
        return (
            f"{title} has no name for {address}: none of its names picks one head or stream; nearest: {address.whole}."
        )
    named = [name for name, point in POINTS.items() if point.per_layer == (address.layer is not None)]
    others = [Address(name, address.layer) for name in named if name != address.name]
    if layout is not None:
        others = [other for other in others if other in layout.where]
    spoken = [other for other in others if _spellings(other, DIALECTS[tool], layout)]
    order = nearest_names(address.name, [other.name for other in spoken]) if spoken else []
    nearest = ", ".join(str(Address(name, address.layer)) for name in order)
    hint = f"; nearest that it names: {nearest}" if nearest else ""
    if layout is None:
        return f"{title} has no name that means {address} on every family{hint}; with a model there may be one."
    return f"{title} has no name for {address} on {layout.model}, where it is {layout.where[address]}{hint}."
