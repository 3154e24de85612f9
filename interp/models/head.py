"""From the last block to the logits: the final norm, what follows it, the unembedding, its scale and its cap."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from interp.models.anatomy import Head, HeadStep, Refusal
from interp.models.flow import Stage, constant_factor, returned_inside
from interp.models.neurons import activation_of
from interp.models.probe import Call, Trace
from interp.models.recognise import linear_of, norm_of
from interp.models.transforms import Scale


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
) -> tuple[tuple[HeadStep, ...], Call | None, Call | None]:
    """The steps from the final norm's output to `node` in order, the final norm, and what collapses several streams."""
    steps: list[HeadStep] = []
    stream = trace.root(last.leaves)
    for _ in range(8):
        if trace.root(node) == stream:
            return tuple(steps[::-1]), None, None
        returned = trace.returned_by(node)
        norm_call = next((c for c in reversed(returned) if norm_of(trace, c) is not None), None)
        linear_call = next((c for c in reversed(returned) if linear_of(trace, c) is not None), None)
        if norm_call is not None:
            entered = next(iter(norm_call.inputs.values()))
            collapse = returned_inside(trace, entered, whole)
            reads = [] if collapse is None else [trace.root(value) for value in collapse.inputs.values()]
            if trace.root(entered) == stream:
                return tuple(steps[::-1]), norm_call, None
            if last.stacked(trace) and stream in reads:
                return tuple(steps[::-1]), norm_call, collapse
            norm = norm_of(trace, norm_call)
            assert norm is not None
            steps.append(norm)
            node = entered
        elif linear_call is not None:
            linear = linear_of(trace, linear_call)
            assert linear is not None
            steps.append(linear)
            node = next(iter(linear_call.inputs.values()))
        elif (op := trace.producer.get(trace.root(node))) and (constant := constant_factor(trace, op)) is not None:
            steps.append(Scale(constant[1]))
            node = constant[0]
        elif (activated := _activated(trace, node)) is not None:
            steps.append(activated[0])
            node = activated[1]
        else:
            break
    return (), None, None


def _activated(trace: Trace, node: int) -> tuple[Callable[[Tensor], Tensor], int] | None:
    """(function, argument) if `node` is a known activation of a linear map's output."""
    for candidate in sorted(trace.ancestors(node, since=max(0, node - 64)), reverse=True):
        if candidate != node and any(linear_of(trace, call) is not None for call in trace.returned_by(candidate)):
            function = activation_of(trace, candidate, node)
            return None if function is None else (function, candidate)
    return None
