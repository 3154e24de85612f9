"""A linear map as a module computes it, and the matrix that it applies, whether the module shows it or packs it.

Three kinds: the module shows its matrix; it packs the matrix, and what it computes is y = W x + b all the same (4-bit
weights); it rounds what it reads, too (8-bit weights and inputs), so that no matrix gives what it computes. A packed
matrix is read as the map applies it: by the unit vectors that go through the module.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from interp.errors import InterpError
from interp.models.parameters import device_of, own

ROWS = 1024
"""Unit vectors that go through a packed module at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """An affine map y = W x + b, whatever class computes it."""

    path: str
    module: nn.Module
    transposed: bool = False
    """Whether the module stores W as [in, out], as GPT-2 does."""
    packed: "Packed | None" = None
    """What is known of the map where the module does not show its matrix."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        if self.packed is not None:
            return self.packed.shape
        rows, columns = self.module.weight.shape  # type: ignore[misc]
        return (columns, rows) if self.transposed else (rows, columns)  # type: ignore[return-value]

    @property
    def refusal(self) -> str:
        """Why no matrix gives what the module computes; empty where one does."""
        if self.packed is None or self.packed.exact:
            return ""
        return f"{self.path} rounds what it reads more coarsely than its dtype does, so no matrix is what it computes"

    @property
    def weight(self) -> Tensor:
        """[out, in]. Raises `InterpError` where no matrix gives what the module computes."""
        if self.packed is not None:
            return self._by_unit_vectors()
        weight = own(self.module, "weight")
        assert weight is not None
        return weight.T if self.transposed else weight

    @property
    def bias(self) -> Tensor | None:
        """[out], or None."""
        return own(self.module, "bias")

    def _by_unit_vectors(self) -> Tensor:
        assert self.packed is not None
        if self.refusal:
            raise InterpError(f"{self.refusal}.")
        with torch.no_grad(), _without_bias(self.module):
            return torch.cat([self.module.forward(rows) for rows in self._units()]).T

    def _units(self) -> Iterator[Tensor]:
        assert self.packed is not None
        width, device = self.packed.shape[1], device_of(self.module)
        for start in range(0, width, ROWS):
            rows = torch.zeros(min(ROWS, width - start), width, dtype=self.packed.dtype, device=device)
            rows[:, start:].fill_diagonal_(1)
            yield rows

    def sums(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """W x + b in float64 for x in float64, [..., out], and the magnitude of what is summed.

        A packed map is asked itself, in its own dtype, past the hooks of whoever watches it.
        """
        if self.packed is None:
            return products(x, self.weight, self.bias)
        with torch.no_grad():
            y = self.module.forward(x.to(device_of(self.module), self.packed.dtype)).to(x)
        return y, y.abs().amax(-1, keepdim=True).expand_as(y)


@contextmanager
def _without_bias(module: nn.Module) -> Iterator[None]:
    """Its bias left out: w + b - b would round w."""
    homes: list[dict[str, Any]] = [home for home in (module._parameters, module._buffers) if "bias" in home]
    kept = [home["bias"] for home in homes]
    try:
        for home in homes:
            home["bias"] = None
        yield
    finally:
        for home, bias in zip(homes, kept, strict=True):
            home["bias"] = bias


@dataclass(frozen=True, slots=True)
class Packed:
    """What a run shows of a linear map whose matrix is packed."""

    dtype: torch.dtype
    """Of what it reads."""
    shape: tuple[int, int]
    """(out, in)"""
    exact: bool
    """Whether the sum of two inputs gives the sum of their outputs within the rounding of the dtype."""


def products(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """x W^T + b in float64, some rows of W at a time, and |x| |w| + |b| by Euclidean norms, a bound of the summands."""
    own = [x @ part.to(x.device).double().T for part in weight.split(16384)]
    norms = torch.linalg.vector_norm(weight, dim=-1).to(x.device).double()
    magnitude = torch.linalg.vector_norm(x, dim=-1)[..., None] * norms
    offset = torch.zeros((), dtype=x.dtype) if bias is None else bias.to(x.device).double()
    return torch.cat(own, -1) + offset, magnitude + offset.abs()
