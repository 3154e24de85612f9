"""Contrastive vectors: the direction in which prompts of one kind differ from prompts of another.

    v = mean over positive prompts of x - mean over negative prompts of x,    x at the last token of each

(Rimsky et al. 2023, arXiv:2312.06681; Turner et al. 2023, arXiv:2308.10248). Added to the point that it was read at,
times a scale, it steers the model towards the positive kind.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from interp.analysis.tokens import Prompt, absolute, prompt_tokens
from interp.engines.base import Engine, Request
from interp.errors import UserError
from interp.points import POINTS, Address


def contrastive_vector(
    model: Engine,
    positive: Sequence[Prompt],
    negative: Sequence[Prompt],
    point: Address | str,
    *,
    position: int = -1,
    batch_size: int = 16,
) -> Tensor:
    """Mean difference at one position of every prompt, in the point's shape per token; float32 at least.

    The two kinds may have different numbers of prompts, and prompts different lengths. Raises `UserError` for a kind
    without prompts, an attention matrix, or a position that a prompt does not have; `PointRefused` where the model
    lacks the point.
    """
    address = Address.parse(point)
    if POINTS[address.name].matrix:
        raise UserError(f"{address} has a row per pair of positions, which prompts of unequal length do not share.")
    if batch_size < 1:
        raise UserError(f"batch_size counts prompts in one forward pass; {batch_size} is below 1.")
    means = []
    for kind, prompts in (("positive", positive), ("negative", negative)):
        if isinstance(prompts, str) or len(prompts) == 0:
            raise UserError(f"A contrastive vector needs a list of {kind} prompts, with at least one in it.")
        rows = [prompt_tokens(model, prompt) for prompt in prompts]
        at = [absolute(position, len(row)) for row in rows]
        requests = [Request(row, capture=[address]) for row in rows]
        results = [
            result
            for start in range(0, len(requests), batch_size)
            for result in model.run(requests[start : start + batch_size])
        ]
        read = torch.stack([result.capture[address][p] for result, p in zip(results, at, strict=True)])
        means.append(read.to(torch.promote_types(read.dtype, torch.float32)).mean(0))
    return means[0] - means[1]
