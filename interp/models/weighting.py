"""How a router makes its weights from its logits: which of the known functions, fitted to a recorded pass.

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
