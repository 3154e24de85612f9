"""The inside of softmax attention: which projections feed it, and which channels of them are which head."""

import torch
from torch import Tensor

from interp.models.anatomy import Linear, Mixer, Projection, Refusal, Tap
from interp.models.layout import channel_tap, channels
from interp.models.norms import Norm
from interp.models.probe import Call, Trace
from interp.models.recognise import linear_of, norm_of
from interp.models.sublayers import Part, input_tap
from interp.models.transforms import Channels, HeadsFirst, Step

Linears = list[tuple[Call, Linear]]


def mixer_of(trace: Trace, part: Part, n_pos: int) -> Mixer | Refusal:
    """The inside of a softmax attention, from what its attention function received."""
    inside = trace.inside(part.core)
    events = [c for c in inside if c.path.endswith("@attention")]
    if len(events) != 1:
        return Refusal(
            "this token mixer does not call transformers' attention functions, so its inside is not seen",
            ("attn_in", "attn_out"),
        )
    event = events[0]
    linears = [(c, found) for c in inside if (found := linear_of(trace, c)) is not None]
    norms = [(c, found) for c in inside if (found := norm_of(trace, c)) is not None]
    query, value = (trace.value[event.inputs[name]] for name in ("query", "value"))
    read = trace.root(part.first.inputs[part.sublayer.read.key])
    projected = _value(trace, linears, event, n_pos, read)
    n_heads, d_head = query.shape[1], value.shape[-1]
    output = next((found for call, found in linears if _returns(trace, call, part.raw_node)), None)
    return Mixer(
        module=event.module,
        path=event.path.removesuffix("@attention").rstrip("."),
        query=_before_rotation(trace, linears, event.inputs["query"], n_pos, read),
        key=_before_rotation(trace, linears, event.inputs["key"], n_pos, read),
        value=projected,
        z=_z(trace, output, event, n_heads, d_head),
        output=output or Refusal("the attention's output is not that of a linear map", ("attn_out",)),
        **_head_norms(trace, norms, event, n_pos),  # type: ignore[arg-type]
        n_heads=n_heads,
        n_kv_heads=value.shape[1] if isinstance(projected, Refusal) else len(projected.index),
        d_head=d_head,
        scaling=event.kwargs["scaling"],
        softcap=event.kwargs["softcap"],
    )


def _returns(trace: Trace, call: Call, node: int) -> bool:
    return any(trace.root(value) == trace.root(node) for value in call.outputs.values())


def _value(trace: Trace, linears: Linears, event: Call, n_pos: int, read: int) -> Projection | Refusal:
    """The value, whose way from its projection is made of views alone; heads that a family repeats count once."""
    d_head = trace.value[event.inputs["value"]].shape[-1]
    for call, found in reversed(linears):
        index = channels(trace, call, event.inputs["value"], n_pos)
        if index is not None:
            return _projection(trace, call, found, _without_repeats(index.reshape(-1, d_head)), read)
    return Refusal("the value is no slice of a projection's output", ("z", "attn_out"))


def _before_rotation(trace: Trace, linears: Linears, node: int, n_pos: int, read: int) -> Projection | Refusal:
    """The projection behind a rotated or normed query or key, by heads as the attention function holds them."""
    behind = trace.ancestors(node, since=linears[0][0].first_input if linears else 0)
    _, heads, _, d_head = trace.value[node].shape
    for call, found in reversed(linears):
        if next(iter(call.outputs.values())) not in behind:
            continue
        for candidate in sorted(behind):
            shape = trace.value[candidate].shape
            by_head = (shape[-1] == d_head and len(shape) == 4) or shape[-1] == heads * d_head
            if trace.value[candidate].numel() == trace.value[node].numel() and by_head:
                index = channels(trace, call, candidate, n_pos)
                if index is not None:
                    return _projection(trace, call, found, index.reshape(heads, d_head), read)
        break
    return Refusal("no projection's output is this tensor before rotation", ("attn_in", "query_rot", "key_rot"))


def _projection(trace: Trace, call: Call, found: Linear, index: Tensor, read: int) -> Projection:
    of_input = trace.root(next(iter(call.inputs.values()))) == read
    return Projection(channel_tap(call, index), found, index, of_input)


def _without_repeats(index: Tensor) -> Tensor:
    """Heads that a family repeats before mixing, once each."""
    keep = [0] + [i for i in range(1, len(index)) if not torch.equal(index[i], index[i - 1])]
    return index[keep]


def _z(trace: Trace, output: Linear | None, event: Call, n_heads: int, d_head: int) -> Tap | Refusal:
    call = None if output is None else trace.calls_of(output.path)[0]
    if call is None:
        return Refusal("the attention's output is not that of a linear map", ("attn_out",))
    key, entered = next(iter(call.inputs.items()))
    if trace.value[entered].shape[-1] != n_heads * d_head:
        return Refusal("the output projection does not read the mixed values head by head", ("attn_out",))
    if event.outputs["output"] not in trace.ancestors(entered, since=event.inputs["value"]):
        return Refusal("the output projection reads something else than the mixed values", ("attn_out",))
    return input_tap(call, key).then(Channels(torch.arange(n_heads * d_head).view(n_heads, d_head)))


def _head_norms(trace: Trace, norms: list[tuple[Call, Norm]], event: Call, n_pos: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for which, name in (("q", "query"), ("k", "key")):
        behind = trace.ancestors(event.inputs[name], since=norms[0][0].first_input if norms else 0)
        mine = [(c, n) for c, n in norms if next(iter(c.outputs.values())) in behind]
        tap = _norm_tap(trace, mine[-1][0], trace.value[event.inputs[name]], n_pos) if mine else None
        absent = Refusal(f"this attention has no norm on its {name}", (name,))
        found[f"{which}_norm"] = mine[-1][1] if mine and tap is not None else absent
        found[f"{which}_norm_tap"] = tap or absent
    return found


def _norm_tap(trace: Trace, call: Call, value: Tensor, n_pos: int) -> Tap | None:
    shape = trace.value[next(iter(call.inputs.values()))].shape
    heads, d_head = value.shape[1], value.shape[-1]
    steps: tuple[Step, ...]
    if len(shape) == 4 and shape[1] == n_pos:
        steps = ()
    elif len(shape) == 4 and shape[2] == n_pos:
        steps = (HeadsFirst(),)
    elif shape[-1] == heads * d_head:
        steps = (Channels(torch.arange(heads * d_head).view(heads, d_head)),)
    else:
        return None
    return Tap(call.path, call.module, "output", None, steps)
