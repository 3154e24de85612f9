"""How well a reconstruction matches, and how sparse its latents are: streaming sums in float64.

For targets y and predictions ŷ over all tokens seen, with ȳ the mean target of those same tokens:

    FVU = Σ‖y − ŷ‖² / Σ‖y − ȳ‖²        fraction of variance unexplained; predicting ȳ scores 1, and it can exceed 1
    explained variance = 1 − FVU
    L0  = mean number of latents > 0 per token
    dead = number of latents that fired at no token

ȳ is one global mean and ŷ is not re-centred, so a constant shift of ŷ costs what it should (Gao et al. 2024,
arXiv:2406.04093, normalise in the same way; a variance of the *residual* would forgive the shift).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class Reconstruction(NamedTuple):
    """What a `ReconstructionMeter` has measured."""

    fvu: float
    """Fraction of variance unexplained."""
    explained_variance: float
    """1 − FVU."""
    mse: float
    """Mean squared error per token, summed over the width."""
    n_tokens: int
    """Tokens measured."""


class ReconstructionMeter:
    """Accumulates batches of targets and predictions; `result()` gives the figures so far."""

    def __init__(self) -> None:
        self._n = 0
        self._error = 0.0
        self._mean: Tensor | None = None
        self._spread = 0.0

    def add(self, target: Float[Tensor, "tokens d"], prediction: Float[Tensor, "tokens d"]) -> None:
        """Count one batch. Raises `ValueError` where the two differ in shape."""
        if target.shape != prediction.shape:
            raise ValueError(f"target {list(target.shape)} and prediction {list(prediction.shape)} differ in shape.")
        if len(target) == 0:
            return
        y = target.detach().double()
        self._error += float((y - prediction.detach().double()).square().sum())
        # Chan et al. 1979: merging batch means and spreads cancels nothing, unlike Σy² − n·ȳ².
        mean, n = y.mean(0), len(y)
        self._spread += float((y - mean).square().sum())
        if self._mean is None:
            self._mean = mean
        else:
            shift, total = mean - self._mean, self._n + n
            self._spread += float(shift.square().sum()) * self._n * n / total
            self._mean = self._mean + shift * (n / total)
        self._n += n

    def result(self) -> Reconstruction:
        """The figures over everything added. Raises `ValueError` where nothing varied, so that FVU has no meaning."""
        if self._spread == 0:
            raise ValueError("FVU needs targets that vary: fewer than two different tokens were added.")
        fvu = self._error / self._spread
        return Reconstruction(fvu, 1 - fvu, self._error / self._n, self._n)


def fraction_of_variance_unexplained(target: Float[Tensor, "tokens d"], prediction: Float[Tensor, "tokens d"]) -> float:
    """FVU of one batch that is all there is."""
    meter = ReconstructionMeter()
    meter.add(target, prediction)
    return meter.result().fvu


class Sparsity(NamedTuple):
    """What a `SparsityMeter` has measured."""

    l0: float
    """Mean number of latents that fire per token."""
    dead: int
    """Latents that fired at no token."""
    n_tokens: int
    """Tokens measured."""


class SparsityMeter:
    """Counts how often each of `n_latents` fires."""

    def __init__(self, n_latents: int) -> None:
        self.fired = torch.zeros(n_latents, dtype=torch.int64)
        """Tokens at which each latent fired."""
        self._n = 0

    def add(self, values: Float[Tensor, "tokens m"], indices: Tensor) -> None:
        """Count one batch of sparse latents, as `encode_sparse` gives them; a value ≤ 0 does not fire."""
        active = indices[values > 0].cpu()
        self.fired += torch.bincount(active, minlength=len(self.fired))
        self._n += len(values)

    def result(self) -> Sparsity:
        """The figures over everything added."""
        return Sparsity(float(self.fired.sum()) / max(self._n, 1), int((self.fired == 0).sum()), self._n)
