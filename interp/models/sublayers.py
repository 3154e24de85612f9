"""From one block's recorded call to its sublayers: what each reads, returns and adds, and the norms around it."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from interp.models.anatomy import Refusal, Sublayer, Tap, scaled
from interp.models.flow import Addition, Source, Stage, addends, key_of, norm_behind, returned_inside, sources
from interp.models.norms import Norm
from interp.models.parameters import packs
from interp.models.probe import Call, Key, Trace
from interp.models.recognise import COARSE, norm_of
from interp.models.stacks import spread, stack_of
from interp.models.transforms import OneOfSeveral


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A sublayer, the calls that make it up, and the addition that it takes part in."""

    sublayer: Sublayer
    core: Call
    """The call that holds the sublayer's parameters: attention or MLP module, or the last of several modules."""
    first: Call
    """The first module of the core: what it receives is what the sublayer reads."""
    read_node: int
    raw_node: int
    addition: int
    mixes_positions: bool
    calls_attention: bool


MIXED = 0.1
"""How far the output of what mixes positions moves, of its size, whatever the dtype: half precision rounds coarsely."""


def output_tap(call: Call, key: Key) -> Tap:
    return Tap(call.path, call.module, "output", key)


def input_tap(call: Call, key: Key) -> Tap:
    return Tap(call.path, call.module, "input", key)


def parts_of(trace: Trace, stage: Stage) -> list[Part] | Refusal:
    """The sublayers of a block in the order of their additions."""
    if not stage.links:
        return Refusal("the block's output is not its input plus outputs of modules", ("resid_pre", "resid_post"))
    streams = {trace.root(stage.enters)} | {trace.root(link.result) for link in stage.links}
    parts: list[Part] = []
    for index, link in enumerate(stage.links):
        if not isinstance(link, Addition):
            continue
        written = spread(trace, link.contribution) if stage.stacked(trace) else None
        found = sources(trace, link.contribution if written is None else written[1], stage.call)
        if found is None:
            return Refusal("what is added to the stream is no module's output", ("resid_pre", "resid_post"))
        for source in found:
            part = _part(trace, stage, source, streams, index, None if written is None else written[0])
            if part is None:
                return Refusal(
                    f"{source.call.path} adds to the stream but does not read it", ("resid_pre", "resid_post")
                )
            parts.append(part)
    return sorted(parts, key=lambda part: (part.addition, part.core.order))


class _Entry(NamedTuple):
    """How a sublayer takes the stream."""

    call: Call
    """The first module of its core."""
    key: Key
    tap: Tap
    """Where the stream itself is read."""
    norm: Norm | None = None
    norm_input: Tap | None = None
    collapse: Tap | None = None
    """Where one vector is made of several streams."""
    unknown: str = ""
    """What stands between the stream and the sublayer, where it is not a known norm alone."""
    mixed: bool = False
    """Whether the sublayer reads something else added to the stream."""


def _part(
    trace: Trace, stage: Stage, source: Source, streams: set[int], addition: int, weights: int | None
) -> Part | None:
    post_norm = norm_of(trace, source.call)
    post_norm_input = None
    raw_call, raw_node, raw_key = source.call, source.node, source.key
    if post_norm is not None:
        key, entered = next(iter(source.call.inputs.items()))
        behind = sources(trace, entered, stage.call)
        if behind is None or len(behind) != 1 or behind[0].factor != 1.0:
            return None
        post_norm_input = input_tap(source.call, key)
        raw_call, raw_node, raw_key = behind[0].call, behind[0].node, behind[0].key
    core, entry = _core(trace, stage, raw_call, streams)
    if entry is None:
        return None
    stack = None
    if weights is not None:
        stack = None if entry.collapse is None else stack_of(trace, stage, weights, addition, entry.collapse)
        if stack is None:
            return None
    sublayer = Sublayer(
        path=core.path,
        read=Refusal(entry.unknown) if entry.mixed else read_tap(trace, entry.call, entry.key),
        raw=output_tap(raw_call, raw_key),
        contribution=scaled(output_tap(source.call, source.key), source.factor),
        pre_norm=None if entry.mixed else entry.norm,
        pre_norm_input=None if entry.mixed else entry.norm_input,
        post_norm=post_norm,
        post_norm_input=post_norm_input,
        multiplier=source.factor,
        entry=entry.tap,
        by_token=not all(trace.value[node].is_floating_point() for node in entry.call.inputs.values()),
        unknown=entry.unknown,
        reads=_steps_before(trace, stage, entry.tap),
        stack=stack,
    )
    attends = any(inner.path.endswith("@attention") for inner in trace.inside(core))
    mixes = attends or _mixes_positions(trace, stage.call, entry.call, entry.key, raw_call)
    return Part(sublayer, core, entry.call, entry.call.inputs[entry.key], raw_node, addition, mixes, attends)


