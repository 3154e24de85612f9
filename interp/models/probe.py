"""What happens in one forward pass: every tensor operation, and which tensors enter and leave every module.

A node is one value of one tensor. Views and in-place operations make new nodes; every tensor of the pass is kept alive,
because a freed one would give its identity to the next.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from interp.errors import InterpError
from interp.models.parameters import kept_elsewhere, own, packs
from interp.models.values import Values

Key = int | str | None
"""Where a tensor sits in a call: positional index, keyword, or None for a bare output."""


@dataclass(slots=True, eq=False)
class Op:
    """One tensor operation; tensors inside `args` and `kwargs` are replaced by `Node`."""

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A reference to a value inside recorded arguments."""

    id: int


@dataclass(slots=True, eq=False)
class Call:
    """One call of one module (or of the attention function inside one, whose path ends in `@attention`)."""

    path: str
    module: nn.Module
    inputs: dict[Key, int]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: dict[Key, int] = field(default_factory=dict)
    order: int = 0
    ops: tuple[int, int] = (0, 0)
    """First operation that ran inside, and the first that ran after it."""

    @property
    def depth(self) -> int:
        return self.path.count(".") + bool(self.path)

    @property
    def first_input(self) -> int:
        """The oldest node that entered; 0 if none did."""
        return min(self.inputs.values(), default=0)


