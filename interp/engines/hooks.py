"""Reading and changing tensors while a model runs: PyTorch hooks for the taps that a batch of requests needs."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from interp.engines.capture_memory import CaptureMemory
from interp.engines.capturing import Buffer, Capturing
from interp.engines.editing import Editing, Pass, Use
from interp.engines.graph import Graph
from interp.engines.visits import Visit
from interp.errors import InterpError
from interp.models.anatomy import MATRIX_SIDES, Tap
from interp.models.attention import AttentionCall, observed, observed_softmax
from interp.models.inside import uncounted, watched_functions
from interp.models.probe import Key
from interp.models.rerun import by_position, pick, put, shares, with_argument
from interp.models.transforms import same_values
from interp.points import POINTS, Address

_ACTIVE: ContextVar["Session | None"] = ContextVar("active_session", default=None)
"""Whose pass this is: a run inside another's hook, or in another thread, is not the outer session's business."""
_ORDER = {name: place for place, name in enumerate(POINTS)}


class Session:
    """The taps of one batch, and what they have read."""

    def __init__(self, uses: Sequence[Use], memory: CaptureMemory, graph: Graph | None = None) -> None:
        # Points that share a tensor (mlp_out and mlp_out_post where nothing stands between) are visited in the order of
        # the table, which is that of the forward pass: an edit at the first shows at the second, never the other way.
        self.uses = sorted(uses, key=lambda use: _ORDER[use.address.name])
        self._memory = memory
        self._capturing = Capturing([use.address for use in uses if use.captured], memory)
        self.streams: dict[Address, Tensor] = {}
        self.now: Pass | None = None
        self.graph = graph
        """Where captured tensors go that stay on the path of the pass."""
        self.traced: dict[Address, Tensor] | None = None
        """While a step is traced: what it captures, one pass of it."""
        self._spans: Sequence[slice] = ()
        self._device = torch.device("cpu")
        self.editing = Editing(self.uses)
        self._plain = graph is None and not any(use.tap.side in ("function", "shares") for use in uses)
        """Whether our own calls of torch functions in a hook count as nobody's."""
        self.aside: nn.Module | None = None
        """The module that is being run once more for what its parts add: edits inside hold, nothing is captured."""

    def start(self, n_columns: int, spans: Sequence[slice], device: torch.device) -> None:
        """Before the first pass: how many columns all passes have together, which of them are each row's prompt, and
        where captures go."""
        self._spans, self._device = spans, device
        if self.graph is None and self.traced is None:
            self._capturing.start(len(spans), n_columns, device)
        self.editing.start([span.stop - span.start for span in spans])

    def begin(self, now: Pass) -> None:
        """Before each pass."""
        self.now = self.editing.now = now
        self._capturing.begin(now.columns)

    @property
    def structure(self) -> tuple[Any, ...]:
        """Everything that a recorded step of this session holds, apart from its inputs."""
        return (*((use.address, use.captured) for use in self.uses), *self.editing.structure)

    def operands(self) -> list[Tensor]:
        """What a recorded step of this session takes beside tokens, positions and buffers."""
        return self.editing.operands(self._device)

    def recording(self, operands: Sequence[Tensor], now: Pass) -> "Session":
        """This session in one pass that is being recorded."""
        inner = Session(self.uses, self._memory)
        inner.traced = {}
        inner.editing = self.editing.recorded(operands)
        inner.start(1, [slice(0, 1) for _ in self._spans], self._device)
        inner.begin(now)
        return inner

    @property
    def needs_matrix(self) -> bool:
        return any(use.tap.side in MATRIX_SIDES for use in self.uses)

    @contextmanager
    def active(self) -> Iterator[None]:
        """The passes inside the context are this session's business."""
        token = _ACTIVE.set(self)
        try:
            yield
        finally:
            _ACTIVE.reset(token)

    def visits(self) -> list[Visit]:
        """What happens at the inputs and outputs of modules; at one place, in this order."""
        found = [] if self.graph is None else [self.graph.beginning]
        for (_, side), uses in self._groups().items():
            module = uses[0].tap.module
            if side == "input":
                hook = self._read_before(uses) if self._only_read(uses) else self._before(uses)
                found.append(Visit(module, "input", hook))
            elif side == "output":
                hook = self._read_after(uses) if self._only_read(uses) else self._after(uses)
                found.append(Visit(module, "output", hook))
        for use in self.uses:
            if use.stream is not None:  # last: it sees what the edits above have made of the stream
                found.append(Visit(use.stream.module, "input", self._other_addend(use.address, use.stream)))
        return found

    def _groups(self) -> dict[tuple[int, str], list[Use]]:
        groups: dict[tuple[int, str], list[Use]] = defaultdict(list)
        for use in self.uses:
            groups[id(use.tap.module), use.tap.side].append(use)
        return groups

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Hooks in place inside the context, none left behind after it."""
        groups = self._groups()
        handles = []
        with ExitStack() as stack:
            stack.enter_context(self.active())
            if self.needs_matrix:
                watch, edit = self._watcher(groups, "attention"), self._editor(groups, "attention")
                stack.enter_context(observed(model, watch, edit=edit))
            own_softmax = [uses[0].tap.module for (_, side), uses in groups.items() if side == "softmax"]
            if own_softmax:
                watch, edit = self._watcher(groups, "softmax"), self._editor(groups, "softmax")
                stack.enter_context(observed_softmax(own_softmax, watch, edit))
            functions = [uses[0].tap.module for (_, side), uses in groups.items() if side == "function"]
            if functions:
                stack.enter_context(watched_functions(functions, self._function_visitor(groups)))
            try:
                for visit in self.visits():
                    handles.append(visit.register())
                for (_, side), uses in groups.items():
                    if side == "shares":
                        hook = self._shares(uses)
                        handles.append(uses[0].tap.module.register_forward_hook(hook, with_kwargs=True))
                yield
            finally:
                for handle in handles:
                    handle.remove()

    def _only_read(self, uses: list[Use]) -> bool:
        """Whether a hook has nothing to do but to copy."""
        return (
            self._plain and self.traced is None and all(use.captured and not use.edits and not use.kept for use in uses)
        )

    def _read_before(self, uses: list[Use]):
        wanted = self._reading(uses)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if _ACTIVE.get() is self:
                for key, read, buffer in wanted:
                    self._capturing.put(buffer, read(_argument(key, args, kwargs)))

        return hook

    def _read_after(self, uses: list[Use]):
        wanted = self._reading(uses)

        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if _ACTIVE.get() is self:
                for key, read, buffer in wanted:
                    self._capturing.put(buffer, read(pick(output, key)))

        return hook

    def _reading(self, uses: list[Use]) -> list[tuple[Key, Callable[[Tensor], Tensor], Buffer]]:
        def read(tap: Tap) -> Callable[[Tensor], Tensor]:
            return (lambda x: tap.read(self._by_position(x))) if tap.steps else self._by_position

        return [(use.tap.key, read(use.tap), self._capturing.buffers[use.address]) for use in uses]

    def _own(self, uses: list[Use]) -> list[Use]:
        return uses if _ACTIVE.get() is self else []

    def _before(self, uses: list[Use]):
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]):
            for use in self._own(uses):
                key = use.tap.key
                with uncounted():
                    new = self._visit(use, _argument(key, args, kwargs))
                if new is not None:
                    args, kwargs = with_argument(key, new, args, kwargs)
            return args, kwargs

        return hook

    def _other_addend(self, address: Address, tap: Tap):
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if _ACTIVE.get() is self:
                self.streams[address] = tap.read(self._by_position(_argument(tap.key, args, kwargs)))

        return hook

    def _after(self, uses: list[Use]):
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any):
            for use in self._own(uses):
                with uncounted():
                    new = self._visit(use, pick(output, use.tap.key))
                if new is not None:
                    output = put(output, use.tap.key, new)
            return output

        return hook

    def _function_visitor(self, groups: dict[tuple[int, str], list[Use]]):
        def visit(module: nn.Module, name: str, number: int, result: Any) -> Any:
            for use in self._own(groups[id(module), "function"]):
                if (name, number) == use.tap.inside:
                    new = self._visit(use, pick(result, use.tap.key))
                    result = result if new is None else put(result, use.tap.key, new)
            return result

        return visit

    def _shares(self, uses: list[Use]):
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            assert self.now is not None
            for use in self._own(uses) if self.aside is None else ():
                self.aside = module
                try:
                    found = shares(use.tap, args, kwargs, *self.now.positions.shape)
                finally:
                    self.aside = None
                self.keep(use, found)

        return hook

    def _watcher(self, groups: dict[tuple[int, str], list[Use]], side: str):
        def watch(module: nn.Module, call: AttentionCall) -> None:
            for use in self._own(groups.get((id(module), side), [])):
                tensor = getattr(call, str(use.tap.key))
                if tensor is None:
                    raise InterpError(f"{use.address}: this family's attention function shows no such tensor.")
                if use.captured and (self.graph is None or not use.tap.writable):
                    self.keep(use, use.tap.read(tensor))

        return watch

    def _editor(self, groups: dict[tuple[int, str], list[Use]], side: str):
        def edit(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
            for use in self._own(groups.get((id(module), side), [])):
                if use.tap.key == name and use.edits:
                    tensor = use.tap.write(tensor, self.editing.changed(use, use.tap.read(tensor)))
                if use.tap.key == name and use.captured and self.graph is not None:
                    value = self.graph.pass_through(use.readers, use.tap.read(tensor), self._spans)
                    tensor = use.tap.write(tensor, value)
            return tensor

        return edit

    def _visit(self, use: Use, x: Tensor) -> Tensor | None:
        """Capture and edit one tensor; the module's new tensor where it is another."""
        assert self.now is not None
        if self.aside is use.tap.module and use.tap.side in ("input", "output"):
            return None  # its edits are in the arguments already, or come after
        shaped = self._by_position(x)
        addend = value = use.tap.read(shaped)
        wanted = use.captured and self.aside is None
        if not use.edits and not (wanted and self.graph is not None):
            if wanted:
                self.keep(use, value)
            self._remember(use, value)
            return None
        stream = None if use.stream is None else self.streams[use.address].to(value.device)
        before = value if stream is None else stream + value
        value = self.editing.changed(use, before) if use.edits else before
        if wanted and self.graph is not None and use.tap.writable:
            value = self.graph.pass_through(use.readers, value, self._spans)
        elif wanted:
            self.keep(use, value)
        self._remember(use, value)
        if not use.tap.writable:
            return None
        if stream is not None:
            new = torch.where(value == before, addend, value - stream)
            value = new if self.graph is None else same_values(new, value - stream)
        new = use.tap.write(shaped, value).reshape(x.shape)
        unchanged = not use.edits and use.tap.steps
        return same_values(x, new) if unchanged and new.is_floating_point() else new

    def _remember(self, use: Use, value: Tensor) -> None:
        """For an edit further on that reads this point."""
        if use.kept and self.aside is None:
            assert self.now is not None
            self.now.kept[use.address] = value.clone()

    def keep(self, use: Use, value: Tensor) -> None:
        """Copy what one pass has at a point into its buffer."""
        if self.graph is not None:
            self.graph.pass_through(use.readers, value, self._spans)
            return
        if self.traced is not None:
            self.traced[use.address] = value
            return
        self.put(use.address, value)

    def put(self, address: Address, value: Tensor) -> None:
        """The same for a tensor that a traced step has returned."""
        self._capturing.put(self._capturing.buffers[address], value)

    def rows(self, address: Address, row: int, columns: slice) -> Tensor:
        """One request's captured rows at `address`; raises `InterpError` where the point's module did not run."""
        if self.graph is not None:
            return self.graph.rows(address, row)
        return self._capturing.rows(address, row, columns)

    def _by_position(self, x: Tensor) -> Tensor:
        """[batch, pos, ...], also where the model has flattened the two into one axis."""
        if x.ndim != 2:
            return x
        assert self.now is not None
        batch, n_pos = self.now.positions.shape
        return by_position(x, batch, n_pos)


def _argument(key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[key] if isinstance(key, int) else kwargs[str(key)]
