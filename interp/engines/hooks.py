"""Reading and changing tensors while a model runs: PyTorch hooks for the taps that a batch of requests needs."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from interp.edits import Edit
from interp.errors import InterpError
from interp.models.anatomy import MATRIX_SIDES, Tap
from interp.models.attention import AttentionCall, observed, observed_softmax
from interp.models.inside import uncounted, watched_functions
from interp.models.rerun import by_position, pick, put, shares
from interp.points import POINTS, Address

_ORDER = {name: place for place, name in enumerate(POINTS)}


@dataclass
class Use:
    """What the batch wants at one whole point: rows that capture it, and rows' edits in order."""

    address: Address
    tap: Tap
    captured: bool = False
    edits: list[tuple[int, Edit]] = field(default_factory=list)


@dataclass
class Pass:
    """Where the forward pass stands: set before each one."""

    positions: Tensor
    """[batch, pos], absolute."""


class Session:
    """The taps of one batch; `captured` collects one copy per pass and point, [batch, pos, ...]."""

    def __init__(self, uses: Sequence[Use]) -> None:
        # Points that share a tensor (mlp_out and mlp_out_post where nothing stands between) are visited in the order of
        # the table, which is that of the forward pass: an edit at the first shows at the second, never the other way.
        self.uses = sorted(uses, key=lambda use: _ORDER[use.address.name])
        self.captured: dict[Address, list[Tensor]] = defaultdict(list)
        self.now: Pass | None = None
        self.aside: nn.Module | None = None
        """The module that is being run once more for what its parts add: edits inside hold, nothing is captured."""

    @property
    def needs_matrix(self) -> bool:
        return any(use.tap.side in MATRIX_SIDES for use in self.uses)

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Hooks in place inside the context, none left behind after it."""
        groups: dict[tuple[int, str], list[Use]] = defaultdict(list)
        for use in self.uses:
            groups[id(use.tap.module), use.tap.side].append(use)
        handles = []
        with ExitStack() as stack:
            if self.needs_matrix:
                stack.enter_context(observed(model, self._watcher(groups, "attention")))
            own_softmax = [uses[0].tap.module for (_, side), uses in groups.items() if side == "softmax"]
            if own_softmax:
                stack.enter_context(observed_softmax(own_softmax, self._watcher(groups, "softmax")))
            functions = [uses[0].tap.module for (_, side), uses in groups.items() if side == "function"]
            if functions:
                stack.enter_context(watched_functions(functions, self._function_visitor(groups)))
            try:
                for (_, side), uses in groups.items():
                    module = uses[0].tap.module
                    if side == "input":
                        handles.append(module.register_forward_pre_hook(self._before(uses), with_kwargs=True))
                    elif side == "output":
                        handles.append(module.register_forward_hook(self._after(uses)))
                    elif side == "shares":
                        handles.append(module.register_forward_hook(self._shares(uses), with_kwargs=True))
                yield
            finally:
                for handle in handles:
                    handle.remove()

    def _before(self, uses: list[Use]):
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]):
            for use in uses:
                key = use.tap.key
                x = args[key] if isinstance(key, int) else kwargs[str(key)]
                with uncounted():
                    new = self._visit(use, x)
                if new is not None and isinstance(key, int):
                    args = (*args[:key], new, *args[key + 1 :])
                elif new is not None:
                    kwargs = {**kwargs, str(key): new}
            return args, kwargs

        return hook

    def _after(self, uses: list[Use]):
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any):
            for use in uses:
                with uncounted():
                    new = self._visit(use, pick(output, use.tap.key))
                if new is not None:
                    output = put(output, use.tap.key, new)
            return output

        return hook

    def _function_visitor(self, groups: dict[tuple[int, str], list[Use]]):
        def visit(module: nn.Module, name: str, number: int, result: Any) -> Any:
            for use in groups[id(module), "function"]:
                if (name, number) == use.tap.inside:
                    new = self._visit(use, pick(result, use.tap.key))
                    result = result if new is None else put(result, use.tap.key, new)
            return result

        return visit

    def _shares(self, uses: list[Use]):
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            assert self.now is not None
            for use in uses if self.aside is None else ():
                self.aside = module
                try:
                    found = shares(use.tap, args, kwargs, *self.now.positions.shape)
                finally:
                    self.aside = None
                self.captured[use.address].append(found)

        return hook

    def _watcher(self, groups: dict[tuple[int, str], list[Use]], side: str):
        def watch(module: nn.Module, call: AttentionCall) -> None:
            for use in groups.get((id(module), side), ()):
                tensor = getattr(call, str(use.tap.key))
                if tensor is None:
                    raise InterpError(f"{use.address}: this family's attention function shows no such tensor.")
                self.captured[use.address].append(use.tap.read(tensor).clone())

        return watch

    def _visit(self, use: Use, x: Tensor) -> Tensor | None:
        """Capture and edit one tensor; the module's new tensor if it was edited."""
        assert self.now is not None
        if self.aside is use.tap.module and use.tap.side in ("input", "output"):
            return None  # its edits are in the arguments already, or come after
        batch, n_pos = self.now.positions.shape
        shaped = by_position(x, batch, n_pos)
        value = use.tap.read(shaped)
        if not use.edits:
            if use.captured and self.aside is None:
                own = value.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
                self.captured[use.address].append(value if own else value.clone())
            return None
        value = value.clone()
        for row, edit in use.edits:
            part = value[row] if edit.at.head is None else value[row, :, edit.at.head]
            changed = edit.apply(part, self.now.positions[row])
            if edit.at.head is None:
                value[row] = changed
            else:
                value[row, :, edit.at.head] = changed
        if use.captured and self.aside is None:
            self.captured[use.address].append(value.clone())
        return use.tap.write(shaped, value).reshape(x.shape)


def select(tensor: Tensor, address: Address) -> Tensor:
    """One head of a captured tensor, if the address names one."""
    if address.head is None:
        return tensor
    return tensor[address.head] if address.name in ("attn_scores", "attn_probs") else tensor[:, address.head]


def rows(stored: list[Tensor], address: Address, row: int, span: slice, n_new: int) -> Tensor:
    """One prompt's real rows out of the batch's captures: its span of the first pass, one row of each later pass."""
    if address.name in ("attn_scores", "attn_probs"):
        return stored[0][row][:, span, span]
    first = stored[0][row, span]
    later = [step[row] for step in stored[1 : 1 + n_new]]
    return torch.cat([first, *later]) if later else first
