"""The inside of a sparse MLP: its router's linear map, how logits become weights, and what each expert adds."""

from dataclasses import dataclass

import torch
from torch import Tensor

from interp.models.anatomy import Refusal, Routing, Tap
from interp.models.flow import constant_factor
from interp.models.probe import Call, Node, Op, Trace
from interp.models.recognise import linear_of
from interp.models.rerun import Rerun
from interp.models.selection import Selection, function_tap, innermost, selection_of, selects
from interp.models.sublayers import Part, output_tap
from interp.models.weighting import Ranking, Weighting, fit, ranked_by

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear")
NEAREST = ("mlp_in", "mlp_out")


@dataclass(frozen=True, slots=True)
class _Scoring:
    """The router's linear map."""

    op: Op
    matrix: Tensor
    bias: Tensor | None
    entered: int


def routing_of(trace: Trace, part: Part, n_pos: int) -> Routing | Refusal:
    """The router and the experts of a sparse MLP; a Refusal where the MLP is dense or hides them."""
    if not selects(trace, part):
        return Refusal("this block's MLP is dense: it has no router", ("mlp_act", "mlp_out"))
    selection = selection_of(trace, part, n_pos)
    if selection is None:
        return Refusal("no selection of experts is seen in this block's MLP", NEAREST)
    scoring = _scoring(trace, part, selection.node)
    if scoring is None:
        return Refusal("what selects this MLP's experts is no linear map's output", NEAREST)
    logits = trace.value[scoring.op.outputs[0]].reshape(n_pos, -1)
    sublayer = _sublayer(part)
    if isinstance(sublayer, Refusal) and not selection.told:
        return Refusal(f"what the selection does cannot be checked: {sublayer.reason}", NEAREST)
    return Routing(
        n_selected=selection.chosen.shape[-1],
        logits=_logits(trace, part, scoring),
        weights=selection.weights,
        indices=selection.indices,
        shares=_shares(trace, part, selection, sublayer),
        matrix=scoring.matrix,
        bias=scoring.bias,
        of_input=trace.root(scoring.entered) == trace.root(part.read_node),
        weighting=_weighting(trace, selection, logits),
        ranking=_ranking(trace, selection, scoring, logits),
        n_groups=_groups(trace, selection, scoring, logits.shape),
        sublayer=sublayer,
    )


def _scoring(trace: Trace, part: Part, node: int) -> _Scoring | None:
    """The last product with a parameter on the way to the selection."""
    behind = trace.ancestors(node, since=part.first.first_input)
    first, last = part.first.ops[0], part.core.ops[1]
    for op in reversed(trace.ops[first:last]):
        if op.name not in PRODUCTS or op.outputs[0] not in behind:
            continue
        operands = [a.id for a in op.args if isinstance(a, Node)]
        bias = _parameter(trace, operands.pop(0)) if op.name in ("addmm", "baddbmm") else None
        for entered, other in (operands, operands[::-1]):
            matrix = _parameter(trace, other)
            x, y = trace.value[entered], trace.value[op.outputs[0]]
            if matrix is None or matrix.ndim != 2:
                continue
            matrix = matrix if matrix.shape == (y.shape[-1], x.shape[-1]) else matrix.T
            return _Scoring(op, matrix, bias, entered) if matrix.shape == (y.shape[-1], x.shape[-1]) else None
        return None
    return None


def _parameter(trace: Trace, node: int) -> Tensor | None:
    """The parameter or buffer that `node` is a view or a cast of."""
    while True:
        node = trace.root(node)
        op = trace.producer.get(node)
        if op is None:
            return trace.value[node]
        if op.name not in ("t", "transpose", "permute", "expand"):
            return None
        node = op.inputs[0]


def _logits(trace: Trace, part: Part, scoring: _Scoring) -> Tap | Refusal:
    """The linear module's output; inside a router that does more, the linear function's result."""
    node = scoring.op.outputs[0]
    router = innermost(trace, part, scoring.op)
    if router is None:
        return Refusal("the router's linear map runs in no module of the MLP", NEAREST)
    if len(router.outputs) == 1 and linear_of(trace, router) is not None:
        return output_tap(router, next(iter(router.outputs)))
    tap = function_tap(trace, part, scoring.op, node, None)
    return tap or Refusal("the router computes its logits by a function that is not known here", NEAREST)


