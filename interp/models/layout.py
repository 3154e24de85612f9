"""Which channels of a projection are which head: read from the run.

The reshapes and slices between a projection's output and the place where it is used are applied to channel numbers
instead of activations.
"""

import torch
from torch import Tensor

from interp.models.anatomy import Tap
from interp.models.probe import Call, Trace
from interp.models.sublayers import output_tap
from interp.models.transforms import Channels, Clip, OneHead

VIEWS = frozenset(
    {
        "view",
        "_unsafe_view",
        "reshape",
        "transpose",
        "permute",
        "split",
        "split_with_sizes",
        "chunk",
        "slice",
        "select",
        "unsqueeze",
        "squeeze",
        "expand",
        "clone",
        "contiguous",
        "alias",
        "detach",
        "_to_copy",
        "t",
        "narrow",
        "unbind",
        "unflatten",
        "flatten",
        "index",
    }
)


CLIPS = frozenset({"clamp"})


def channels(trace: Trace, call: Call, target: int, n_pos: int) -> Tensor | None:
    """Which channels of the call's output are `target`'s elements at one position; None unless only views lie between.

    A clamp keeps every element in its place, so it counts as one; `clip` says its bounds.

    Position 0 of `target` is returned with its remaining axes in order: [heads, d_head] or [width].
    """
    output = next(iter(call.outputs.values()))
    shape = trace.value[output].shape
    numbers = torch.arange(trace.value[output].numel()).view(shape)
    index = trace.replay(target, output, numbers, VIEWS, CLIPS)
    return None if index is None else _at_first_position(index, shape[-1], n_pos)


def clip(trace: Trace, call: Call, target: int) -> Clip | None:
    """The clamp between the call's output and `target`, if there is one."""
    behind = trace.ancestors(target, since=next(iter(call.outputs.values())))
    for op in trace.ops:
        if op.name in CLIPS and op.outputs[0] in behind:
            low, high = (*op.args[1:], None, None)[:2]
            return Clip(op.kwargs.get("min", low), op.kwargs.get("max", high))
    return None


def _at_first_position(index: Tensor, width: int, n_pos: int) -> Tensor | None:
    position = index // width % n_pos
    for axis, size in enumerate(index.shape):
        if size == n_pos and bool((position.movedim(axis, 0).flatten(1) == torch.arange(n_pos)[:, None]).all()):
            first = (index % width).movedim(axis, 0)[0]
            return first.reshape([n for n in first.shape if n != 1] or [1]) if first.shape[0] == 1 else first
    return None


def channel_tap(trace: Trace, call: Call, index: Tensor) -> Tap:
    """The channels `index` of what the call returned."""
    key, node = next(iter(call.outputs.items()))
    shape = trace.value[node].shape
    between = (OneHead(),) if len(shape) == 4 and shape[1] == 1 else ()
    return output_tap(call, key).then(*between, Channels(index))
