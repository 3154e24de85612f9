"""The inside of attention and MLP: which projections feed them, and which channels of those projections are which head.

Layouts are read from the run: the reshapes and slices between a projection's output and the place where it is used are
applied to channel numbers instead of activations.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from interp.models.anatomy import Linear, Mixer, Neurons, Refusal, Tap
from interp.models.flow import key_of, sources
from interp.models.norms import Norm, classify
from interp.models.probe import Call, Trace
from interp.models.sublayers import Part, input_tap, norm_of, output_tap
from interp.models.transforms import Channels, HeadsFirst, Step

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
    }
)
ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    nn.functional.silu,
    nn.functional.gelu,
    lambda x: nn.functional.gelu(x, approximate="tanh"),
    nn.functional.relu,
    lambda x: nn.functional.relu(x).square(),
    lambda x: x * torch.sigmoid(1.702 * x),
    torch.sigmoid,
    torch.tanh,
)


def linear(call: Call, x: Tensor, y: Tensor) -> Linear | None:
    """The affine map that this call computes from `x` ([..., in]) to `y` ([..., out]), checked on some channels."""
    weight = getattr(call.module, "weight", None)
    if (
        not isinstance(weight, Tensor)
        or weight.ndim != 2
        or not x.is_floating_point()
        or isinstance(call.module, nn.Embedding)
    ):
        return None
    for transposed in (False, True):
        found = Linear(call.path, call.module, transposed)
        if found.weight.shape != (y.shape[-1], x.shape[-1]):
            continue
        some = slice(None, None, -(-y.shape[-1] // 64))
        rows = found.weight[some].double()
        fitted = x.double() @ rows.T + (0.0 if found.bias is None else found.bias[some].double())
        scale = (x.abs().double() @ rows.abs().T).amax()
        if (fitted - y[..., some].double()).abs().amax() <= 64 * torch.finfo(y.dtype).eps * scale:
            return found
    return None


def linear_of(trace: Trace, call: Call) -> Linear | None:
    """The affine map that this call computed, if it computed one."""
    if len(call.inputs) != 1 or len(call.outputs) != 1:
        return None
    if ("linear", call.order) not in trace.memo:
        x, y = (trace.value[next(iter(nodes.values()))] for nodes in (call.inputs, call.outputs))
        trace.memo["linear", call.order] = linear(call, x, y)
    return trace.memo["linear", call.order]


def channels(trace: Trace, call: Call, target: int, n_pos: int) -> Tensor | None:
    """Which channels of the call's output are `target`'s elements at one position; None unless only views lie between.

    Position 0 of `target` is returned with its remaining axes in order: [heads, d_head] or [width].
    """
    output = next(iter(call.outputs.values()))
    shape = trace.value[output].shape
    numbers = torch.arange(trace.value[output].numel()).view(shape)
    index = trace.replay(target, output, numbers, VIEWS)
    return None if index is None else _at_first_position(index, shape[-1], n_pos)


def _at_first_position(index: Tensor, width: int, n_pos: int) -> Tensor | None:
    position = index // width % n_pos
    for axis, size in enumerate(index.shape):
        if size == n_pos and bool((position.movedim(axis, 0).flatten(1) == torch.arange(n_pos)[:, None]).all()):
            first = (index % width).movedim(axis, 0)[0]
            return first.reshape([n for n in first.shape if n != 1] or [1]) if first.shape[0] == 1 else first
    return None


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
    query, key, value = (trace.value[event.inputs[name]] for name in ("query", "key", "value"))
    n_heads, d_head = query.shape[1], value.shape[-1]
    norms = [(c, found) for c in inside if (found := norm_of(trace, c)) is not None]
    value_call, value_index = _projection(trace, linears, event.inputs["value"], value, n_pos)
    if value_index is not None and value_index.ndim == 2 and value_index.shape[0] > 1:
        value_index = _without_repeats(value_index)
    n_kv = value.shape[1] if value_index is None else value_index.shape[0]
    output = next((found for call, found in linears if _returns(trace, call, part.raw_node)), None)
    return Mixer(
        module=event.module,
        path=event.path.removesuffix("@attention").rstrip("."),
        query=_projected(trace, linears, event.inputs["query"], query, n_pos),
        key=_projected(trace, linears, event.inputs["key"], key, n_pos),
        value=Refusal("the value is no slice of a projection's output", ("z", "attn_out"))
        if value_call is None or value_index is None
        else _channel_tap(value_call[0], value_index),
        value_weight=Refusal("the value is no slice of a projection's output")
        if value_call is None or value_index is None
        else _value_weight(value_call[1], value_index),
        z=_z(trace, output, event, n_heads, d_head),
        output=output or Refusal("the attention's output is not that of a linear map", ("attn_out",)),
        **_head_norms(trace, norms, event, n_pos),  # type: ignore[arg-type]
        n_heads=n_heads,
        n_kv_heads=n_kv,
        d_head=d_head,
    )


def _returns(trace: Trace, call: Call, node: int) -> bool:
    return any(trace.root(value) == trace.root(node) for value in call.outputs.values())


def _projection(
    trace: Trace, linears: list[tuple[Call, Linear]], node: int, value: Tensor, n_pos: int
) -> tuple[tuple[Call, Linear] | None, Tensor | None]:
    for call, found in reversed(linears):
        index = channels(trace, call, node, n_pos)
        if index is not None:
            index = index if index.ndim == 2 else index.reshape(-1, value.shape[-1])
            return (call, found), index
    return None, None


def _projected(trace: Trace, linears: list[tuple[Call, Linear]], node: int, value: Tensor, n_pos: int) -> Tap | Refusal:
    """The projection behind a rotated or normed query or key, as [heads, d_head]."""
    behind = trace.ancestors(node, since=linears[0][0].first_input if linears else 0)
    heads, d_head = value.shape[1], value.shape[-1]
    for call, _ in reversed(linears):
        output = next(iter(call.outputs.values()))
        if output not in behind:
            continue
        for candidate in sorted(behind):
            shape = trace.value[candidate].shape
            by_head = (shape[-1] == d_head and len(shape) == 4) or shape[-1] == heads * d_head
            if trace.value[candidate].numel() == value.numel() and by_head:
                index = channels(trace, call, candidate, n_pos)
                if index is not None:
                    return _channel_tap(call, index.reshape(heads, d_head))
        break
    return Refusal("no projection's output is this tensor before rotation", ("attn_in", "query_rot", "key_rot"))


def _channel_tap(call: Call, index: Tensor) -> Tap:
    return output_tap(call, next(iter(call.outputs))).then(Channels(index))


def _without_repeats(index: Tensor) -> Tensor:
    """Heads that a family repeats before mixing, once each."""
    keep = [0] + [i for i in range(1, len(index)) if not torch.equal(index[i], index[i - 1])]
    return index[keep]


def _value_weight(found: Linear, index: Tensor) -> Callable[[], tuple[Tensor, Tensor | None]]:
    def weight() -> tuple[Tensor, Tensor | None]:
        where = index.to(found.weight.device)
        return found.weight[where], None if found.bias is None else found.bias[where]

    return weight


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


def neurons_of(trace: Trace, part: Part, n_pos: int) -> Neurons | Refusal:
    """The inside of a dense MLP, from its down projection backwards."""
    sparse = Refusal(
        "the MLP's output is not that of one down projection (no dense neurons here)", ("mlp_in", "mlp_out")
    )
    down_call, factor = _down(trace, part)
    down = None if down_call is None else linear_of(trace, down_call)
    if down is None or down_call is None:
        return sparse
    key, act_node = next(iter(down_call.inputs.items()))
    inside = [c for c in trace.calls if part.first.order <= c.order < down_call.order]
    linears = [(c, found) for c in inside if (found := linear_of(trace, c)) is not None]
    act = input_tap(down_call, key)
    behind = trace.producer.get(trace.root(act_node))
    gate, straight = act_node, None
    if behind is not None and behind.name == "mul" and len(behind.inputs) == 2:
        for first, second in (behind.inputs, behind.inputs[::-1]):
            branch = _branch(trace, linears, second, n_pos)
            other = _pre(trace, linears, first, n_pos)
            if branch is not None and other is not None and not _same(branch, other):
                gate, straight = first, branch
    pre = _pre(trace, linears, gate, n_pos)
    unseen = Refusal("the activation's argument is no slice of a projection's output", ("mlp_act",))
    return Neurons(
        down=down,
        multiplier=factor,
        act=act,
        pre=_channel_tap(pre[0], pre[1]) if pre is not None else unseen,
        pre_linear=Refusal("this MLP has no second branch", ("mlp_pre",))
        if straight is None
        else _channel_tap(*straight),
        activation=None if pre is None else _activation(trace, pre[2], gate),
    )


def _down(trace: Trace, part: Part) -> tuple[Call | None, float]:
    direct = [c for c in trace.returned_by(part.raw_node) if linear_of(trace, c) is not None]
    if direct:
        return direct[-1], 1.0
    behind = sources(trace, part.raw_node, part.core)
    if behind is None or len(behind) != 1:
        return None, 1.0
    inner = [c for c in trace.returned_by(behind[0].node) if linear_of(trace, c) is not None]
    return (inner[-1] if inner else None), behind[0].factor


def _branch(trace: Trace, linears: list[tuple[Call, Linear]], node: int, n_pos: int) -> tuple[Call, Tensor] | None:
    for call, _ in reversed(linears):
        index = channels(trace, call, node, n_pos)
        if index is not None:
            return call, index.flatten()
    return None


def _pre(trace: Trace, linears: list[tuple[Call, Linear]], node: int, n_pos: int) -> tuple[Call, Tensor, int] | None:
    """The projection, its channels and the node that the nonlinearity leading to `node` received."""
    behind = trace.ancestors(node, since=linears[0][0].first_input if linears else 0)
    size = trace.value[node].numel()
    for call, _ in reversed(linears):
        if next(iter(call.outputs.values())) not in behind:
            continue
        for candidate in sorted(behind, reverse=True):
            if trace.value[candidate].numel() == size:
                index = channels(trace, call, candidate, n_pos)
                if index is not None:
                    return call, index.flatten(), candidate
    return None


def _same(branch: tuple[Call, Tensor], pre: tuple[Call, Tensor, int]) -> bool:
    return branch[0] is pre[0] and torch.equal(branch[1], pre[1])


def _activation(trace: Trace, pre: int, gate: int) -> Callable[[Tensor], Tensor] | None:
    """The function from the activation's argument to its value, checked on the recorded tensors."""
    x, y = trace.value[pre], trace.value[gate]
    modules = [c.module for c in trace.returned_by(gate) if len(c.inputs) == 1]
    tolerance = 16 * torch.finfo(y.dtype).eps * y.abs().amax()
    with torch.no_grad():
        for function in (*cast(list[Callable[[Tensor], Tensor]], modules), *ACTIVATIONS):
            result = function(x)
            if (
                isinstance(result, Tensor)
                and result.shape == x.shape
                and (result.reshape(y.shape) - y).abs().amax() <= tolerance
            ):
                return function
    return None


__all__ = ["classify", "key_of", "linear", "linear_of", "mixer_of", "neurons_of"]
