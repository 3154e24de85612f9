"""The batched convenience: run token rows and get every captured point with a leading batch axis."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from interp.engines.base import Capture, Engine, Request
from interp.errors import UserError
from interp.points import POINTS, Address


def run_with_cache(
    model: Engine,
    tokens: Int[Tensor, "batch pos"],
    points: Sequence[Address | str] | Address | str,
    attention_mask: Int[Tensor, "batch pos"] | None = None,
) -> Capture:
    """Captured tensors [batch, pos, ...] by Address or by its text.

    With `attention_mask` (1 at real tokens, padding or gaps anywhere) each row runs as if it stood alone, and rows of
    masked positions are NaN (-1 for integers), so that a mean over padding cannot pass unnoticed.
    Raises what `Engine.run` raises, and `UserError` for a row without a real token.
    """
    if isinstance(tokens, str) or (isinstance(tokens, list) and tokens and isinstance(tokens[0], str)):
        raise UserError("run_with_cache takes token ids, not text: pass model.to_tokens(text).")
    if isinstance(points, (str, Address)):
        points = [points]
    tokens = torch.as_tensor(tokens)
    if tokens.ndim != 2:
        raise UserError(f"run_with_cache takes tokens as [batch, pos]; these have shape {list(tokens.shape)}.")
    keep = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    if keep.shape != tokens.shape or not bool(keep.any(-1).all()):
        raise UserError("attention_mask must have the shape of tokens and at least one real token in every row.")
    keep = keep.to(tokens.device)
    addresses = [Address.parse(point) for point in points]
    requests = [Request(row[mask].tolist(), capture=addresses) for row, mask in zip(tokens, keep, strict=True)]
    results = model.run(requests)
    return Capture({a: _stack([r.capture[a] for r in results], a, keep) for a in addresses})


def _stack(rows: list[Tensor], address: Address, keep: Tensor) -> Tensor:
    if bool(keep.all()):
        return torch.stack(rows)
    missing = float("nan") if rows[0].is_floating_point() else -1
    matrix = "query" in POINTS[address.name].shape
    stacked = []
    for row, mask in zip(rows, keep.to(rows[0].device), strict=True):
        n_pos = mask.shape[0]
        where = mask.nonzero().flatten()
        if matrix:
            full = row.new_full((*row.shape[:-2], n_pos, n_pos), missing)
            full[..., where[:, None], where] = row
        else:
            full = row.new_full((n_pos, *row.shape[1:]), missing)
            full[where] = row
        stacked.append(full)
    return torch.stack(stacked)
