"""Reading and changing tensors while a model runs: PyTorch hooks for the taps that a batch of requests needs."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from interp.edits import Context, Edit
from interp.errors import InterpError
from interp.models.anatomy import MATRIX_SIDES, Tap
from interp.models.attention import AttentionCall, observed, observed_softmax
from interp.models.inside import uncounted, watched_functions
from interp.models.probe import Key
from interp.models.rerun import by_position, pick, put, shares
from interp.points import POINTS, Address, Positions

_ACTIVE: ContextVar["Session | None"] = ContextVar("active_session", default=None)
"""Whose pass this is: a run inside another's hook, or in another thread, is not the outer session's business."""
_ORDER = {name: place for place, name in enumerate(POINTS)}


@dataclass
class Use:
    """What the batch wants at one whole point: rows that capture it, and rows' edits in order."""

    address: Address
    tap: Tap
    captured: bool = False
    edits: list[tuple[int, Edit]] = field(default_factory=list)
    kept: bool = False
    """Whether an edit further on reads it in the same pass."""
    stream: Tap | None = None
    """For edits of a sum that no single module passes on: its other addend, where `tap` reads the one to change."""


class Row(NamedTuple):
    """The real tokens of one prompt in one pass."""

    start: int
    """Absolute position of the first."""
    ids: list[int]
    columns: slice


@dataclass
class Pass:
    """Where the forward pass stands: made anew for each one."""

    positions: Tensor
    """[batch, pos], absolute."""
    tokens: Tensor
    """[batch, pos]"""
    spans: Sequence[slice] | None = None
    """Columns of each prompt's real tokens in the first pass; None in a cached step, one new token in each row."""
    kept: dict[Address, Tensor] = field(default_factory=dict)
    """[batch, pos, ...]: what edits read elsewhere, at whole points."""
    chosen: dict[tuple[int, Positions], Tensor | bool] = field(default_factory=dict)
    """By row and positions: which tokens of the row are selected, [pos]; True for all of them, False for none."""

    @cached_property
    def rows(self) -> list[Row]:
        """Read from the device once, and only where an edit needs it."""
        starts = self.positions[:, 0] if self.spans is None else torch.zeros(len(self.tokens), dtype=torch.long)
        spans = self.spans or [slice(0, 1)] * len(self.tokens)
        each = zip(starts.tolist(), self.tokens.tolist(), spans, strict=True)
        return [Row(start, ids[columns], columns) for start, ids, columns in each]


