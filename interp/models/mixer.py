"""The inside of softmax attention: which projections feed it, and which channels of them are which head."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from interp.models.anatomy import Linear, Mixer, Projection, Refusal, Side, Tap
from interp.models.flow import constant_factor
from interp.models.layout import VIEWS, channel_tap, channels, clip
from interp.models.neurons import activation_of, pre_activation
from interp.models.norms import Norm
from interp.models.probe import Call, Key, Trace
from interp.models.recognise import linear_of, norm_of
from interp.models.sublayers import Part, input_tap
from interp.models.transforms import Channels, HeadsFirst, Step

Linears = list[tuple[Call, Linear]]
Norms = list[tuple[Call, Norm]]


class Event(NamedTuple):
    """Where the scores become the mixed values: nodes of the trace."""

    module: nn.Module
    path: str
    side: Side
    query: int | None
    key: int | None
    value: int
    output: int
    n_heads: int
    constants: dict[str, Any]


def mixer_of(trace: Trace, part: Part, n_pos: int) -> Mixer | Refusal:
    """The inside of softmax attention, from what its attention function received or its own softmax gave."""
    inside = trace.inside(part.core)
    event = event_of(trace, part, n_pos)
    if isinstance(event, Refusal):
        return event
    linears = [(c, found) for c in inside if (found := linear_of(trace, c)) is not None]
    norms = [(c, found) for c in inside if (found := norm_of(trace, c)) is not None]
    value = trace.value[event.value]
    read = trace.root(part.read_node)
    projected = value_of(trace, linears, norms, event.value, n_pos, read)
    output = next((found for call, found in linears if _returns(trace, call, part.raw_node)), None)
    width = query_width(trace, event)
    n_kv_heads = _kv_heads(trace, event, projected)
    gate, activation = gate_of(trace, linears, output, event, n_pos, read)
    return Mixer(
        module=event.module,
        path=event.path,
        query=before_rotation(trace, linears, event.query, n_pos, width, read),
        key=before_rotation(trace, linears, event.key, n_pos, width, read),
        value=projected,
        z=z_of(trace, output, event, value.shape[-1]),
        output=output or Refusal("the attention's output is not that of a linear map", ("attn_out",)),
        **head_norms(trace, norms, event, n_pos),  # type: ignore[arg-type]
        n_heads=event.n_heads,
        n_kv_heads=n_kv_heads,
        key_repeats=key_repeats(trace, event, n_kv_heads, n_pos),
        d_head=value.shape[-1],
        side=event.side,
        gate=gate,
        gate_activation=activation,
        **event.constants,
    )


def event_of(trace: Trace, part: Part, n_pos: int) -> Event | Refusal:
    """Where the sublayer computes its attention matrix."""
    event = _registered(trace, trace.inside(part.core)) or _own_softmax(trace, part)
    if event is None:
        return Refusal("this token mixer computes no attention matrix that is seen", ("attn_in", "attn_out"))
    if event.key is not None and event.side == "attention" and trace.value[event.key].shape[2] != n_pos:
        return Refusal("this attention has keys that belong to no one position", ("attn_in", "attn_out"))
    return event


def query_width(trace: Trace, event: Event) -> int:
    """Channels per head of queries and keys; 0 where nothing shows them."""
    return 0 if event.query is None else trace.value[event.query].shape[-1]


def key_repeats(trace: Trace, event: Event, n_kv_heads: int, n_pos: int) -> int:
    """How often each key head stands in what the product with the queries is given."""
    if event.key is None:
        return 1
    return max(1, trace.value[event.key].numel() // (n_pos * query_width(trace, event)) // n_kv_heads)


def _kv_heads(trace: Trace, event: Event, value: Projection | Refusal) -> int:
    """Heads of keys and values: those of the value's projection, else as many as the attention function was given."""
    if isinstance(value, Projection):
        return len(value.index)
    held = trace.value[event.value].shape
    return held[1] if len(held) == 4 else event.n_heads


def _registered(trace: Trace, inside: list[Call]) -> Event | None:
    """The one call of the observed attention function."""
    events = [c for c in inside if c.path.endswith("@attention")]
    if len(events) != 1:
        return None
    event = events[0]
    query, key, value = (event.inputs[name] for name in ("query", "key", "value"))
    heads = trace.value[query].shape[1]
    path, output = event.path.removesuffix("@attention").rstrip("."), event.outputs["output"]
    constants = {name: event.kwargs[name] for name in ("scaling", "softcap", "sink")}
    return Event(event.module, path, "attention", query, key, value, output, heads, constants)


