"""Several prompts in one forward pass: padding, its mask, and which columns are whose.

Without generation the padding stands at the end, where causality keeps it from every real token. With generation it
stands at the front, so that each row's next token is in the last column; positions count real tokens only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from interp.points import POINTS, Address


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


def stacked(rows: Sequence[Tensor], address: Address, keep: Tensor) -> Tensor:
    """[batch, pos, ...] from each row's real tokens, which stand where `keep` ([batch, pos]) is True.

    Other rows are NaN, -1 for integers.
    """
    if bool(keep.all()):
        return torch.stack(list(rows))
    missing = float("nan") if rows[0].is_floating_point() else -1
    whole = []
    for row, where in zip(rows, _real(keep), strict=True):
        n_pos = keep.shape[1]
        if POINTS[address.name].matrix:
            full = row.new_full((*row.shape[:-2], n_pos, n_pos), missing)
            full[..., where[:, None], where] = row
        else:
            full = row.new_full((n_pos, *row.shape[1:]), missing)
            full[where] = row
        whole.append(full)
    return torch.stack(whole)


def unstacked(whole: Tensor, address: Address, keep: Tensor) -> list[Tensor]:
    """Each row's real tokens, out of what `stacked` gives."""
    matrix = POINTS[address.name].matrix
    return [
        full[..., where[:, None], where] if matrix else full[where]
        for full, where in zip(whole, _real(keep), strict=True)
    ]


def _real(keep: Tensor) -> list[Tensor]:
    return [mask.nonzero().flatten() for mask in keep]
