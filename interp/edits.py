"""Edits: what to change at a point, as data that any engine applies with the same arithmetic."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from interp.errors import UserError
from interp.points import Address


@dataclass(frozen=True, eq=False)
class Edit:
    """A change of the tensor at one address; `positions` are absolute and count from 0, all of them where None."""

    address: Address | str
    positions: tuple[int, ...] | None = field(default=None, kw_only=True)

    @property
    def at(self) -> Address:
        return Address.parse(self.address)

    @property
    def tensor(self) -> Tensor | None:
        """The tensor that this edit carries, whose last axis must be as wide as the point."""
        return None

    def by_position(self, n_axes: int) -> bool:
        """Whether the tensor has a row of its own for every position, at a point with `n_axes` axes per position."""
        return False

    def change(self, value: Tensor, positions: Tensor) -> Tensor:
        """The new value of `value`, [pos, ..., width], whose rows stand at the absolute `positions`, [pos]."""
        raise UserError(f"{type(self).__name__} says where to edit but not how; use Add, Scale, Replace or Ablate.")

    def change_matrix(self, value: Tensor, positions: Tensor) -> Tensor:
        """The new value of an attention matrix, [heads, query, key], whose queries stand at `positions`."""
        return self.change(value, positions)

    def apply(self, value: Tensor, positions: Tensor, axis: int = 0) -> Tensor:
        """`value` ([pos, ..., width]) changed where its absolute `positions` ([pos], along `axis`) are selected."""
        new = self.change(value, positions) if axis == 0 else self.change_matrix(value, positions)
        if self.positions is None:
            return new
        chosen = torch.isin(positions, torch.tensor(self.positions, device=positions.device))
        return torch.where(chosen.view(-1, *(1,) * (value.ndim - 1 - axis)), new, value)


@dataclass(frozen=True, eq=False)
class Add(Edit):
    """value + scale · vector; `vector` is [width], or [heads, width] where the point has heads."""

    vector: Tensor
    scale: float = 1.0

    @property
    def tensor(self) -> Tensor:
        return self.vector

    def change(self, value: Tensor, positions: Tensor) -> Tensor:
        return value + self.scale * self.vector.to(value)


@dataclass(frozen=True, eq=False)
class Scale(Edit):
    """value · factor."""

    factor: float

    def change(self, value: Tensor, positions: Tensor) -> Tensor:
        return value * self.factor


@dataclass(frozen=True, eq=False)
class Replace(Edit):
    """A new value: [width] for all positions, or [pos, width], whose row p is for the absolute position p.

    An attention matrix is given as it is captured, [heads, query, key], or one head of it, [query, key].
    """

    value: Tensor

    @property
    def tensor(self) -> Tensor:
        return self.value

    def by_position(self, n_axes: int) -> bool:
        return self.value.ndim == n_axes + 1

    def change(self, value: Tensor, positions: Tensor) -> Tensor:
        new = self.value.to(value)
        if self.by_position(value.ndim - 1):
            new = new[positions.clamp(max=len(new) - 1)]  # rows beyond the last are unselected positions
        return new.expand_as(value)

    def change_matrix(self, value: Tensor, positions: Tensor) -> Tensor:
        return self.value.to(value).expand_as(value)


@dataclass(frozen=True, eq=False)
class Ablate(Edit):
    """Zero."""

    def change(self, value: Tensor, positions: Tensor) -> Tensor:
        return torch.zeros_like(value)


__all__ = ["Ablate", "Add", "Edit", "Replace", "Scale"]