def _weighting(trace: Trace, selection: Selection, logits: Tensor) -> Weighting | Refusal:
    node, factor = selection.weights_node, 1.0
    while (op := trace.producer.get(trace.root(node))) is not None and (found := constant_factor(trace, op)):
        node, factor = found[0], factor * found[1]
    return fit(logits, selection.chosen.long(), selection.given, factor) or Refusal(
        "the router's weights follow no known function of its logits", ("router_logits",)
    )


def _between(trace: Trace, selection: Selection, scoring: _Scoring) -> list[Op]:
    """The operations from the logits to the selection."""
    start = scoring.op.outputs[0]
    behind = trace.ancestors(selection.node, since=start)
    return [op for op in trace.ops if op.outputs and op.outputs[0] in behind and op.outputs[0] > start]


def _ranking(trace: Trace, selection: Selection, scoring: _Scoring, logits: Tensor) -> Ranking | None:
    """The logits, unless a parameter with one number per expert is added on the way to the selection."""
    for op in _between(trace, selection, scoring):
        if op.name != "add" or len(op.inputs) != 2:
            continue
        for scores, added in (op.inputs, op.inputs[::-1]):
            bias = _parameter(trace, added)
            if bias is not None and bias.numel() == logits.shape[-1]:
                return ranked_by(logits, trace.value[scores].reshape(logits.shape), bias.reshape(-1))
    return Ranking(None, None)


def _groups(trace: Trace, selection: Selection, scoring: _Scoring, shape: torch.Size) -> int:
    """Into how many groups the scores are split on the way to the selection."""
    for op in _between(trace, selection, scoring):
        split = trace.value[op.outputs[0]].shape
        if len(split) == 3 and split[0] == shape[0] and split[1] * split[2] == shape[1]:
            return split[1]
    return 1


def _sublayer(part: Part) -> Rerun | Refusal:
    """The MLP's own call, where it takes what the MLP receives and nothing else, and returns what the MLP returns."""
    call, raw, read = part.core, part.sublayer.raw, part.sublayer.read
    if part.first is not call or isinstance(read, Refusal):
        return Refusal("it is made of several modules")
    key = read.key
    if len(call.inputs) != 1 or _tensors_deeper(call):
        return Refusal("it takes further tensors")
    if raw.path != call.path or raw.side != "output":
        return Refusal("its output is that of a part of it")
    x = call.args[key] if isinstance(key, int) else call.kwargs[str(key)]
    args = tuple(None if isinstance(a, Tensor) else a for a in call.args)
    kwargs = {name: None if isinstance(a, Tensor) else a for name, a in call.kwargs.items()}
    return Rerun(call.module, args, kwargs, key, x.ndim == 2, raw.key)


def _shares(trace: Trace, part: Part, selection: Selection, sublayer: Rerun | Refusal) -> Tap | Refusal:
    """One expert's weight at a time; only where what two experts add together is what each adds alone."""
    if isinstance(sublayer, Refusal):
        return Refusal(f"the MLP cannot be run by itself, expert by expert: {sublayer.reason}", NEAREST)
    read, whole = (trace.value[node].flatten(0, -2) for node in (part.read_node, part.raw_node))
    first = torch.arange(selection.given.shape[-1]) == 0
    none, one, others = (
        sublayer(read, (selection.weights, lambda old, keep=keep: old * keep.to(old)))
        for keep in (first & ~first, first, ~first)
    )
    scale = max(x.abs().amax().item() for x in (none, one, others, whole))
    if (one + others - none - whole).abs().amax().item() > 64 * torch.finfo(whole.dtype).eps * scale:
        return Refusal("this MLP's output is no sum over experts: a function of their sum follows", NEAREST)
    return Tap(part.core.path, part.core.module, "shares", sublayer.output, masking=selection.weights)


def _tensors_deeper(call: Call) -> bool:
    """Whether tensors hide in containers among the arguments."""
    return any(isinstance(a, (list, tuple, dict)) and len(a) for a in (*call.args, *call.kwargs.values()))