class Trace:
    """A recorded pass: look up who produced a node, which modules returned it, and what its value was."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.calls: list[Call] = []
        self.producer: dict[int, Op] = {}
        self.value = Values()
        self.consumers: dict[int, list[Op]] = defaultdict(list)
        self.memo: dict[tuple[str, int], Any] = {}
        """What was worked out about calls, by question and call order."""
        self._node: dict[int, int] = {}
        self._overwritten: list[Tensor] = []
        self._by_path: dict[str, list[Call]] = defaultdict(list)
        self._returned: dict[int, list[Call]] = defaultdict(list)
        self._open: list[tuple[Call, int]] = []
        """Calls that are running, each with the first node that was new in it."""
        self._weights: dict[int, tuple[nn.Module, str]] = {}
        self._constant: set[int] = set()
        """Nodes that no input of the pass has a part in."""

    def node(self, tensor: Tensor) -> int:
        """The node that `tensor` holds now; a tensor seen for the first time becomes a leaf."""
        known = self._node.get(id(tensor))
        node = self._new(tensor) if known is None else known
        if self._open and known is None:
            self._constant.add(node)
        if self._open and node not in self._weights and isinstance(tensor, nn.Parameter):
            for call, _ in reversed(self._open):
                name = next((name for name, own in call.module._parameters.items() if own is tensor), None)
                if name is not None:
                    self._weights[node] = call.module, name
                    self._constant.add(node)
                    break
        return node

    def _new(self, tensor: Tensor) -> int:
        self.value.append(tensor)
        self._node[id(tensor)] = len(self.value) - 1
        return len(self.value) - 1

    def record(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        inputs = tuple(self.node(tensor) for tensor in _tensors((args, kwargs)))
        stored_args, stored_kwargs = self._refer(tuple(args)), self._refer(dict(kwargs))
        outputs = tuple(self._new(tensor) for tensor in _tensors(result))
        name = func.overloadpacket.__name__.rstrip("_") if hasattr(func, "overloadpacket") else str(func)
        op = Op(name, func, stored_args, stored_kwargs, inputs, outputs)
        self.ops.append(op)
        constant = bool(inputs) and self._constant.issuperset(inputs) and not _writes(func)
        for node in outputs:
            self.producer[node] = op
            if constant:
                self._constant.add(node)
        for node in inputs:
            self.consumers[node].append(op)

    def preserve(self, tensor: Tensor) -> None:
        """Keep what `tensor` holds now as its node's value: an operation is about to overwrite it in place."""
        self._overwritten.append(tensor)
        self.value[self.node(tensor)] = tensor.clone()

    def _refer(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Node(self.node(value))
        if isinstance(value, dict):
            return {key: self._refer(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._refer(item) for item in value)
        return value

    def enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        inputs: dict[Key, int] = {i: self.node(a) for i, a in enumerate(args) if isinstance(a, Tensor)}
        inputs |= {name: self.node(value) for name, value in kwargs.items() if isinstance(value, Tensor)}
        call = Call(path, module, inputs, args, kwargs, order=len(self.calls), ops=(len(self.ops), len(self.ops)))
        self.calls.append(call)
        self._by_path[path].append(call)
        self._open.append((call, len(self.value)))
        return call

    def leave(self, call: Call, output: Any) -> None:
        _, first = self._open.pop()
        call.outputs = {key: self.node(value) for key, value in output_tensors(output).items()}
        call.ops = (call.ops[0], len(self.ops))
        for node in call.outputs.values():
            self._returned[self.root(node)].append(call)
        if kept_elsewhere(call.module) or packs(call.module):
            self._drop_weights(first)

    def _drop_weights(self, first: int) -> None:
        """Drop what this call fetched or unpacked: a model larger than memory would be held whole by its trace."""
        fetched = [n for n in self._weights if n >= first and kept_elsewhere(self._weights[n][0])]
        storages = {self.value[node].untyped_storage().data_ptr() for node in fetched}
        for node in range(first, len(self.value)):
            op = self.producer.get(node)
            if self.value.dropped(node):
                continue
            if node in fetched:
                module, name = self._weights[node]
                again = partial(_own, module, name)
            elif op is not None and node in self._constant:
                again = partial(self._made_again, op, op.outputs.index(node))
            elif self.value[node].untyped_storage().data_ptr() in storages:
                again = partial(self._made_again, None, node)
            else:
                continue
            dropped = self.value.drop(node, again)
            if self._node.get(id(dropped)) == node:
                del self._node[id(dropped)]  # the next tensor may get its identity

    def _made_again(self, op: Op | None, index: int) -> Tensor:
        if op is None:
            raise InterpError(f"Node {index} of the probe's trace is a weight's file, which is not kept.")
        args, kwargs = self._substitute((op.args, op.kwargs), -1, torch.empty(0))
        with torch.no_grad():
            return next(islice(_tensors(op.func(*args, **kwargs)), index, None))

    def calls_of(self, path: str) -> list[Call]:
        return self._by_path.get(path, [])

    def inside(self, call: Call) -> list[Call]:
        """The calls that happened during `call`, itself first."""
        following = self.calls[call.order :]
        end = next((i for i, c in enumerate(following[1:], 1) if not _is_within(c.path, call.path)), len(following))
        return following[:end]

    def root(self, node: int) -> int:
        """The earliest node with the same elements in the same order: reshapes, copies and full slices undone."""
        while (op := self.producer.get(node)) is not None and op.name in _SAME_ELEMENTS:
            source = op.inputs[0]
            if self.value[source].numel() != self.value[node].numel():
                break
            node = source
        return node

    def returned_by(self, node: int) -> list[Call]:
        """The calls that returned this value, outermost first."""
        return sorted(self._returned.get(self.root(node), ()), key=lambda call: call.depth)

    def replay(
        self, target: int, start: int, value: Tensor, allowed: frozenset[str], passed: frozenset[str] = frozenset()
    ) -> Tensor | None:
        """Apply to `value` what turned `start` into `target`; None if that took an operation outside `allowed`.

        Operations in `passed` keep every element in its place and are left out.
        """
        known: dict[int, Tensor | None] = {start: value}

        def compute(node: int) -> Tensor | None:
            if node not in known:
                op = self.producer.get(node)
                known[node] = None
                if (
                    op is not None
                    and op.name in allowed | passed
                    and op.inputs
                    and (source := compute(op.inputs[0])) is not None
                ):
                    if op.name in passed:
                        known[node] = source
                        return source
                    args, kwargs = self._substitute((op.args, op.kwargs), op.inputs[0], source)
                    result = op.func(*args, **kwargs)
                    known[node] = result if isinstance(result, Tensor) else result[op.outputs.index(node)]
            return known[node]

        return compute(target)

    def _substitute(self, value: Any, node: int, tensor: Tensor) -> Any:
        """Recorded arguments with `tensor` at `node`, and every other node's own value."""
        if isinstance(value, Node):
            return tensor if value.id == node else self.value[value.id]
        if isinstance(value, dict):
            return {key: self._substitute(item, node, tensor) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._substitute(item, node, tensor) for item in value)
        return value

    def ancestors(self, node: int, since: int = 0) -> set[int]:
        """Every node that `node` was computed from, itself included; nodes older than `since` are left out."""
        seen, pending = set(), [node]
        while pending:
            current = pending.pop()
            if current in seen or current < since:
                continue
            seen.add(current)
            if (op := self.producer.get(current)) is not None:
                pending.extend(op.inputs)
        return seen


_SAME_ELEMENTS = frozenset(
    {
        "view",
        "_unsafe_view",
        "reshape",
        "alias",
        "detach",
        "clone",
        "_to_copy",
        "lift_fresh",
        "squeeze",
        "unsqueeze",
        "slice",
        "contiguous",
        "expand",
    }
)


def _own(module: nn.Module, name: str) -> Tensor:
    tensor = own(module, name)
    assert tensor is not None
    return tensor


def _writes(func: Callable[..., Any]) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is None or schema.is_mutable


def _is_within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith((outer + ".", outer + "@"))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def output_tensors(output: Any) -> dict[Key, Tensor]:
    """The tensors directly inside a module's output, by where they sit in it."""
    if isinstance(output, Tensor):
        return {None: output}
    if isinstance(output, dict):
        return {key: value for key, value in output.items() if isinstance(value, Tensor)}
    if isinstance(output, (list, tuple)):
        return {index: value for index, value in enumerate(output) if isinstance(value, Tensor)}
    fields = getattr(output, "__dict__", {})  # an object of the model's own, with its tensors as attributes
    return {name: value for name, value in fields.items() if isinstance(value, Tensor)}


class _Recorder(TorchDispatchMode):
    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                self.trace.preserve(value)
        result = func(*args, **kwargs)
        self.trace.record(func, args, kwargs, result)
        return result


@contextmanager
def recording(model: nn.Module) -> Iterator[Trace]:
    """Record every operation and module call of the passes made inside the context, without gradients."""
    trace, handles, open_calls = Trace(), [], defaultdict(list)

    def attach(path: str, module: nn.Module) -> None:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            open_calls[path].append(trace.enter(path, module, args, kwargs))

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            trace.leave(open_calls[path].pop(), output)

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))

    try:
        for path, module in model.named_modules():
            attach(path, module)
        with torch.no_grad(), _Recorder(trace):
            yield trace
    finally:
        for handle in handles:
            handle.remove()
