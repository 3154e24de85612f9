"""Where a new value at a point is written, so that everything computed from the point sees it."""

from typing import NamedTuple

from interp.models.anatomy import Add, Anatomy, Block, Refusal, Tap
from interp.points import POINTS, Address


class Place(NamedTuple):
    """A tap to write at."""

    tap: Tap
    stream: Tap | None = None
    """Where the point is the sum of the stream and of what `tap` reads: the stream."""


def place_of(anatomy: Anatomy, address: Address, tap: Tap) -> Place | Refusal:
    """The place for writes at `address`, which is read at `tap`; a Refusal where a write would not reach everything."""
    if address.name == "resid_mid" and address.layer is not None:
        return _before_the_middle(anatomy, anatomy.blocks[address.layer], address.layer)
    if not POINTS[address.name].writable or not tap.writable:
        return Refusal("the value is computed inside a module, not passed on by it")
    return Place(tap)


def _before_the_middle(anatomy: Anatomy, block: Block, layer: int) -> Place | Refusal:
    """The contribution whose sum with resid_pre is resid_mid: the norm behind it is passed by the skip path."""
    before = block.steps[: block.steps_to_mid]
    only = before[0] if len(before) == 1 else None
    if not isinstance(only, Add) or only.points != ("attn_out_post",) or only.write is not None:
        text = "a write must go through the contribution before it, but more happens to the stream than that one sum"
        return Refusal(text, (f"attn_out_post.{layer}", f"resid_pre.{layer}"))
    contribution, stream = (anatomy.tap(Address(name, layer)) for name in ("attn_out_post", "resid_pre"))
    for tap in (contribution, stream):
        if isinstance(tap, Refusal):
            return tap
    assert isinstance(contribution, Tap) and isinstance(stream, Tap)
    if not contribution.writable:
        return Refusal("the contribution before it is computed inside a module, not passed on by it")
    return Place(contribution, stream)
