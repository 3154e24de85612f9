"""Edits that add, scale or take away."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from interp.edits.base import Context, Edit
from interp.edits.values import TensorLike, Values, number
from interp.errors import UserError


@dataclass(frozen=True, repr=False)
class Add(Edit):
    """x + scale · vector; `vector` is [width], or [heads, width] where the point has heads."""

    vector: TensorLike
    scale: float | int = 1.0

    portable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(vector=Values.of(self.vector), scale=number(self.scale, "scale"))

    @property
    def carried(self) -> Tensor:
        return Values.of(self.vector).tensor

    @cached_property
    def _operands(self) -> dict[str, Any]:
        return {"vector": self.carried, "scale": self.scale}

    def compute(self, value: Tensor, context: Context) -> Tensor:
        return value + self._operands["scale"] * self._operands["vector"].to(value)


@dataclass(frozen=True, repr=False)
class Scale(Edit):
    """x · factor."""

    factor: float | int

    portable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(factor=number(self.factor, "factor"))

    @cached_property
    def _operands(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def compute(self, value: Tensor, context: Context) -> Tensor:
        return value * self._operands["factor"]


@dataclass(frozen=True, repr=False)
class Ablate(Edit):
    """Zero, the mean over the prompt's own positions, or a value given as [width].

    The mean is that of what the edit receives, after the edits before it; new tokens get the prompt's.
    """

    to: str | TensorLike = "zero"

    portable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.to, str):
            self._set(to=Values.of(self.to))
        elif self.to not in ("zero", "mean"):
            raise UserError(f"Ablate sets to 'zero', 'mean' or a tensor, not {self.to!r}.")
        if self.to == "mean" and self.matrix:
            raise UserError(f"The mean of {self.at} over queries lets tokens see later ones; give a tensor or 'zero'.")
        if self.carried is not None and not self.matrix and self.carried.ndim > self.axes:
            raise UserError(
                f"Ablate takes one value for all positions of {self.at}, and this one has shape "
                f"{list(self.carried.shape)}; use Replace for a row per position."
            )

    @property
    def needs_mean(self) -> bool:
        return self.to == "mean"

    @property
    def carried(self) -> Tensor | None:
        return None if isinstance(self.to, str) else Values.of(self.to).tensor

    @property
    def static(self) -> tuple[Any, ...]:
        return (self.to,) if isinstance(self.to, str) else ("tensor",)

    @cached_property
    def _operands(self) -> dict[str, Any]:
        return {} if isinstance(self.to, str) else {"to": self.carried}

    def compute(self, value: Tensor, context: Context) -> Tensor:
        if self.to == "zero":
            return torch.zeros_like(value)
        if self.to == "mean":
            if context.mean is None:
                raise ValueError(f"{self} needs the prompt's mean in its context.")
            return context.mean.to(value).expand_as(value)
        return self._operands["to"].to(value).expand_as(value)
