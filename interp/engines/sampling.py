"""How a next token is chosen from logits, and what is reported about the choice.

Logits go through transformers' own processors in its order: repetition penalty, temperature, top-k, top-p, min-p. Each
request draws from a generator of its own, so a seed gives the same tokens alone and in any batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from interp.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How one request's next tokens are chosen, and what ends them."""

    temperature: float = 0.0
    """Divides the logits; 0 takes the likeliest token, whatever the other limits say."""
    top_k: int | None = None
    """Only the k likeliest tokens."""
    top_p: float | None = None
    """Only the smallest set of likeliest tokens whose probabilities reach p."""
    min_p: float | None = None
    """Only tokens at least p times as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens that occurred, in the prompt too, are divided by it, negative ones multiplied."""
    seed: int | None = None
    """None draws one; the Result names it."""
    stop: tuple[str, ...] = ()
    """Texts that end the continuation; `Result.text` ends before them, `Result.tokens` keeps their tokens."""
    ignore_eos: bool = False
    """Whether to go on behind an end-of-sequence token."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        limits = {
            "temperature": (self.temperature >= 0, "at least 0"),
            "top_k": (self.top_k is None or self.top_k >= 1, "at least 1"),
            "top_p": (self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (self.min_p is None or 0 <= self.min_p <= 1, "between 0 and 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0"),
            "seed": (self.seed is None or 0 <= self.seed < 2**63, "at least 0 and below 2**63"),
            "stop": (all(self.stop), "texts that are not empty"),
        }
        for name, (holds, wanted) in limits.items():
            if not holds:
                raise UserError(f"Sampling: {name} must be {wanted}; {getattr(self, name)!r} is not.")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0

    @cached_property
    def processors(self) -> LogitsProcessorList:
        """What changes the logits before a token is drawn."""
        steps = LogitsProcessorList()
        if self.repetition_penalty != 1:
            steps.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.greedy:
            return steps
        if self.temperature != 1:
            steps.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k is not None:
            steps.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None:
            steps.append(TopPLogitsWarper(self.top_p))
        if self.min_p is not None:
            steps.append(MinPLogitsWarper(self.min_p))
        return steps


GREEDY = Sampling()


@dataclass(frozen=True)
class TokenLogprob:
    """A new token's log-probability under the model's own logits, before penalty, temperature and limits (in nats)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens and their log-probabilities, likeliest first."""


class Chooser:
    """One request's choices, in order."""

    def __init__(self, sampling: Sampling, n_logprobs: int) -> None:
        self.sampling, self.n_logprobs = sampling, n_logprobs
        self.seed: int | None = None
        if not sampling.greedy:
            self._generator = torch.Generator()
            given = sampling.seed
            self.seed = self._generator.seed() % 2**63 if given is None else given
            self._generator.manual_seed(self.seed)

    def choose(self, logits: Float[Tensor, " d_vocab"], before: Sequence[int]) -> int:
        """The next token after the ids `before`."""
        scores = logits[None]
        if self.sampling.processors:
            ids: Any = torch.tensor([before], device=logits.device)
            scores = self.sampling.processors(ids, scores.clone())  # type: ignore[assignment]
        if self.sampling.greedy:
            return int(scores[0].argmax())
        probabilities = scores[0].double().softmax(-1).cpu()
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

    def logprob(self, logits: Float[Tensor, " d_vocab"], token: int) -> TokenLogprob | None:
        """What the request asked to know about the choice of `token`; None where it asked for nothing."""
        if not self.n_logprobs:
            return None
        every = logits.double().log_softmax(-1)
        values, ids = every.topk(min(self.n_logprobs, len(every)))
        return TokenLogprob(token, float(every[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


__all__ = ["GREEDY", "Chooser", "Sampling", "TokenLogprob"]