def _own_softmax(trace: Trace, part: Part) -> Event | None:
    """The one softmax over [batch, heads, query, key] in the sublayer, and the product that mixes values with it."""
    behind = trace.ancestors(part.raw_node, since=part.read_node)
    found = [op for op in trace.ops if op.name == "_softmax" and op.outputs[0] in behind]
    shapes = [trace.value[op.outputs[0]].shape for op in found]
    if len(found) != 1 or len(shapes[0]) != 4 or shapes[0][-1] != shapes[0][-2]:
        return None
    pending, mixes = [found[0].outputs[0]], []
    while pending:
        for op in trace.consumers.get(pending.pop(), ()):
            if op.name in ("bmm", "matmul", "mm"):
                mixes.append(op)
            elif op.name in VIEWS and op.outputs:
                pending.append(op.outputs[0])
    if len(mixes) != 1 or mixes[0].inputs[0] not in behind:
        return None
    module, value, output = part.core.module, mixes[0].inputs[1], mixes[0].outputs[0]
    product = _score_product(trace, found[0].inputs[0])
    query, key, constants = None, None, {}
    if product is not None:
        query, key = product.factors
        constants = {"scaling": product.scale, "biased": product.biased}
    return Event(module, part.core.path, "softmax", query, key, value, output, shapes[0][1], constants)


def _unrepeated(trace: Trace, node: int) -> int:
    """Before one head was spread over several for the product."""
    before = node
    while (op := trace.producer.get(before)) is not None and op.name in ("view", "_unsafe_view", "expand", "clone"):
        if trace.value[op.inputs[0]].numel() < trace.value[before].numel():
            return op.inputs[0]
        before = op.inputs[0]
    return node


class _Product(NamedTuple):
    """scores = scale · query key + (where `biased`) something else."""

    factors: tuple[int, int]
    scale: float
    biased: bool


def _score_product(trace: Trace, node: int, depth: int = 12) -> _Product | None:
    """The product of queries and keys that the softmax's argument was made of, by constants, sums and masks."""
    op = trace.producer.get(trace.root(node))
    if op is None or not depth:
        return None
    if op.name == "bmm":
        return _Product((_unrepeated(trace, op.inputs[0]), _unrepeated(trace, op.inputs[1])), 1.0, False)
    if op.name == "baddbmm":
        factors = _unrepeated(trace, op.inputs[1]), _unrepeated(trace, op.inputs[2])
        return _Product(factors, float(op.kwargs.get("alpha", 1)), True)
    if (constant := constant_factor(trace, op)) is not None:
        found = _score_product(trace, constant[0], depth - 1)
        return None if found is None else found._replace(scale=found.scale * constant[1])
    if op.name not in ("add", "sub", "where", "masked_fill", "maximum"):
        return None
    for operand in op.inputs:
        if (found := _score_product(trace, operand, depth - 1)) is not None:
            return found._replace(biased=found.biased or op.name in ("add", "sub"))
    return None


def _returns(trace: Trace, call: Call, node: int) -> bool:
    return any(trace.root(value) == trace.root(node) for value in call.outputs.values())


