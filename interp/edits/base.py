"""What every edit is: an address, positions, and one arithmetic that any engine applies.

An edit of your own is a subclass of `Edit` with a method `change(value, positions)`; it runs on the eager engine, where
Python can be called in the middle of a pass. Those of `interp` are data: they print, compare, hash and travel as JSON.
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from interp.edits.values import Values
from interp.errors import UserError
from interp.points import ALL, POINTS, Address, Positions


@dataclass(frozen=True, eq=False)
class Context:
    """What an edit knows of the rows it is given, apart from their values."""

    positions: Tensor
    """[pos], absolute."""
    selected: Tensor | None = None
    """[pos], bool: where the edit acts; None is everywhere."""
    held: Mapping[Address, Tensor] = field(default_factory=dict)
    """[pos, ..., width] of the same rows at the points that the edit reads elsewhere."""
    mean: Tensor | None = None
    """[..., width]: the mean over the prompt's own positions, for an edit that needs it."""


@dataclass(frozen=True, repr=False)
class Edit:
    """A change of the tensor at one address; `positions` are absolute, all of them where None."""

    address: Address | str
    positions: Any = field(default=None, kw_only=True)
    """Any selector of `interp.points.Positions`; kept as one."""

    portable: ClassVar[bool] = False
    """Whether it is data that may leave the process and be compiled."""

    def __post_init__(self) -> None:
        self._set(address=Address.parse(self.address), positions=Positions.parse(self.positions))

    def _set(self, **values: Any) -> None:
        """Fields in their kept form, while the edit is made."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def at(self) -> Address:
        """The address that is written."""
        return Address.parse(self.address)

    @property
    def reads(self) -> tuple[Address, ...]:
        """Addresses whose values at the same rows it needs; they come before `at` in the forward pass."""
        return ()

    @property
    def needs_mean(self) -> bool:
        """Whether it needs the mean of what it changes over the prompt's own positions."""
        return False

    @property
    def carried(self) -> Tensor | None:
        """The tensor that must fit the point: as wide as it, or with a row per position."""
        return None

    @property
    def by_position(self) -> bool:
        """Whether `carried` has a row of its own for every position, counted from 0."""
        return False

    @cached_property
    def matrix(self) -> bool:
        """Whether it changes an attention matrix, [heads, query, key], or one head of it."""
        return POINTS[self.at.name].matrix

    @cached_property
    def axes(self) -> int:
        """How many axes the changed tensor has per position."""
        shape, at = POINTS[self.at.name].shape, self.at
        return len(shape) - (at.head is not None) - (at.stream is not None and shape[0] == "streams")

    @cached_property
    def _operands(self) -> dict[str, Any]:
        """Tensors and floats that the arithmetic uses, by name."""
        return {}

    def operands(self) -> list[Tensor | float]:
        """The tensors and floats that the arithmetic uses, in an order that depends on `structure` alone."""
        return list(self._operands.values())

    def with_operands(self, values: Sequence[Any]) -> "Edit":
        """This edit computing with `values` instead of its own `operands()`: tensors, 0-dimensional ones for floats.

        Its fields, and so its hash and print, stay those of the original.
        """
        if len(values) != len(self._operands):
            raise ValueError(f"{self} has {len(self._operands)} operands, not {len(values)}.")
        new = copy.copy(self)
        new.__dict__["_operands"] = dict(zip(self._operands, values, strict=True))
        return new

    @property
    def static(self) -> tuple[Any, ...]:
        """What decides the arithmetic beside type, address and operands."""
        return () if self.portable else (self,)

    @property
    def structure(self) -> tuple[Any, ...]:
        """Equal for two edits whose arithmetic differs in operands and positions alone."""
        forms = tuple(
            (name, tuple(value.shape), value.dtype) if isinstance(value, Tensor) else name
            for name, value in self._operands.items()
        )
        return (type(self), self.at, *self.static, forms)

    def change(self, value: Tensor, positions: Tensor) -> Tensor:
        """The new value of `value`, [pos, ..., width], whose rows stand at the absolute `positions`, [pos].

        At an attention matrix: [heads, query, key], or [query, key] for one head, and the positions of its queries.
        """
        raise UserError(f"{type(self).__name__} says where to edit but not how: give it a method change.")

    def compute(self, value: Tensor, context: Context) -> Tensor:
        """The new value at every row, selected or not."""
        return self.change(value, context.positions)

    def apply(self, tensor: Tensor, context: Context) -> Tensor:
        """`tensor` with its selected rows changed, the others as they are, bit for bit.

        [pos, ..., width] of one prompt; an attention matrix is [heads, query, key] or [query, key], its positions are
        the queries'.
        """
        new = self.compute(tensor, context)
        if context.selected is None:
            return new
        behind = 1 if self.matrix else self.axes
        return torch.where(context.selected.view(-1, *(1,) * behind), new, tensor)

    def arguments(self) -> dict[str, Any]:
        """What it was made of, by the names of its constructor."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def __repr__(self) -> str:
        parts = []
        for name, parameter in inspect.signature(type(self)).parameters.items():
            value = getattr(self, name)
            if name == "positions":
                parts += [] if value == ALL else [f"positions={value}"]
            elif parameter.default is inspect.Parameter.empty:
                parts.append(str(value))
            elif isinstance(value, Values) or value != parameter.default:
                parts.append(f"{name}={value}")
        return f"{type(self).__name__}({', '.join(parts)})"
