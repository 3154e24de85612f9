"""The best linear map from one set of activations to another: least squares in float64, streamed.

With x [d_in], y [d_out] over all tokens and their means x̄, ȳ:

    A = Σ (x − x̄)(x − x̄)ᵀ,   B = Σ (x − x̄)(y − ȳ)ᵀ,   W = (A⁻¹ B)ᵀ,   b = ȳ − W x̄

which minimises Σ‖y − W x − b‖². A is summed around the first batch's mean, so that nothing large cancels, and is
factorised once for as many targets as one likes.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class LinearMap(NamedTuple):
    """y ≈ weight · x + bias."""

    weight: Float[Tensor, "d_out d_in"]
    """float64."""
    bias: Float[Tensor, " d_out"]
    """float64."""

    def __call__(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens d_out"]:
        """The prediction, in the precision of `x`."""
        return torch.nn.functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class InputMoments:
    """Mean and scatter of inputs, accumulated batch by batch in float64."""

    def __init__(self, batches: Iterable[Float[Tensor, "_ d_in"]] = ()) -> None:
        self.n = 0
        """Tokens added."""
        for batch in batches:
            self.add(batch)

    def add(self, x: Float[Tensor, "tokens d_in"]) -> None:
        """Count one batch."""
        x = x.double()
        if self.n == 0:
            self._origin = x.mean(0)
            self._sum = torch.zeros_like(self._origin)
            self._square = x.new_zeros(x.shape[1], x.shape[1])
        x = x - self._origin
        self._sum += x.sum(0)
        self._square.addmm_(x.T, x)
        self.n += len(x)

    @property
    def mean(self) -> Float[Tensor, " d_in"]:
        """x̄"""
        return self._origin + self._sum / self.n

    @property
    def scatter(self) -> Float[Tensor, "d_in d_in"]:
        """A"""
        return self._square - torch.outer(self._sum, self._sum) / self.n


def least_squares(
    moments: InputMoments,
    batches: Iterable[tuple[Float[Tensor, "_ d_in"], Float[Tensor, "_ d_out"]]],
    ridge: float = 1e-10,
) -> LinearMap:
    """The map that fits the (x, y) of `batches` best; `moments` are those of the same x.

    `ridge`, relative to the mean variance of x, is there to keep coordinates that never vary at weight zero (a norm's
    gain can be exactly 0).
    """
    mean_x = moments.mean
    xy = total = None
    for x, y in batches:
        y = y.double()
        product = (x.double() - mean_x).T @ y
        xy = product if xy is None else xy.add_(product)
        total = y.sum(0) if total is None else total.add_(y.sum(0))
    assert xy is not None and total is not None, "there is no least-squares map of no tokens"
    scatter = moments.scatter
    scatter.diagonal().add_(ridge * float(scatter.diagonal().mean()) + torch.finfo(scatter.dtype).tiny)
    weight = torch.cholesky_solve(xy, torch.linalg.cholesky(scatter)).T.contiguous()
    return LinearMap(weight, total / moments.n - weight @ mean_x)
