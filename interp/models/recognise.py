"""What one recorded call computed, if it was a norm or an affine map: told by arithmetic on its tensors."""

import torch
from torch import Tensor, nn

from interp.models.linear import Linear, Packed
from interp.models.norms import Norm, classify
from interp.models.parameters import packs
from interp.models.probe import Call, Trace

COARSE = 0.05
"""What eight bits of input leave of linearity, and no nonlinear module does."""


def norm_of(trace: Trace, call: Call) -> Norm | None:
    """The norm that this call computed, if it computed one."""
    if len(call.inputs) < 1 or len(call.outputs) != 1:
        return None
    if ("norm", call.order) not in trace.memo:
        x, y = (trace.value[next(iter(nodes.values()))] for nodes in (call.inputs, call.outputs))
        trace.memo["norm", call.order] = classify(call.path, call.module, x, y)
    return trace.memo["norm", call.order]


def linear(call: Call, x: Tensor, y: Tensor) -> Linear | None:
    """The affine map that this call computes from `x` ([..., in]) to `y` ([..., out]), checked on some channels."""
    weight = getattr(call.module, "weight", None)
    if not x.is_floating_point() or isinstance(call.module, nn.Embedding):
        return None
    if packs(call.module):
        return _packed(call, x, y)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return None
    for transposed in (False, True):
        found = Linear(call.path, call.module, transposed)
        if found.shape != (y.shape[-1], x.shape[-1]):
            continue
        some = slice(None, None, -(-y.shape[-1] // 64))
        rows = found.weight[some].to(x.device).double()
        fitted = x.double() @ rows.T + (0.0 if found.bias is None else found.bias[some].to(x.device).double())
        scale = (x.abs().double() @ rows.abs().T).amax()
        if (fitted - y[..., some].double()).abs().amax() <= 64 * torch.finfo(y.dtype).eps * scale:
            return found
    return None


def _packed(call: Call, x: Tensor, y: Tensor) -> Linear | None:
    """A module that packs its matrix, told by what it computes: f(a) + f(b) = f(a + b) + f(0) for rows a, b of `x`.

    Within the dtype's rounding the map is linear; within `COARSE` of its size, it rounds what it reads.
    """
    if x.ndim < 2 or x.shape[:-1] != y.shape[:-1]:
        return None
    rows = x.reshape(-1, x.shape[-1])
    others = rows.roll(1, 0)
    with torch.no_grad():
        outputs = [call.module.forward(z) for z in (rows, others, rows + others, torch.zeros_like(rows))]
    first, second, both, none = (output.double() for output in outputs)
    size, gap = first.norm() + second.norm(), (first + second - both - none).norm()
    rounding = 4 * torch.finfo(y.dtype).eps * size
    if not ((first - y.reshape(first.shape)).norm() <= rounding and gap <= COARSE * size):
        return None  # it depends on more than this input, or is not linear
    exact = bool(gap <= rounding)
    return Linear(call.path, call.module, packed=Packed(x.dtype, (y.shape[-1], x.shape[-1]), exact))


def linear_of(trace: Trace, call: Call) -> Linear | None:
    """The affine map that this call computed, if it computed one."""
    if len(call.inputs) != 1 or len(call.outputs) != 1:
        return None
    if ("linear", call.order) not in trace.memo:
        x, y = (trace.value[next(iter(nodes.values()))] for nodes in (call.inputs, call.outputs))
        trace.memo["linear", call.order] = linear(call, x, y)
    return trace.memo["linear", call.order]
