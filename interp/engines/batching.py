"""Several prompts in one forward pass: padding, its mask, and which columns are whose.

Without generation the padding stands at the end, where causality keeps it from every real token. With generation it
stands at the front, so that each row's next token is in the last column; positions count real tokens only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Padded prompts."""

    tokens: Tensor
    """[batch, pos]"""
    mask: Tensor | None
    """[batch, pos], 1 at real tokens; None where nothing is padded."""
    positions: Tensor
    """[batch, pos]: max(cumsum(mask) - 1, 0)"""
    spans: tuple[slice, ...]
    """Columns of each row's real tokens."""


def pad(prompts: Sequence[Sequence[int]], device: torch.device, *, front: bool) -> Batch:
    """The prompts as one rectangle; pad columns hold each row's first token, which the mask hides."""
    longest = max(len(prompt) for prompt in prompts)
    rows, masks, spans = [], [], []
    for prompt in prompts:
        n = longest - len(prompt)
        filler, zeros, ones = [prompt[0]] * n, [0] * n, [1] * len(prompt)
        rows.append(filler + list(prompt) if front else list(prompt) + filler)
        masks.append(zeros + ones if front else ones + zeros)
        spans.append(slice(n, longest) if front else slice(0, len(prompt)))
    mask = torch.tensor(masks, device=device)
    return Batch(
        tokens=torch.tensor(rows, device=device),
        mask=None if bool(mask.all()) else mask,
        positions=(mask.cumsum(-1) - 1).clamp(min=0),
        spans=tuple(spans),
    )
