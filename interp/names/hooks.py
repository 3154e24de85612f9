"""Hook names: a block's path and a point, as in `layers_first.0.resid_post`; for the trunk `embed` or the point alone.

They name a place by the group that it belongs to, where an Address counts layers through all groups.
"""

from collections.abc import Iterator, Sequence

from interp.errors import UserError
from interp.names.answer import Answer, NameRefused, depends, served
from interp.names.layout import Layout
from interp.points import POINTS, Address
from interp.points.table import nearest_names

TRUNK = {"embed": "embeddings"} | {name: name for name, point in POINTS.items() if not point.per_layer}
"""Names without a layer, and the points that they are."""


def address_of(hook: str, blocks: Sequence[str]) -> Address:
    """The Address of a hook name; `blocks` holds the path of each block.

    Raises `NameRefused` for a block or a point that is not there.
    """
    hook = hook.strip()
    if hook in TRUNK:
        return Address(TRUNK[hook])
    prefix, _, point = hook.rpartition(".")
    if point not in POINTS or not POINTS[point].per_layer:
        near = ", ".join(nearest_names(point, [name for name, row in POINTS.items() if row.per_layer]))
        raise NameRefused(f"{hook!r} ends in no point of a layer; nearest to {point!r}: {near}.")
    return Address(point, layer_of(prefix, blocks))


def hook_of(address: Address | str, blocks: Sequence[str]) -> str:
    """The hook name of an Address. Raises `NameRefused` for one head or stream, which no hook name picks."""
    address = Address.parse(address)
    if address != address.whole:
        raise NameRefused(f"No hook name picks one head or stream; nearest: {hook_of(address.whole, blocks)}.")
    if address.layer is None:
        return next(hook for hook, point in TRUNK.items() if point == address.name)
    if address.layer >= len(blocks):
        raise NameRefused(f"{address} does not exist: the model has layers 0 to {len(blocks) - 1}.")
    return f"{blocks[address.layer]}.{address.name}"


def layer_of(prefix: str, blocks: Sequence[str]) -> int:
    """The layer whose block lies at `prefix`, as `layers_first.0`. Raises `NameRefused` where none does."""
    if prefix not in blocks:
        groups: dict[str, list[str]] = {}
        for path in blocks:
            groups.setdefault(path.rpartition(".")[0], []).append(path)
        there = ", ".join(" to ".join(dict.fromkeys((paths[0], paths[-1]))) for paths in groups.values())
        raise NameRefused(f"There is no block {prefix!r}; the model has {there}.")
    return list(blocks).index(prefix)


def address(name: Address | str, blocks: Sequence[str]) -> Address:
    """An Address, from itself, its text or a hook name. Raises `UserError` for what is neither."""
    try:
        return Address.parse(name)
    except UserError:
        if str(name).strip().rpartition(".")[0] not in blocks:
            check(name)
        return address_of(str(name), blocks)


def check(name: Address | str) -> None:
    """Raises `UserError` for what can be neither an Address nor, on any model, a hook name."""
    text = str(name).strip()
    prefix, _, point = text.rpartition(".")
    if text not in TRUNK and not (prefix and point in POINTS):
        Address.parse(name)


def read(name: str, layout: Layout | None) -> Answer:
    """A hook name, on the model of `layout`; without one, the trunk's alone."""
    if layout is None and name not in TRUNK:
        raise depends(name, "what the model calls its groups of blocks")
    blocks = [] if layout is None else [block.path for block in layout.blocks]
    return served(layout, name, Answer(address_of(name, blocks)))


def names(address: Address, layout: Layout | None) -> Iterator[str]:
    """The hook name, where there is one."""
    if address == address.whole and (layout is not None or address.layer is None):
        yield hook_of(address, [] if layout is None else [block.path for block in layout.blocks])