def read_tap(trace: Trace, call: Call, key: Key) -> Tap:
    """What the sublayer receives; not open to edits where it comes as several arguments, as query, key and value."""
    tap, node = input_tap(call, key), trace.root(call.inputs[key])
    several = sum(trace.root(other) == node for other in call.inputs.values()) > 1
    return tap.then(OneOfSeveral()) if several else tap


def _core(trace: Trace, stage: Stage, raw: Call, streams: set[int]) -> tuple[Call, _Entry | None]:
    """The module that the sublayer is, and how it takes the stream.

    The block's own child; where that child holds the norm and the addition too (DBRX), its child that holds neither.
    """
    core = _child(trace, stage.call, raw)
    entry = _entry(trace, stage, core, streams)
    if entry is not None and entry.norm is None and raw.path != core.path:
        inner = _child(trace, core, raw)
        within = _entry(trace, stage, inner, streams, inside=core)
        if within is not None and within.norm is not None:
            return inner, within
        if within is not None and entry.call is core and _returns_stream(trace, core, streams):
            return core, within  # its own input is the skip path's, too
    return core, entry


def _steps_before(trace: Trace, stage: Stage, source: Tap) -> int:
    """After how many stream steps the module behind `source` reads the stream."""
    call = next(c for c in trace.calls_of(source.path) if c.order > stage.call.order)
    read = trace.root(call.inputs[source.key])
    results = [trace.root(link.result) for link in stage.links or ()]
    return results.index(read) + 1 if read in results else 0


def _child(trace: Trace, outer: Call, call: Call) -> Call:
    """The child of `outer` in which `call` happened."""
    depth = outer.depth + 1
    if call.depth <= depth:
        return call
    path = ".".join(call.path.split(".")[:depth])
    inside = [c for c in trace.calls_of(path) if c.order < call.order]
    return inside[-1] if inside else call


def _entry(trace: Trace, stage: Stage, core: Call, streams: set[int], inside: Call | None = None) -> _Entry | None:
    """Walk back from the core to the module that reads the stream, directly or through a norm."""
    outer, current = inside or stage.call, core
    for _ in range(16):
        direct, before = None, None
        for key, node in current.inputs.items():
            value = trace.value[node]
            if not value.is_floating_point() or value.ndim < 2:
                continue
            if trace.root(node) in streams:
                direct = direct or _Entry(current, key, input_tap(current, key))
                continue
            if (entry := _indirect(trace, stage, current, key, streams)) is not None:
                return entry
            produced = returned_inside(trace, node, outer) or _behind_elementwise(trace, node, outer)
            if produced is None or produced.order >= current.order:
                continue
            if not _returns_stream(trace, produced, streams):
                before = before or produced  # a module that returns the stream holds another sublayer
        # A module that returns the stream may take it only to add to it, and read it through what came before.
        if direct is not None and not (before is not None and _returns_stream(trace, current, streams)):
            return direct
        if before is None:
            return None
        current = _child(trace, outer, before)
    return None