class Session:
    """The taps of one batch; `captured` collects one copy per pass and point, [batch, pos, ...]."""

    def __init__(self, uses: Sequence[Use], lengths: Sequence[int]) -> None:
        # Points that share a tensor (mlp_out and mlp_out_post where nothing stands between) are visited in the order of
        # the table, which is that of the forward pass: an edit at the first shows at the second, never the other way.
        self.uses = sorted(uses, key=lambda use: _ORDER[use.address.name])
        self.captured: dict[Address, list[Tensor]] = defaultdict(list)
        self.streams: dict[Address, Tensor] = {}
        self.now: Pass | None = None
        self.lengths = lengths
        """Of the prompts, in tokens."""
        self.means: dict[tuple[Address, int], Tensor] = {}
        """By point and place among its edits: the mean over the prompt, for an edit that needs it."""
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
        token = _ACTIVE.set(self)
        with ExitStack() as stack:
            stack.callback(_ACTIVE.reset, token)
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
                for (_, side), uses in groups.items():
                    module = uses[0].tap.module
                    if side == "input":
                        handles.append(module.register_forward_pre_hook(self._before(uses), with_kwargs=True))
                    elif side == "output":
                        handles.append(module.register_forward_hook(self._after(uses)))
                    elif side == "shares":
                        handles.append(module.register_forward_hook(self._shares(uses), with_kwargs=True))
                for use in self.uses:
                    if use.stream is not None:  # registered last: it sees what the edits above have made of the stream
                        hook = self._remember(use.address, use.stream)
                        handles.append(use.stream.module.register_forward_pre_hook(hook, with_kwargs=True))
                yield
            finally:
                for handle in handles:
                    handle.remove()

    def _own(self, uses: list[Use]) -> list[Use]:
        return uses if _ACTIVE.get() is self else []

    def _before(self, uses: list[Use]):
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]):
            for use in self._own(uses):
                key = use.tap.key
                with uncounted():
                    new = self._visit(use, _argument(key, args, kwargs))
                if new is not None and isinstance(key, int):
                    args = (*args[:key], new, *args[key + 1 :])
                elif new is not None:
                    kwargs = {**kwargs, str(key): new}
            return args, kwargs

        return hook

    def _remember(self, address: Address, tap: Tap):
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
                self.captured[use.address].append(found)

        return hook

    def _watcher(self, groups: dict[tuple[int, str], list[Use]], side: str):
        def watch(module: nn.Module, call: AttentionCall) -> None:
            for use in self._own(groups.get((id(module), side), [])):
                tensor = getattr(call, str(use.tap.key))
                if tensor is None:
                    raise InterpError(f"{use.address}: this family's attention function shows no such tensor.")
                if use.captured:
                    self.captured[use.address].append(use.tap.read(tensor).clone())

        return watch

    def _editor(self, groups: dict[tuple[int, str], list[Use]], side: str):
        def edit(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
            for use in self._own(groups.get((id(module), side), [])):
                if use.tap.key == name and use.edits:
                    changed = self._matrix if POINTS[use.address.name].matrix else self._changed
                    tensor = use.tap.write(tensor, changed(use, use.tap.read(tensor)))
            return tensor

        return edit

    def _matrix(self, use: Use, value: Tensor) -> Tensor:
        """An attention matrix [batch, heads, query, key] with its edits, each on its own prompt's queries and keys."""
        assert self.now is not None
        value = value.clone()
        for number, (row, edit) in enumerate(use.edits):
            columns = self.now.rows[row].columns
            heads = slice(None) if edit.at.head is None else edit.at.head
            part = value[row, heads][..., columns, columns]
            self._edit(part, use, number, row, edit)
        return value

    def _changed(self, use: Use, value: Tensor) -> Tensor:
        """A point's tensor [batch, pos, ...] with its edits."""
        assert self.now is not None
        value = value.clone()
        for number, (row, edit) in enumerate(use.edits):
            one = edit.at.head if edit.at.stream is None else edit.at.stream
            part = value[row, self.now.rows[row].columns]
            self._edit(part if one is None else part[:, one], use, number, row, edit)
        return value

    def _edit(self, part: Tensor, use: Use, number: int, row: int, edit: Edit) -> None:
        """Apply one edit in place to a view of its prompt's own rows."""
        assert self.now is not None
        if edit.needs_mean and self.now.spans is not None:
            self.means[use.address, number] = part.mean(0)
        selected = self._selected(row, edit.positions, part.device)
        if selected is False:
            return
        columns = self.now.rows[row].columns
        context = Context(
            positions=self.now.positions[row, columns].to(part.device),
            selected=None if selected is True else selected,
            held={read: self._kept(read, row, columns).to(part.device) for read in edit.reads},
            mean=self.means.get((use.address, number)),
        )
        before = part.clone() if torch.is_grad_enabled() else part  # a backward needs what the edit was given
        part.copy_(edit.apply(before, context))

    def _selected(self, row: int, positions: Positions, device: torch.device) -> Tensor | bool:
        assert self.now is not None
        if positions.everywhere:
            return True
        if (row, positions) not in self.now.chosen:
            start, ids, _ = self.now.rows[row]
            found = positions.selected(start, len(ids), self.lengths[row], ids)
            uniform = all(found) or not any(found)
            self.now.chosen[row, positions] = found[0] if uniform else torch.tensor(found, device=device)
        chosen = self.now.chosen[row, positions]
        return chosen if isinstance(chosen, bool) else chosen.to(device)

    def _kept(self, address: Address, row: int, columns: slice) -> Tensor:
        assert self.now is not None
        whole = self.now.kept.get(held(address))
        if whole is None:
            raise InterpError(f"{address} is read by an edit, but the module that holds it has not run before it.")
        return select(whole[row, columns], address)

    def _visit(self, use: Use, x: Tensor) -> Tensor | None:
        """Capture and edit one tensor; the module's new tensor if it was edited."""
        assert self.now is not None
        if self.aside is use.tap.module and use.tap.side in ("input", "output"):
            return None  # its edits are in the arguments already, or come after
        shaped = self._by_position(x)
        value = use.tap.read(shaped)
        if not use.edits:
            if (use.captured or use.kept) and self.aside is None:
                own = value.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
                self._store(use, value if own else value.clone())
            return None
        addend = value
        before = addend if use.stream is None else self.streams[use.address] + addend
        value = self._changed(use, before)
        if (use.captured or use.kept) and self.aside is None:
            self._store(use, value.clone())
        if use.stream is not None:
            value = torch.where(value == before, addend, value - self.streams[use.address])
        return use.tap.write(shaped, value).reshape(x.shape)

    def _store(self, use: Use, value: Tensor) -> None:
        assert self.now is not None
        if use.captured:
            self.captured[use.address].append(value)
        if use.kept:
            self.now.kept[use.address] = value

    def _by_position(self, x: Tensor) -> Tensor:
        """[batch, pos, ...], also where the model has flattened the two into one axis."""
        assert self.now is not None
        batch, n_pos = self.now.positions.shape
        return by_position(x, batch, n_pos)


def _argument(key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[key] if isinstance(key, int) else kwargs[str(key)]


def held(address: Address) -> Address:
    """The point under which an address is read and written: all heads and streams of it.

    What leaves a block of several streams is one tensor under two names.
    """
    if address.name == "resid_post" and address.stream is not None:
        return Address("resid_streams", address.layer)
    return address.whole


def select(tensor: Tensor, address: Address) -> Tensor:
    """One head or stream of a captured tensor, if the address names one."""
    if address.stream is not None:
        return tensor[:, address.stream]
    if address.head is None:
        return tensor
    return tensor[address.head] if POINTS[address.name].matrix else tensor[:, address.head]


def rows(stored: list[Tensor], address: Address, row: int, span: slice, n_new: int) -> Tensor:
    """One prompt's real rows out of the batch's captures: its span of the first pass, one row of each later pass.

    Raises `InterpError` where the point's module did not run.
    """
    if not stored:
        raise InterpError(f"{address}: the module that holds it did not run in this pass.")
    if POINTS[address.name].matrix:
        return stored[0][row][:, span, span]
    first = stored[0][row, span]
    later = [step[row] for step in stored[1 : 1 + n_new]]
    return torch.cat([first, *later]) if later else first
