"""From one block's recorded call to its sublayers: what each reads, returns and adds, and the norms around it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from interp.models.anatomy import Refusal, Sublayer, Tap, scaled
from interp.models.flow import Addition, Source, Stage, returned_inside, sources
from interp.models.norms import Norm
from interp.models.probe import Call, Key, Trace
from interp.models.recognise import norm_of


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A sublayer, the calls that make it up, and the addition that it takes part in."""

    sublayer: Sublayer
    core: Call
    """The call that holds the sublayer's parameters: attention or MLP module, or the last of several modules."""
    first: Call
    """The first module of the core: what it receives is what the sublayer reads."""
    raw_node: int
    addition: int
    mixes_positions: bool
    calls_attention: bool


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
        found = sources(trace, link.contribution, stage.call)
        if found is None:
            return Refusal("what is added to the stream is no module's output", ("resid_pre", "resid_post"))
        for source in found:
            part = _part(trace, stage, source, streams, index)
            if part is None:
                return Refusal(
                    f"{source.call.path} adds to the stream but does not read it", ("resid_pre", "resid_post")
                )
            parts.append(part)
    return sorted(parts, key=lambda part: (part.addition, part.core.order))


def _part(trace: Trace, stage: Stage, source: Source, streams: set[int], addition: int) -> Part | None:
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
    core = _direct_child(trace, stage.call, raw_call)
    first = _first(trace, stage, core, streams)
    if first is None:
        return None
    call, key, pre_norm, pre_norm_input = first
    sublayer = Sublayer(
        path=core.path,
        read=input_tap(call, key),
        raw=output_tap(raw_call, raw_key),
        contribution=scaled(output_tap(source.call, source.key), source.factor),
        pre_norm=pre_norm,
        pre_norm_input=pre_norm_input,
        post_norm=post_norm,
        post_norm_input=post_norm_input,
        multiplier=source.factor,
        reads=_steps_before(trace, stage, pre_norm_input or input_tap(call, key)),
    )
    attends = any(inner.path.endswith("@attention") for inner in trace.inside(core))
    mixes = attends or _mixes_positions(trace, call, key, raw_call)
    return Part(sublayer, core, call, raw_node, addition, mixes, attends)


def _steps_before(trace: Trace, stage: Stage, source: Tap) -> int:
    """After how many stream steps the module behind `source` reads the stream."""
    call = next(c for c in trace.calls_of(source.path) if c.order > stage.call.order)
    read = trace.root(call.inputs[source.key])
    results = [trace.root(link.result) for link in stage.links or ()]
    return results.index(read) + 1 if read in results else 0


def _direct_child(trace: Trace, block: Call, call: Call) -> Call:
    """The block's own child in which `call` happened."""
    depth = block.depth + 1
    if call.depth <= depth:
        return call
    path = ".".join(call.path.split(".")[:depth])
    inside = [c for c in trace.calls_of(path) if c.order < call.order]
    return inside[-1] if inside else call


def _first(
    trace: Trace, stage: Stage, core: Call, streams: set[int]
) -> tuple[Call, Key, Norm | None, Tap | None] | None:
    """Walk back from the core to the module that reads the stream, directly or through a norm."""
    current = core
    for _ in range(16):
        before = None
        for key, node in current.inputs.items():
            value = trace.value[node]
            if not value.is_floating_point() or value.ndim < 2:
                continue
            if trace.root(node) in streams:
                return current, key, None, None
            produced = returned_inside(trace, node, stage.call) or _behind_elementwise(trace, node, stage.call)
            if produced is None or produced.order >= current.order:
                continue
            for call in (produced, *trace.returned_by(node)):  # DBRX norms the MLP's input inside its attention part
                norm_key, entered = next(iter(call.inputs.items()), (None, None))
                inside = call.order > stage.call.order and entered is not None and trace.root(entered) in streams
                if inside and (norm := norm_of(trace, call)) is not None:
                    return current, key, norm, input_tap(call, norm_key)
            before = before or produced
        if before is None:
            return None
        current = _direct_child(trace, stage.call, before)
    return None


def _behind_elementwise(trace: Trace, node: int, block: Call) -> Call | None:
    """The module whose output became `node` through functions of one tensor (an activation called as a function)."""
    for _ in range(8):
        op = trace.producer.get(trace.root(node))
        if op is None or len(op.inputs) != 1:
            return None
        node = op.inputs[0]
        if (call := returned_inside(trace, node, block)) is not None:
            return call
    return None


def _mixes_positions(trace: Trace, first: Call, key: Key, last: Call) -> bool:
    """Whether what the sublayer returns at the last position depends on what it reads at earlier ones.

    By more than rounding: experts compute several positions in one product, whose rounding depends on all of them.
    """
    if last.path != first.path and not last.path.startswith(first.path + "."):
        return False
    args, kwargs = list(first.args), dict(first.kwargs)
    x = trace.value[first.inputs[key]]
    moved = x.clone()
    moved.view(x.shape[0] if x.ndim == 3 else 1, -1, x.shape[-1])[:, :-1] += x.std()
    outputs: list[Tensor] = []
    handle = last.module.register_forward_hook(lambda m, a, output: outputs.append(_first_tensor(output)))
    try:
        with torch.no_grad():
            for value in (x, moved):
                if isinstance(key, int):
                    args[key] = value
                else:
                    kwargs[str(key)] = value
                first.module(*args, **kwargs)
    finally:
        handle.remove()
    plain, perturbed = (out.reshape(-1, out.shape[-1])[-1] for out in (outputs[0], outputs[-1]))
    return bool((plain - perturbed).abs().amax() > 1e3 * torch.finfo(x.dtype).eps * plain.abs().amax())


def _first_tensor(output: object) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]  # type: ignore[index]
