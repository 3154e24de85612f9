"""How a router ranks and weighs experts by its logits: which of the known functions, fitted to a recorded pass.

With s the scores of all experts (softmax or sigmoid of the logits), the weight of a selected expert e is s_e, or
s_e / (sum of s over the selected + eps), times a constant.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrt(softplus)": lambda logits: torch.nn.functional.softplus(logits).sqrt(),
}
EPSILONS = (0.0, 1e-6)
"""Of the renormalisation; far smaller ones are below rounding."""


@dataclass(frozen=True, slots=True)
class Weighting:
    """A function from logits to the selected experts' weights."""

    kind: str
    """A name in `SCORES`."""
    renormalized: bool
    epsilon: float
    factor: float

    def __str__(self) -> str:
        text = f"{self.kind}(router_logits)[expert_indices]"
        over = f"{text} over their sum" + (f" + {self.epsilon:g}" if self.epsilon else "")
        return (over if self.renormalized else text) + ("" if self.factor == 1.0 else f", times {self.factor:g}")

    def scores(self, logits: Tensor) -> Tensor:
        """[..., experts] for [..., experts]."""
        return SCORES[self.kind](logits)

    def weights(self, logits: Tensor, indices: Tensor) -> Tensor:
        """[..., selected] for logits [..., experts] and indices [..., selected]."""
        chosen = self.scores(logits).gather(-1, indices)
        if self.renormalized:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + self.epsilon)
        return chosen * self.factor


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """By what the experts are ranked: their logits, or scores of these, plus a number per expert."""

    kind: str | None
    """A name in `SCORES`; None for the logits themselves."""
    bias: Tensor | None
    """[experts]"""

    def __call__(self, logits: Tensor) -> Tensor:
        """[..., experts] for [..., experts]."""
        scores = logits if self.kind is None else SCORES[self.kind](logits)
        return scores if self.bias is None else scores + self.bias.to(logits)


def ranked_by(logits: Tensor, scores: Tensor, bias: Tensor) -> Ranking | None:
    """The ranking whose bias is added to `scores`, which some known function makes of the logits."""
    tolerance = 16 * torch.finfo(scores.dtype).eps
    for kind in (None, *SCORES):
        found = Ranking(kind, None)(logits.double())
        if (found - scores.double()).abs().amax() <= tolerance * (1 + logits.abs().amax()) * found.abs().amax():
            return Ranking(kind, bias)
    return None


def fit(logits: Tensor, indices: Tensor, weights: Tensor, factor: float) -> Weighting | None:
    """The first known function as close to `weights` as any, within rounding; `factor` was seen on the weights' way."""
    found: list[tuple[float, Weighting]] = []
    epsilon = torch.finfo(weights.dtype).eps
    logits, weights = logits.double(), weights.double()
    for kind in SCORES:
        for renormalized in (False, True):
            for small in EPSILONS if renormalized else (0.0,):
                rule = Weighting(kind, renormalized, small, factor)
                gap = ((rule.weights(logits, indices) - weights) / weights).abs().amax().item()
                if gap <= 16 * epsilon * (1 + logits.abs().amax().item()):
                    found.append((gap, rule))
    closest = min((gap for gap, _ in found), default=0.0)
    return next((rule for gap, rule in found if gap <= 2 * closest), None)
