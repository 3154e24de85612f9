"""The residual stream in a recorded pass: which additions make it, and which module's output each of them adds.

Every addition of which one operand is the stream defines a contribution: its other operand, wherever the family puts
its norms and whichever module performs the addition.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn

from interp.models.probe import Call, Key, Node, Op, Trace
from interp.models.recognise import norm_of


@dataclass(frozen=True, slots=True, eq=False)
class Addition:
    """`result = stream + contribution`."""

    result: int
    contribution: int


@dataclass(frozen=True, slots=True, eq=False)
class Weighing:
    """`result = factor · stream`, as in families that weigh the stream itself before they add to it."""

    result: int
    factor: float | Tensor
    """One number, or one weight per channel."""


@dataclass(frozen=True, slots=True, eq=False)
class Renorming:
    """`result = norm(stream)`, as in families that norm the stream after they have added to it."""

    result: int
    call: Call


@dataclass(frozen=True, slots=True, eq=False)
class Remixing:
    """`result[k] = sum over j of matrix[k, j] · stream[j]`, in trunks that carry several streams."""

    result: int
    matrix: int


Link = Addition | Weighing | Renorming | Remixing


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A module's output and the constant that it was multiplied by on its way to an addition."""

    call: Call
    key: Key
    node: int
    factor: float


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """One call of one block, and where the stream enters and leaves it."""

    call: Call
    group: int
    input_key: Key
    output_key: Key
    links: tuple[Link, ...] | None
    """What happens to the stream, in order; None if the output does not come from the input in such steps."""

    @property
    def enters(self) -> int:
        return self.call.inputs[self.input_key]

    @property
    def leaves(self) -> int:
        return self.call.outputs[self.output_key]

    def stacked(self, trace: Trace) -> bool:
        """Whether the block passes on a stack of streams, [batch, pos, streams, d_model]."""
        return trace.value[self.enters].ndim == 4


def stages(trace: Trace, model: nn.Module) -> list[Stage]:
    """The trunk's blocks in the order in which they ran: members of the outermost module lists that pass a stream."""
    groups: list[list[Stage]] = []
    taken: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(path.startswith(outer + ".") for outer in taken):
            continue
        calls = [trace.calls_of(f"{path}.{name}") for name, _ in module.named_children()]
        if not calls or any(len(found) != 1 for found in calls):
            continue
        members = [stage_of(trace, found[0], len(groups)) for found in calls]
        if any(member is None for member in members):
            continue
        stream = [member for member in members if member is not None]
        chained = all(trace.root(a.leaves) == trace.root(b.enters) for a, b in pairwise(stream))
        if chained:
            groups.append(stream)
            taken.append(path)
    return sorted((stage for group in groups for stage in group), key=lambda stage: stage.call.order)


def stage_of(trace: Trace, call: Call, group: int) -> Stage | None:
    """The pair of an input and an output that the stream connects; else the first pair of equal shape."""
    fallback = None
    for input_key, entered in call.inputs.items():
        x = trace.value[entered]
        if not x.is_floating_point() or x.ndim < 2:
            continue
        for output_key, left in call.outputs.items():
            if trace.value[left].shape != x.shape:
                continue
            links = follow(trace, entered, left, call)
            if links and any(isinstance(link, Addition) for link in links):
                return Stage(call, group, input_key, output_key, tuple(links))
            fallback = fallback or Stage(call, group, input_key, output_key, None)
    return fallback


def follow(trace: Trace, start: int, end: int, within: Call) -> list[Link] | None:
    """The steps that lead from `start` to `end`, in order; None if anything else happened to the stream.

    Where both operands of an addition come from the stream in such steps, neither is a contribution: None as well.
    """
    goal, stacked = trace.root(start), trace.value[start].ndim == 4
    reached: dict[int, bool] = {}

    def reaches(node: int) -> bool:
        node = trace.root(node)
        if node == goal:
            return True
        if node not in reached:
            reached[node] = False
            reached[node] = any(reaches(before) for before, _ in _before(trace, node, within, stacked))
        return reached[node]

    links: list[Link] = []
    node = trace.root(end)
    while node != goal:
        on_stream = [step for step in _before(trace, node, within, stacked) if reaches(step[0])]
        if len(on_stream) != 1:
            return None
        links.append(on_stream[0][1])
        node = trace.root(on_stream[0][0])
    return links[::-1]


