"""The inside of a dense MLP: its projections, its activation function, and which channels of them are which neuron."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from interp.models.anatomy import Linear, Neurons, Projection, Refusal
from interp.models.flow import sources
from interp.models.layout import channel_tap, channels
from interp.models.probe import Call, Trace
from interp.models.recognise import linear_of
from interp.models.sublayers import Part, input_tap

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
            other = pre_activation(trace, linears, first, n_pos)
            if branch is not None and other is not None and not _same(branch, other):
                gate, straight = first, branch
    pre = pre_activation(trace, linears, gate, n_pos)
    unseen = Refusal("the activation's argument is no slice of a projection's output", ("mlp_act",))
    return Neurons(
        down=down,
        multiplier=factor,
        act=act,
        pre=channel_tap(trace, pre[0], pre[1]) if pre is not None else unseen,
        pre_linear=Refusal("this MLP has no second branch", ("mlp_pre",))
        if straight is None
        else channel_tap(trace, *straight),
        activation=None if pre is None else activation_of(trace, pre[2], gate),
        projection=None if pre is None else _projection(trace, part, linears, pre[0], pre[1]),
    )


def _projection(trace: Trace, part: Part, linears: list[tuple[Call, Linear]], call: Call, index: Tensor) -> Projection:
    found = next(linear for own, linear in linears if own is call)
    of_input = trace.root(next(iter(call.inputs.values()))) == trace.root(part.read_node)
    return Projection(channel_tap(trace, call, index), found, index[:, None], of_input)


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


def pre_activation(
    trace: Trace, linears: list[tuple[Call, Linear]], node: int, n_pos: int
) -> tuple[Call, Tensor, int] | None:
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


def activation_of(trace: Trace, pre: int, gate: int) -> Callable[[Tensor], Tensor] | None:
    """The function from the activation's argument to its value, checked on the recorded tensors."""
    of_pre = [c for c in trace.returned_by(gate) if [trace.root(n) for n in c.inputs.values()] == [trace.root(pre)]]
    return function_of(trace.value[pre], trace.value[gate], None, [c.module for c in of_pre])


def function_of(
    x: Tensor, y: Tensor, factor: Tensor | None, modules: Sequence[nn.Module]
) -> Callable[[Tensor], Tensor] | None:
    """The one of `modules` and of the known activations whose value at x, times the factor, is y."""
    tolerance = 16 * torch.finfo(y.dtype).eps * y.abs().amax()
    with torch.no_grad():
        for function in (*cast(Sequence[Callable[[Tensor], Tensor]], modules), *ACTIVATIONS):
            result = function(x)
            if isinstance(result, Tensor) and result.shape == x.shape and result.numel() == y.numel():
                result = result if factor is None else result * factor
                if (result.reshape(y.shape) - y).abs().amax() <= tolerance:
                    return function
    return None
