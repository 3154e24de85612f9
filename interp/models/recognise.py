"""What one recorded call computed, if it was a norm or an affine map: told by arithmetic on its tensors."""

import torch
from torch import Tensor, nn

from interp.models.anatomy import Linear
from interp.models.norms import Norm, classify
from interp.models.probe import Call, Trace


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
