"""Applying a batch's edits to the tensors of one pass: each to its own prompt's rows, at the positions it selects."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from interp.edits import Context, Edit
from interp.errors import InterpError
from interp.models.anatomy import Tap
from interp.points import POINTS, Address, Positions


@dataclass
class Use:
    """What the batch wants at one whole point: who reads it, and rows' edits in order."""

    address: Address
    tap: Tap
    readers: list[tuple[int, Address]] = field(default_factory=list)
    """Rows that capture it, each with the address that it asked for: this point, or a head or stream of it."""
    edits: list[tuple[int, Edit]] = field(default_factory=list)
    kept: bool = False
    """Whether an edit further on reads it in the same pass."""
    stream: Tap | None = None
    """For edits of a sum that no single module passes on: its other addend, where `tap` reads the one to change."""

    @property
    def captured(self) -> bool:
        """Whether anybody captures it."""
        return bool(self.readers)


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
    columns: slice
    """Which columns of the whole run these are."""
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


class Given(NamedTuple):
    """One edit in a step that is recorded: what it computes with comes from outside."""

    edit: Edit
    selected: Tensor
    """[1], bool"""
    mean: Tensor | None


Key = tuple[Address, int]
"""A point, and an edit's place among those of the point."""


class Editing:
    """The edits of one batch."""

    def __init__(self, uses: Sequence[Use], given: dict[Key, Given] | None = None) -> None:
        self._uses, self._given = uses, given
        self.now: Pass | None = None
        self._lengths: Sequence[int] = ()
        self._means: dict[Key, Tensor] = {}

    def start(self, lengths: Sequence[int]) -> None:
        """Before the first pass: of the prompts, in tokens."""
        self._lengths = lengths

    def changed(self, use: Use, value: Tensor) -> Tensor:
        """A point's tensor with its edits: [batch, pos, ...], or an attention matrix [batch, heads, query, key]."""
        value, matrix = value.clone(), POINTS[use.address.name].matrix
        for number, (row, edit) in enumerate(use.edits):
            one = edit.at.head if edit.at.stream is None else edit.at.stream
            columns = self._columns(row)
            if matrix:
                part = value[row, slice(None) if one is None else one][..., columns, columns]
            else:
                part = value[row, columns] if one is None else value[row, columns, one]
            self._apply(part, use, number, row, edit)
        return value

    def _apply(self, part: Tensor, use: Use, number: int, row: int, edit: Edit) -> None:
        """One edit, in place, on a view of its prompt's own rows."""
        assert self.now is not None
        columns, key = self._columns(row), (use.address, number)
        if self._given is not None:
            edit, selected, mean = self._given[key]
        else:
            if edit.needs_mean and self.now.spans is not None:
                self._means[key] = part.mean(0)
            found = self._selected(row, edit.positions, part.device)
            if found is False:
                return
            selected, mean = None if found is True else found, self._means.get(key)
        context = Context(
            positions=self.now.positions[row, columns].to(part.device),
            selected=selected,
            held={read: self._kept(read, row, columns).to(part.device) for read in edit.reads},
            mean=mean,
        )
        before = part.clone() if torch.is_grad_enabled() else part  # a backward needs what the edit was given
        part.copy_(edit.apply(before, context))

    def _columns(self, row: int) -> slice:
        assert self.now is not None
        return slice(0, 1) if self._given is not None else self.now.rows[row].columns

    def _selected(self, row: int, positions: Positions, device: torch.device) -> Tensor | bool:
        assert self.now is not None
        if positions.everywhere:
            return True
        if (row, positions) not in self.now.chosen:
            start, ids, _ = self.now.rows[row]
            found = positions.selected(start, len(ids), self._lengths[row], ids)
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

    # A step that is recorded: another vector, scale or position is another input, not another graph.

    @property
    def structure(self) -> tuple[tuple[Address, int, int, object], ...]:
        """Everything about the edits that a recorded step holds, apart from its inputs."""
        return tuple(
            (use.address, number, row, edit.structure)
            for use in self._uses
            for number, (row, edit) in enumerate(use.edits)
        )

    def operands(self, device: torch.device) -> list[Tensor]:
        """What a recorded step takes for its edits in this pass, one after the other."""
        found: list[Tensor] = []
        for use in self._uses:
            for number, (row, edit) in enumerate(use.edits):
                chosen = self._selected(row, edit.positions, device)
                found.append(torch.tensor([chosen], device=device) if isinstance(chosen, bool) else chosen)
                found += [self._means[use.address, number]] if edit.needs_mean else []
                found += [
                    x.to(device) if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64, device=device)
                    for x in edit.operands()
                ]
        return found

    def recorded(self, operands: Sequence[Tensor]) -> "Editing":
        """The same edits, computing with `operands`."""
        rest = list(operands)
        given: dict[Key, Given] = {}
        for use in self._uses:
            for number, (_, edit) in enumerate(use.edits):
                selected = rest.pop(0)
                mean = rest.pop(0) if edit.needs_mean else None
                values = [rest.pop(0) for _ in edit.operands()]
                given[use.address, number] = Given(edit.with_operands(values), selected, mean)
        return Editing(self._uses, given)


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