def _indirect(trace: Trace, stage: Stage, call: Call, key: Key, streams: set[int]) -> _Entry | None:
    """How `call` takes the stream at `key`: through a norm, a collapse of several streams, or something unknown."""
    node = call.inputs[key]
    if (collapsed := _collapse(trace, stage, node, streams)) is not None:
        return _Entry(call, key, collapsed[0], collapse=collapsed[1])
    produced = norm_behind(trace, node, stage.call) or returned_inside(trace, node, stage.call)
    if produced is None or produced.order >= call.order:
        return None
    norm_key, entered = next(iter(produced.inputs.items()), (None, -1))
    taken = input_tap(produced, norm_key)
    norm = norm_of(trace, produced)
    if norm is None:
        shaped = trace.root(entered) in streams and trace.value[entered].shape == trace.value[node].shape
        alone = shaped and not _returns_stream(trace, produced, streams)
        alone = alone and not _mixes_positions(trace, stage.call, produced, norm_key, produced)
        return _Entry(call, key, taken, unknown="what stands before this sublayer is no known norm") if alone else None
    if trace.root(entered) in streams:
        return _Entry(call, key, taken, norm, taken)
    if (collapsed := _collapse(trace, stage, entered, streams)) is not None:
        return _Entry(call, key, collapsed[0], norm, taken, collapsed[1])
    if _with_something_added(trace, entered, streams):
        added = "this sublayer's norm reads the stream with something else added to it"
        return _Entry(call, key, taken, norm, taken, unknown=added, mixed=True)
    return None


def _returns_stream(trace: Trace, call: Call, streams: set[int]) -> bool:
    return any(trace.root(value) in streams for value in call.outputs.values())


def _collapse(trace: Trace, stage: Stage, node: int, streams: set[int]) -> tuple[Tap, Tap] | None:
    """(where the stack is read, where one vector of it is returned) if a module made `node` of several streams."""
    if not stage.stacked(trace) or (call := returned_inside(trace, node, stage.call)) is None:
        return None
    key = next((key for key, value in call.inputs.items() if trace.root(value) in streams), None)
    return None if key is None else (input_tap(call, key), output_tap(call, key_of(trace, call, node)))


def _with_something_added(trace: Trace, node: int, streams: set[int]) -> bool:
    op = trace.producer.get(trace.root(node))
    return op is not None and any(trace.root(operand) in streams for operand in addends(trace, op))


def _behind_elementwise(trace: Trace, node: int, block: Call) -> Call | None:
    """The module whose output became `node` through an activation called as a function, or a product with a tensor."""
    pending = [node]
    for _ in range(8):
        if not pending:
            return None
        op = trace.producer.get(trace.root(pending.pop(0)))
        if op is None or (len(op.inputs) != 1 and op.name != "mul"):
            continue
        for operand in op.inputs:
            if (call := returned_inside(trace, operand, block)) is not None:
                return call
            pending.append(operand)
    return None


def _mixes_positions(trace: Trace, block: Call, first: Call, key: Key, last: Call) -> bool:
    """Whether what the sublayer returns at the last position depends on what it reads at earlier ones.

    By more than rounding: experts compute several positions in one product, whose rounding depends on all of them, and
    packed modules may choose by all positions which channels they round to eight bits.
    The module that reads is run again if it is also the one that returns, else the whole block.
    """
    x = trace.value[first.inputs[key]]
    moved = x.clone()
    moved.view(x.shape[0] if x.ndim == 3 else 1, -1, x.shape[-1])[:, :-1] += x.std()
    again = first if last.path == first.path or last.path.startswith(first.path + ".") else block
    same = [k for k, node in first.inputs.items() if trace.root(node) == trace.root(first.inputs[key])]
    reads: list[Tensor] = []
    outputs: list[Tensor] = []

    def read(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        args = tuple(reads[-1] if i in same else value for i, value in enumerate(args))
        return args, {name: reads[-1] if name in same else value for name, value in kwargs.items()}

    handles = [
        first.module.register_forward_pre_hook(read, with_kwargs=True),
        last.module.register_forward_hook(lambda m, a, output: outputs.append(_first_tensor(output))),
    ]
    try:
        with torch.no_grad():
            for value in (x, moved):
                reads.append(value)
                again.module(*again.args, **again.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    plain, perturbed = (out.reshape(-1, out.shape[-1])[-1] for out in (outputs[0], outputs[-1]))
    rounding = min(1e3 * torch.finfo(x.dtype).eps, MIXED)
    if any(packs(module) for module in again.module.modules()):
        rounding = max(rounding, COARSE)
    return bool((plain - perturbed).abs().amax() > rounding * plain.abs().amax())


def _first_tensor(output: object) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]  # type: ignore[index]