def _before(trace: Trace, node: int, within: Call, stacked: bool) -> list[tuple[int, Link]]:
    """What `node` may be the stream's continuation of, each with the step from there to `node`."""
    op = trace.producer.get(trace.root(node))
    if op is None:
        return []
    if operands := addends(trace, op):
        return [(x, Addition(node, other)) for x, other in (operands, operands[::-1])]
    if (constant := constant_factor(trace, op)) is not None:
        return [(constant[0], Weighing(node, constant[1]))]
    if stacked and _remixed(trace, op):
        return [(op.inputs[1], Remixing(node, op.inputs[0]))]
    if (norm := norm_behind(trace, node, within)) is not None:
        return [(next(iter(norm.inputs.values())), Renorming(node, norm))]
    weighed = _weighed(trace, op)
    return [] if weighed is None else [(weighed[0], Weighing(node, weighed[1]))]


def _weighed(trace: Trace, op: Op) -> tuple[int, Tensor] | None:
    """(tensor, w) if the operation multiplies each channel of a tensor by a weight of its own."""
    if op.name == "mul" and len(op.inputs) == 2:
        for stream, weight in (op.inputs, op.inputs[::-1]):
            value = trace.value[weight]
            if trace.producer.get(trace.root(weight)) is None and value.shape == trace.value[stream].shape[-1:]:
                return stream, value
    return None


def _remixed(trace: Trace, op: Op) -> bool:
    """Whether the operation multiplies a stack of streams by one square matrix per position."""
    if op.name != "bmm":
        return False
    matrix, stack = (trace.value[node].shape for node in op.inputs)
    return matrix[-1] == matrix[-2] == stack[-2]


def norm_behind(trace: Trace, node: int, within: Call) -> Call | None:
    """The norm inside `within` that returned `node`, also where the module around it returned it too."""
    for call in _returned_inside(trace, node, within):
        if norm_of(trace, call) is not None:
            return call
    return None


def addends(trace: Trace, op: Op) -> list[int]:
    """The two operands of a plain addition of equal-sized tensors; empty for any other operation."""
    if op.name != "add" or len(op.inputs) != 2 or op.kwargs.get("alpha", 1) != 1:
        return []
    a, b = op.inputs
    return [a, b] if trace.value[a].numel() == trace.value[b].numel() else []


def sources(trace: Trace, node: int, within: Call) -> list[Source] | None:
    """The module outputs that `node` is a sum of, each with its constant factor; None if it is anything else.

    The outermost module inside `within` that returned the value is named.
    """
    factor = 1.0
    while True:
        if (found := returned_inside(trace, node, within)) is not None:
            return [Source(found, key_of(trace, found, node), node, factor)]
        op = trace.producer.get(trace.root(node))
        if op is None:
            return None
        if (constant := constant_factor(trace, op)) is not None:
            node, factor = constant[0], factor * constant[1]
            continue
        if op.name == "add" and len(op.inputs) == 1 and op.args[1:] == (0,):
            node = op.inputs[0]
            continue
        parts = [sources(trace, operand, within) for operand in addends(trace, op)]
        if not parts or any(part is None for part in parts):
            return None
        return [Source(s.call, s.key, s.node, s.factor * factor) for part in parts for s in part or ()]


def returned_inside(trace: Trace, node: int, within: Call) -> Call | None:
    """The outermost call strictly inside `within` that made `node`; a module that passes its input on made nothing."""
    return next(_returned_inside(trace, node, within), None)


def _returned_inside(trace: Trace, node: int, within: Call) -> Iterator[Call]:
    prefix = within.path + "." if within.path else ""
    made = trace.root(node)
    for call in trace.returned_by(node):
        passed_on = made in map(trace.root, call.inputs.values())
        if call.path != within.path and call.path.startswith(prefix) and call.order > within.order and not passed_on:
            yield call


def key_of(trace: Trace, call: Call, node: int) -> Key:
    """Where `node` sits in what `call` returned."""
    return next(key for key, value in call.outputs.items() if trace.root(value) == trace.root(node))


def constant_factor(trace: Trace, op: Op) -> tuple[int, float] | None:
    """(tensor, c) if the operation multiplies or divides one tensor by a plain number."""
    if op.name not in ("mul", "div") or not op.args:
        return None
    left, right = op.args[0], op.args[1] if len(op.args) > 1 else None
    number = _number(trace, right)
    if isinstance(left, Node) and number is not None:
        return left.id, number if op.name == "mul" else 1.0 / number
    number = _number(trace, left)
    if op.name == "mul" and isinstance(right, Node) and number is not None:
        return right.id, number
    return None


def _number(trace: Trace, value: object) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    # A single number made of other single numbers is a weight or a setting; one made of activations is not.
    if not isinstance(value, Node) or trace.value[value.id].numel() != 1:
        return None
    alone = all(trace.value[node].numel() == 1 for node in trace.ancestors(value.id))
    return trace.value[value.id].item() if alone else None
