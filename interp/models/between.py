"""What stands between two places of a recorded trunk: linear maps, norms, factors and activations, read backwards."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from interp.models.anatomy import Bridge, Network, Piece, Refusal
from interp.models.flow import Stage, constant_factor, key_of, returned_inside
from interp.models.neurons import activation_of
from interp.models.probe import Call, Trace
from interp.models.recognise import linear_of, norm_of
from interp.models.sublayers import input_tap, output_tap
from interp.models.transforms import Scale

MOST = 8
"""Pieces that are followed; a chain of more is a network of its own."""


class Back(NamedTuple):
    """One piece, and the value that it was given."""

    piece: Piece
    before: int
    call: Call | None
    """Of the module that computed it, where it is a map or a norm."""


def backwards(trace: Trace, node: int) -> Iterator[Back]:
    """The pieces that made `node`, last first, as far as each is one that is known."""
    for _ in range(MOST):
        if (found := _back(trace, node)) is None:
            return
        yield found
        node = found.before


def _back(trace: Trace, node: int) -> Back | None:
    returned = trace.returned_by(node)[::-1]
    for recognise in (norm_of, linear_of):
        for call in returned:
            if (piece := recognise(trace, call)) is not None:
                return Back(piece, next(iter(call.inputs.values())), call)
    op = trace.producer.get(trace.root(node))
    if op is not None and (constant := constant_factor(trace, op)) is not None:
        return Back(Scale(constant[1]), constant[0], None)
    return _activated(trace, node)


def _activated(trace: Trace, node: int) -> Back | None:
    """A known activation of a linear map's output."""
    for candidate in sorted(trace.ancestors(node, since=max(0, node - 64)), reverse=True):
        if candidate != node and any(linear_of(trace, call) is not None for call in trace.returned_by(candidate)):
            function: Callable[[Tensor], Tensor] | None = activation_of(trace, candidate, node)
            return None if function is None else Back(function, candidate, None)
    return None


def bridges_of(trace: Trace, whole: Call, stages: Sequence[Stage]) -> dict[int, Bridge]:
    """The adapters of a trunk, by the layer before each."""
    found = [_bridge(trace, whole, before, after, layer) for layer, (before, after) in enumerate(pairwise(stages))]
    return {bridge.layer: bridge for bridge in found if bridge is not None}


def _bridge(trace: Trace, whole: Call, before: Stage, after: Stage, layer: int) -> Bridge | None:
    """What makes the stream that leaves `before`, of `layer`, into that which enters `after`; None if they are one."""
    entered, left = trace.root(after.enters), trace.root(before.leaves)
    if entered == left:
        return None
    pieces: list[Piece] = []
    known: tuple[Piece, ...] | Refusal = Refusal(
        "what stands between these two groups of blocks is no module and no chain of maps, norms and activations",
        (f"resid_post.{layer}", f"resid_pre.{layer + 1}"),
    )
    for piece, node, _ in backwards(trace, after.enters):
        pieces.append(piece)
        if trace.root(node) == left:
            known = tuple(pieces[::-1])
            break
    made = returned_inside(trace, after.enters, whole)
    if isinstance(known, Refusal) and made is not None and [*map(trace.root, made.inputs.values())] == [left]:
        known = (Network(made.path, made.module),)
    output = input_tap(after.call, after.input_key) if made is None else output_tap(made, key_of(trace, made, entered))
    return Bridge(layer, trace.value[before.leaves].shape[-1], output, known)
