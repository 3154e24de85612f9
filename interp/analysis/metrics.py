"""What a patching experiment measures: one number of a prompt's logits."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from interp.analysis.tokens import token_id
from interp.engines.base import Engine
from interp.errors import UserError


@dataclass(frozen=True)
class LogitDifference:
    """logit(correct) - logit(wrong), the model's own logits (after a cap, where it has one), at one position.

    The usual measure of patching: what raises or lowers all logits alike does not move it (Wang et al. 2022,
    arXiv:2211.00593; Heimersheim and Nanda 2024, arXiv:2404.15255).
    """

    correct: int | str
    """A token id, or text that is one token."""
    wrong: int | str
    position: int = -1
    """Negative positions count from the end."""


Metric = LogitDifference | Callable[[Tensor], Tensor | float]
"""A function of logits [pos, d_vocab] that gives one number; differentiable, where gradients are taken."""


def measure(model: Engine, metric: Metric) -> Callable[[Float[Tensor, "pos d_vocab"]], Tensor | float]:
    """The metric as a function of logits; token texts are looked up once."""
    if not isinstance(metric, LogitDifference):
        return metric
    correct, wrong, position = token_id(model, metric.correct), token_id(model, metric.wrong), metric.position
    if correct == wrong:
        raise UserError(f"{metric.correct!r} and {metric.wrong!r} are one token, so their logits never differ.")

    def difference(logits: Tensor) -> Tensor:
        if not -len(logits) <= position < len(logits):
            raise UserError(f"The metric reads position {position}, but the prompt has {len(logits)} tokens.")
        return logits[position, correct] - logits[position, wrong]

    return difference


def number(value: Tensor | float) -> float:
    """A metric's value as a float. Raises `UserError` for a tensor of more than one element."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise UserError(f"A metric gives one number; this one gave a tensor of shape {list(value.shape)}.")
    return float(value)
