"""How pre-activations become latents: ReLU, JumpReLU, TopK, BatchTopK.

`p` [..., n] are pre-activations. Every function here yields latents f ≥ 0 of the same shape.

    ReLU       f = max(p, 0)
    JumpReLU   f = p where p > θ, else 0; strict, θ ≥ 0 one per latent (Rajamanoharan et al. 2024, arXiv:2407.14435)
    TopK       f = max(p, 0) on the k largest p of a token, else 0 (Gao et al. 2024, arXiv:2406.04093)
    BatchTopK  training: max(p, 0) on the k·tokens largest p of the batch, else 0; inference: JumpReLU with θ the
               running mean of the smallest latent that fired in a batch (Bussmann et al. 2024, arXiv:2412.06410)
"""

from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.dictionaries.config import ActivationConfig


class Activation(nn.Module):
    """A map from pre-activations to latents, dense or as the few that fire."""

    def forward(self, pre: Float[Tensor, "... n"]) -> Float[Tensor, "... n"]:
        """Latents, dense; zero where a latent does not fire."""
        raise NotImplementedError

    def sparse(self, pre: Float[Tensor, "... n"]) -> tuple[Float[Tensor, "... m"], Int[Tensor, "... m"]]:
        """Values and indices of the latents that fire, strongest first; m is the most that fire at one token.

        A token with fewer has zeros at the end; their indices mean nothing.
        """
        latents = self(pre)
        most = int((latents > 0).sum(-1).max()) if latents.numel() else 0
        return latents.topk(max(most, 1), dim=-1)


class ReLU(Activation):
    """f = max(p, 0)."""

    def forward(self, pre: Float[Tensor, "... n"]) -> Float[Tensor, "... n"]:
        return torch.relu(pre)


class JumpReLU(Activation):
    """f = p where p > threshold, else 0."""

    def __init__(self, n_latents: int) -> None:
        super().__init__()
        self.threshold = nn.Parameter(torch.zeros(n_latents, dtype=torch.float32))

    def forward(self, pre: Float[Tensor, "... n"]) -> Float[Tensor, "... n"]:
        return torch.where(pre > self.threshold.clamp(min=0), pre, torch.zeros_like(pre))


class TopK(Activation):
    """f = max(p, 0) on the k largest of each token; a value ≤ 0 does not fire, so fewer than k may."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, pre: Float[Tensor, "... n"]) -> Float[Tensor, "... n"]:
        values, indices = self.sparse(pre)
        return torch.zeros_like(pre).scatter(-1, indices, values)

    def sparse(self, pre: Float[Tensor, "... n"]) -> tuple[Float[Tensor, "... k"], Int[Tensor, "... k"]]:
        values, indices = pre.topk(self.k, dim=-1)
        return torch.relu(values), indices


class BatchTopK(Activation):
    """In training the k·tokens largest of the whole batch; in inference those above the learned `threshold`."""

    momentum = 0.99

    def __init__(self, k: int, n_latents: int) -> None:
        super().__init__()
        self.k = k
        self.threshold = nn.Parameter(torch.zeros(n_latents, dtype=torch.float32), requires_grad=False)

    def forward(self, pre: Float[Tensor, "... n"]) -> Float[Tensor, "... n"]:
        positive = torch.relu(pre)
        if not self.training:
            return torch.where(positive > self.threshold, positive, torch.zeros_like(positive))
        flat = positive.flatten()
        kept = flat.topk(min(self.k * (flat.numel() // pre.shape[-1]), flat.numel()))
        self._follow(kept.values)
        return torch.zeros_like(flat).scatter(0, kept.indices, kept.values).view_as(pre)

    @torch.no_grad()
    def _follow(self, kept: Float[Tensor, " m"]) -> None:
        smallest = kept[kept > 0].min() if (kept > 0).any() else kept.new_zeros(())
        untouched = bool((self.threshold == 0).all())
        self.threshold.copy_(smallest if untouched else torch.lerp(smallest.float(), self.threshold, self.momentum))


def make_activation(config: ActivationConfig, n_latents: int) -> Activation:
    """The module that `config` describes."""
    if config.name == "relu":
        return ReLU()
    if config.name == "jumprelu":
        return JumpReLU(n_latents)
    k = cast(int, config.k)
    return TopK(k) if config.name == "topk" else BatchTopK(k, n_latents)
