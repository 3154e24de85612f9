"""Where a run shows which experts an MLP selects, and what it weighs their outputs with.

The experts' call is the one that receives, beside hidden states, integers and floats of one shape [.., selected]. Where
no call does, the router's output holds a score per expert that is zero but for the selected ones, or the selection is
seen where `topk` and what follows it are called.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from interp.models.anatomy import Tap
from interp.models.inside import Inside, watched_functions
from interp.models.probe import Call, Op, Trace
from interp.models.rerun import pick
from interp.models.sublayers import Part, input_tap, output_tap
from interp.models.transforms import Largest, LargestIndices


@dataclass(frozen=True, slots=True)
class Selection:
    """Taps on the selected experts and their weights, and their values in the recorded pass."""

    indices: Tap
    weights: Tap
    chosen: Tensor
    """[pos, selected]"""
    given: Tensor
    """[pos, selected]: the weights."""
    node: int
    """A tensor that the selection is part of."""
    weights_node: int
    told: bool
    """Whether it is handed to a call; what is only computed must show by its use that it is the selection."""


def selection_of(trace: Trace, part: Part, n_pos: int) -> Selection | None:
    """The selection that the MLP's run shows, if it shows one."""
    return _told(trace, part, n_pos) or _scattered(trace, part, n_pos) or _called(trace, part, n_pos)


def selects(trace: Trace, part: Part) -> bool:
    """Whether anything is picked by rank while the MLP runs."""
    first, last = part.first.ops[0], part.core.ops[1]
    return any(op.name in ("topk", "sort", "argmax", "max") and len(op.outputs) > 1 for op in trace.ops[first:last])


def _inside(trace: Trace, part: Part) -> Iterator[Call]:
    return (call for call in trace.inside(part.core) if not call.path.endswith("@attention"))


def _told(trace: Trace, part: Part, n_pos: int) -> Selection | None:
    """The outermost call that receives the selection: integers and floats, n_pos times a few of each."""
    for call in _inside(trace, part):
        values = {key: trace.value[node] for key, node in call.inputs.items()}
        for key, chosen in values.items():
            if chosen.dtype not in (torch.int64, torch.int32) or chosen.ndim < 2 or _rows(chosen) != n_pos:
                continue
            for other, given in values.items():
                if given.is_floating_point() and given.shape == chosen.shape:
                    nodes = call.inputs[key], call.inputs[other]
                    flat = (chosen.reshape(n_pos, -1), given.reshape(n_pos, -1))
                    return Selection(input_tap(call, key), input_tap(call, other), *flat, *nodes, told=True)
    return None


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def _scattered(trace: Trace, part: Part, n_pos: int) -> Selection | None:
    """A call's output with one score per expert, of which the same number in every row is not zero."""
    for call in _inside(trace, part):
        for key, node in call.outputs.items():
            scores = trace.value[node]
            if not scores.is_floating_point() or scores.ndim < 2 or _rows(scores) != n_pos or call is part.core:
                continue
            flat = scores.reshape(n_pos, -1)
            n_selected = {int(n) for n in (flat != 0).sum(-1)}
            if len(n_selected) != 1 or not 0 < min(n_selected) < flat.shape[-1] or not _picked(trace, part, node):
                continue
            n = n_selected.pop()
            tap, largest = output_tap(call, key), flat.topk(n)
            taps = tap.then(LargestIndices(n)), tap.then(Largest(n))
            return Selection(*taps, largest.indices, largest.values, node, node, told=False)
    return None


def _picked(trace: Trace, part: Part, node: int) -> bool:
    """Whether a selection by rank, made inside the part, is behind `node`."""
    behind = trace.ancestors(node, since=part.first.first_input)
    return any(op.name == "topk" and op.outputs[1] in behind for op in trace.ops[part.first.ops[0] : part.core.ops[1]])


def _called(trace: Trace, part: Part, n_pos: int) -> Selection | None:
    """The last selection by rank of the part, and the last numbers for each selected expert that it leads to."""
    first, last = part.first.ops[0], part.core.ops[1]
    ops = [op for op in trace.ops[first:last] if op.outputs]
    picked = next(
        (op for op in reversed(ops) if op.name == "topk" and _rows(trace.value[op.outputs[1]]) == n_pos), None
    )
    if picked is None:
        return None
    values, chosen = picked.outputs
    indices = function_tap(trace, part, picked, chosen, 1)
    for op in reversed(ops):
        node = op.outputs[0]
        given = trace.value[node]
        if given.shape != trace.value[chosen].shape or not given.is_floating_point():
            continue
        if {values, chosen} & trace.ancestors(node, since=values):
            weights = function_tap(trace, part, op, node, 0 if op is picked else None)
            if indices is None or weights is None:
                return None
            flat = (trace.value[chosen].reshape(n_pos, -1), given.reshape(n_pos, -1))
            return Selection(indices, weights, *flat, chosen, node, told=False)
    return None


def innermost(trace: Trace, part: Part, op: Op) -> Call | None:
    """The innermost call during which the operation ran."""
    place = trace.ops.index(op)
    around = [call for call in _inside(trace, part) if call.ops[0] <= place < call.ops[1]]
    return max(around, key=lambda call: call.depth, default=None)


def function_tap(trace: Trace, part: Part, op: Op, node: int, element: int | None) -> Tap | None:
    """The function call that gave the value of `node`, found by running the module around the operation again."""
    value, found = trace.value[trace.root(node)], []
    call = innermost(trace, part, op)
    if call is None:
        return None

    def visit(module: nn.Module, name: str, number: int, result: Any) -> Any:
        if not found and (element is None) == isinstance(result, Tensor):
            given = pick(result, element)
            if given.numel() == value.numel() and torch.equal(given.reshape(value.shape), value):
                found.append(Inside(name, number))
        return result

    with torch.no_grad(), watched_functions([call.module], visit):
        call.module(*call.args, **call.kwargs)
    return Tap(call.path, call.module, "function", element, inside=found[-1]) if found else None
