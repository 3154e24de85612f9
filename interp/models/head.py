"""From the last block to the logits: the final norm, what follows it, the unembedding, its scale and its cap."""

from typing import NamedTuple

from interp.models.anatomy import Head, Piece, Refusal
from interp.models.between import backwards
from interp.models.flow import Stage, constant_factor, returned_inside
from interp.models.norms import Norm
from interp.models.probe import Call, Trace
from interp.models.recognise import linear_of


class HeadParts(NamedTuple):
    """What was found between the last block and the logits."""

    head: Head | Refusal
    lm_head: Call | None
    """The unembedding."""
    final_norm: Call | None
    """The norm that reads the last stream."""
    collapse: Call | None
    """What makes one vector of several streams before that norm."""


def head_of(trace: Trace, whole: Call, logits: int, last: Stage) -> HeadParts:
    """Walk back from the logits to the last block's output."""
    head, lm_head = _unembedding(trace, whole, logits)
    start = logits if lm_head is None else next(iter(lm_head.inputs.values()))
    before, final, collapse = _before_unembedding(trace, whole, start, last)
    if isinstance(head, Head) and before:
        head = Head(head.linear, head.scale, head.cap, before)
    return HeadParts(head, lm_head, final, collapse)


def _unembedding(trace: Trace, whole: Call, node: int) -> tuple[Head | Refusal, Call | None]:
    """Follow constants and a tanh back from the logits to the linear map that they come from."""
    after, cap, capped = 1.0, None, False
    for _ in range(8):
        for call in reversed(trace.returned_by(node)):
            if call is not whole and (found := linear_of(trace, call)) is not None:
                return (Head(found, after, cap) if not capped else Head(found, (cap or 1.0) * after, cap)), call
        op = trace.producer.get(trace.root(node))
        if op is None:
            break
        if (constant := constant_factor(trace, op)) is not None:
            node, after = constant[0], after * constant[1]
        elif op.name == "tanh" and not capped:
            node, cap, after, capped = op.inputs[0], after, 1.0, True
        else:
            break
    return Refusal("the logits are not a linear map's output, scaled and capped"), None


def _before_unembedding(
    trace: Trace, whole: Call, node: int, last: Stage
) -> tuple[tuple[Piece, ...], Call | None, Call | None]:
    """The pieces from the final norm's output to `node`, the final norm, and what collapses several streams."""
    pieces: list[Piece] = []
    stream = trace.root(last.leaves)
    if trace.root(node) == stream:
        return (), None, None
    for piece, entered, call in backwards(trace, node):
        if isinstance(piece, Norm):
            collapse = returned_inside(trace, entered, whole)
            reads = [] if collapse is None else [trace.root(value) for value in collapse.inputs.values()]
            if trace.root(entered) == stream:
                return tuple(pieces[::-1]), call, None
            if last.stacked(trace) and stream in reads:
                return tuple(pieces[::-1]), call, collapse
        pieces.append(piece)
        if trace.root(entered) == stream:
            return tuple(pieces[::-1]), None, None
    return (), None, None
