"""The batched convenience: run token rows and get every captured point with a leading batch axis."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from interp.edits import Edit
from interp.engines.base import Capture, Engine, Request
from interp.engines.batching import stacked
from interp.engines.local import LocalEngine
from interp.errors import UserError
from interp.points import Address


def run_with_cache(
    model: Engine,
    tokens: Int[Tensor, "batch pos"],
    points: Sequence[Address | str] | Address | str,
    attention_mask: Int[Tensor, "batch pos"] | None = None,
    *,
    edits: Sequence[Edit] = (),
    grad: bool = False,
) -> Capture:
    """Captured tensors [batch, pos, ...] by Address or by its text.

    With `attention_mask` (1 at real tokens, padding or gaps anywhere) each row runs as if it stood alone, and rows of
    masked positions are NaN (-1 for integers), so that a mean over padding cannot pass unnoticed.
    `edits` change every row. With `grad` the tensors lie on the autograd graph of the pass, which goes on with them:
    `torch.autograd.grad(cache["logits"][0, -1, 42], cache["resid_post.3"])` works for every point that can be written,
    and a point that is only computed from the pass is where a backward can begin; parameters take no part.
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
    requests = [
        Request(row[mask].tolist(), capture=addresses, edits=edits, grad=grad)
        for row, mask in zip(tokens, keep, strict=True)
    ]
    if grad:
        if not isinstance(model, LocalEngine):
            raise UserError('grad=True needs the model in this process: load it with engine="eager".')
        return model.run_stacked(requests, keep)
    results = model.run(requests)
    return Capture({a: stacked([r.capture[a] for r in results], a, keep) for a in addresses})
