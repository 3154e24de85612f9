"""Edits along directions: with v̂ = v / |v| and p = x · v̂ per position (and head),

Project   x − (1 − keep) p v̂
Cap       x − max(0, p − max) v̂ + max(0, min − p) v̂
Swap      x − 2 (x · w) w,  w = (û − v̂) / |û − v̂|

Swap is the reflection that takes û to v̂ and v̂ to û and leaves alone what is orthogonal to both; where û and v̂ are
orthogonal, it exchanges the two components (Householder 1958).
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from interp.edits.base import Context, Edit
from interp.edits.values import TensorLike, Values, number
from interp.errors import UserError


class _Along(Edit):
    """An edit along one direction per position, which is normalised when it is made, in float64 where there is one."""

    portable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.matrix:
            raise UserError(f"{type(self).__name__} works along directions; {self.at} has queries and keys instead.")

    def component(self, value: Tensor, direction: Tensor) -> Tensor:
        """x · v̂, [pos, ..., 1]."""
        return (value * direction).sum(-1, keepdim=True)


@dataclass(frozen=True, repr=False)
class Project(_Along):
    """x − (1 − keep)(x · v̂) v̂: the component along `vector` is taken out, or kept to the share `keep`."""

    vector: TensorLike
    keep: float | int = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(vector=Values.of(self.vector), keep=number(self.keep, "keep"))
        _ = self._operands  # a direction that is none is an error now

    @property
    def carried(self) -> Tensor:
        return Values.of(self.vector).tensor

    @cached_property
    def _operands(self) -> dict[str, Any]:
        return {"direction": _unit(self.carried, self), "keep": self.keep}

    def compute(self, value: Tensor, context: Context) -> Tensor:
        v = self._operands["direction"].to(value)
        return value - (1 - self._operands["keep"]) * self.component(value, v) * v


@dataclass(frozen=True, repr=False)
class Cap(_Along):
    """x whose component along `vector` is at most `max` and, if given, at least `min`; in units of x."""

    vector: TensorLike
    max: float | int
    min: float | int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        least = None if self.min is None else number(self.min, "min")
        self._set(vector=Values.of(self.vector), max=number(self.max, "max"), min=least)
        if least is not None and least > self.max:
            raise UserError(f"No component is at most {self.max} and at least {least}; exchange max and min.")
        _ = self._operands  # a direction that is none is an error now

    @property
    def carried(self) -> Tensor:
        return Values.of(self.vector).tensor

    @cached_property
    def _operands(self) -> dict[str, Any]:
        bounds = {"max": self.max} if self.min is None else {"max": self.max, "min": self.min}
        return {"direction": _unit(self.carried, self), **bounds}

    @property
    def static(self) -> tuple[Any, ...]:
        return (self.min is not None,)

    def compute(self, value: Tensor, context: Context) -> Tensor:
        v = self._operands["direction"].to(value)
        p = self.component(value, v)
        new = value - (p - self._operands["max"]).clamp(min=0) * v
        if self.min is not None:
            new = new + (self._operands["min"] - p).clamp(min=0) * v
        return new


@dataclass(frozen=True, repr=False)
class Swap(_Along):
    """The reflection that exchanges the directions `first` and `second`."""

    first: TensorLike
    second: TensorLike

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(first=Values.of(self.first), second=Values.of(self.second))
        if Values.of(self.first).shape != Values.of(self.second).shape:
            raise UserError("Swap takes two directions of one shape.")
        _ = self._operands  # a direction that is none is an error now

    @property
    def carried(self) -> Tensor:
        return Values.of(self.first).tensor

    @cached_property
    def _operands(self) -> dict[str, Any]:
        first, second = (Values.of(vector).tensor for vector in (self.first, self.second))
        u, v = _unit(first, self), _unit(second, self)
        apart = u - v.to(u)
        if bool((apart.norm(dim=-1) < 8 * torch.finfo(u.dtype).eps).any()):
            raise UserError(f"Swap exchanges two directions, and those for {self.at} are one and the same.")
        return {"direction": apart / apart.norm(dim=-1, keepdim=True)}

    def compute(self, value: Tensor, context: Context) -> Tensor:
        w = self._operands["direction"].to(value)
        return value - 2 * self.component(value, w) * w


def _unit(vector: Tensor, edit: Edit) -> Tensor:
    """`vector` at norm 1 along its last axis; raises `UserError` where it has no direction."""
    if vector.ndim == 0:
        raise UserError(f"The direction for {edit.at} has no axis; give a vector as wide as the point.")
    wide = vector.to(torch.float32 if vector.device.type == "mps" else torch.float64)
    norm = wide.norm(dim=-1, keepdim=True)
    if not bool((norm.isfinite() & (norm > 0)).all()):
        raise UserError(f"The direction for {edit.at} is zero or not finite, so it points nowhere.")
    return wide / norm