def value_of(trace: Trace, linears: Linears, norms: Norms, node: int, n_pos: int, read: int) -> Projection | Refusal:
    """The value, whose way from its projection is made of views, a clamp or a norm; repeated heads count once."""
    d_head = trace.value[node].shape[-1]
    for call, found in reversed(linears):
        index = channels(trace, call, node, n_pos)
        if index is not None:
            projection = projection_of(trace, call, found, _without_repeats(index.reshape(-1, d_head)), read)
            bounds = clip(trace, call, node)
            return projection if bounds is None else replace(projection, tap=projection.tap.then(bounds), clip=bounds)
    for call, norm in reversed(norms):
        tap = _norm_tap(trace, call, trace.value[node].numel() // (n_pos * d_head), d_head, n_pos)
        held = HeadsFirst().read(trace.value[node]) if trace.value[node].ndim == 4 else None
        if tap is None or held is None or not torch.equal(tap.read(trace.value[_only(call.outputs)]), held):
            continue
        for own, found in reversed(linears):
            index = channels(trace, own, _only(call.inputs), n_pos)
            if index is not None:
                projection = projection_of(trace, own, found, index.reshape(-1, d_head), read)
                return replace(projection, tap=tap, norm=norm)
    return Refusal("the value is no slice of a projection's output", ("z", "attn_out"))


def _only(nodes: dict[Key, int]) -> int:
    return next(iter(nodes.values()))


def before_rotation(
    trace: Trace, linears: Linears, node: int | None, n_pos: int, d_head: int, read: int
) -> Projection | Refusal:
    """The projection behind a rotated or normed query or key, by heads as the attention function holds them."""
    if node is None:
        return Refusal(
            "this attention module multiplies queries and keys inside, where nothing shows them", ("attn_in",)
        )
    behind = trace.ancestors(node, since=linears[0][0].first_input if linears else 0)
    heads = trace.value[node].numel() // (n_pos * d_head)
    for call, found in reversed(linears):
        if next(iter(call.outputs.values())) not in behind:
            continue
        for candidate in sorted(behind):
            shape = trace.value[candidate].shape
            by_head = (shape[-1] == d_head and len(shape) == 4) or shape[-1] == heads * d_head
            if trace.value[candidate].numel() == trace.value[node].numel() and by_head:
                index = channels(trace, call, candidate, n_pos)
                if index is not None:
                    return projection_of(trace, call, found, _without_repeats(index.reshape(heads, d_head)), read)
        break
    return Refusal("no projection's output is this tensor before rotation", ("attn_in", "query_rot", "key_rot"))


def projection_of(trace: Trace, call: Call, found: Linear, index: Tensor, read: int) -> Projection:
    """Channels `index` ([heads, d_head]) of a linear map; `read` is the node that the attention receives."""
    of_input = trace.root(next(iter(call.inputs.values()))) == read
    return Projection(channel_tap(trace, call, index), found, index, of_input)


def _without_repeats(index: Tensor) -> Tensor:
    """Heads that a family repeats before mixing, once each."""
    keep = [0] + [i for i in range(1, len(index)) if not torch.equal(index[i], index[i - 1])]
    return index[keep]


def z_of(trace: Trace, output: Linear | None, event: Event, d_head: int) -> Tap | Refusal:
    """The mixed values, where the output projection reads them."""
    call = None if output is None else trace.calls_of(output.path)[0]
    if call is None:
        return Refusal("the attention's output is not that of a linear map", ("attn_out",))
    key, entered = next(iter(call.inputs.items()))
    width = event.n_heads * d_head
    if trace.value[entered].shape[-1] != width:
        return Refusal("the output projection does not read the mixed values head by head", ("attn_out",))
    if event.output not in trace.ancestors(entered, since=event.value):
        return Refusal("the output projection reads something else than the mixed values", ("attn_out",))
    return input_tap(call, key).then(Channels(torch.arange(width).view(event.n_heads, d_head)))


def gate_of(
    trace: Trace, linears: Linears, output: Linear | None, event: Event, n_pos: int, read: int
) -> tuple[Projection | Refusal, Callable[[Tensor], Tensor] | None]:
    """What multiplies the mixed values before the output projection, and the function of it that does."""
    absent = Refusal("this attention has no gate", ("z",))
    if output is None:
        return absent, None
    entered = next(iter(trace.calls_of(output.path)[0].inputs.values()))
    op = trace.producer.get(trace.root(entered))
    if op is None or op.name != "mul" or len(op.inputs) != 2:
        return absent, None
    for mixed, gate in (op.inputs, op.inputs[::-1]):
        pre = pre_activation(trace, linears, gate, n_pos)
        if pre is None or event.output not in trace.ancestors(mixed, since=event.value):
            continue
        call, index, node = pre
        found = next(linear for own, linear in linears if own is call)
        width = trace.value[event.value].shape[-1]
        if index.numel() == event.n_heads * width:
            projection = projection_of(trace, call, found, index.reshape(event.n_heads, width), read)
            return projection, activation_of(trace, node, gate)
    return absent, None


def head_norms(trace: Trace, norms: Norms, event: Event, n_pos: int) -> dict[str, object]:
    """By field of `Mixer`: the norms on queries and keys, and where they are."""
    found: dict[str, object] = {}
    for which, name, node in (("q", "query", event.query), ("k", "key", event.key)):
        absent = Refusal(f"this attention has no norm on its {name}", (name,))
        behind = set() if node is None else trace.ancestors(node, since=norms[0][0].first_input if norms else 0)
        mine = [(c, n) for c, n in norms if next(iter(c.outputs.values())) in behind]
        tap = None
        if mine and node is not None and event.query is not None:
            d_head = trace.value[event.query].shape[-1]
            tap = _norm_tap(trace, mine[-1][0], trace.value[node].numel() // (n_pos * d_head), d_head, n_pos)
        if mine and tap is None:
            absent = Refusal(f"what is normed here is a part of the {name}, or what it is made from", (name,))
        found[f"{which}_norm"] = mine[-1][1] if mine and tap is not None else absent
        found[f"{which}_norm_tap"] = tap or absent
    return found


def _norm_tap(trace: Trace, call: Call, heads: int, d_head: int, n_pos: int) -> Tap | None:
    """Where the norm's input and output are; None if it norms anything but all heads of the query or key."""
    shape = trace.value[next(iter(call.inputs.values()))].shape
    if shape.numel() != n_pos * heads * d_head:
        return None
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
