"""How one TopK skip transcoder is fitted to activations that are in memory.

1. The skip path is the least-squares map y ≈ W x + b; what it leaves, r = y − W x − b, is what latents are for.
2. x is centred and scaled to unit variance, r to unit mean square norm. Encoder rows start at the directions of random
   tokens, the decoder at zero: training starts exactly at the best linear map.
3. Adam minimises ‖r − f W_dec − b‖² over shuffled batches, f = TopK(W_enc x + b_enc).
4. The scales are folded into the weights, and the skip path and b_dec are solved again by least squares on what the
   finished latents leave, y − f W_dec.

Skip transcoders: Paulo et al. 2025, arXiv:2501.18823. TopK: Gao et al. 2024, arXiv:2406.04093.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from interp.dictionaries import ActivationConfig, DictionaryConfig, Transcoder
from interp.errors import UserError
from interp.training.config import TranscoderTrainingConfig
from interp.training.linear import InputMoments, LinearMap, least_squares
from interp.training.sparse_ops import decode_rows, encode_topk

CHUNK = 4096
"""Tokens per step of a pass that only reads."""


class StepReport(NamedTuple):
    """What one optimisation step tells."""

    step: int
    """Steps done."""
    steps: int
    """Steps in all."""
    tokens: int
    """Tokens seen."""
    loss: float
    """Mean squared error of this batch over the variance that the linear map leaves: 1 at the start."""
    lr: float
    """Learning rate of this step."""


class Fitted(NamedTuple):
    """A fitted transcoder and what came with it."""

    transcoder: Transcoder
    """In evaluation mode, without gradients."""
    linear: LinearMap
    """The best linear map of the same tokens alone."""
    values: Float[Tensor, "tokens k"]
    """Latents of the training tokens."""
    indices: Int[Tensor, "tokens k"]
    """Their indices."""
    tokens_seen: int
    """Training tokens, repetitions counted."""


def fit_transcoder(
    x: Float[Tensor, "tokens d_in"],
    y: Float[Tensor, "tokens d_out"],
    config: TranscoderTrainingConfig,
    report: Callable[[StepReport], None] = lambda _: None,
) -> Fitted:
    """The transcoder from `x` to `y`, on their device; deterministic for one seed, device and number of threads."""
    generator = torch.Generator().manual_seed(config.seed)
    n_latents = config.expansion_factor * x.shape[1]
    if config.k > n_latents:
        raise UserError(
            f"k = {config.k} exceeds the {n_latents} latents; choose a smaller k or a larger expansion_factor."
        )

    # 1. What latents are for: the part of y that no linear map of x explains.
    moments = InputMoments(x[part] for part in _parts(len(x)))
    linear = least_squares(moments, ((x[part], y[part]) for part in _parts(len(x))))
    residual = y - linear(x)

    # 2. Scales and initial weights.
    mean = moments.mean.float()
    scale_in = math.sqrt(float(moments.scatter.diagonal().mean()) / len(x)) or 1.0
    scale_out = math.sqrt(float(residual.square().sum(-1).mean())) or 1.0
    inputs, targets = (x - mean) / scale_in, residual.div_(scale_out)
    W_enc = initial_directions(inputs, n_latents, generator) / math.sqrt(x.shape[1])
    b_enc, W_dec, b_out = x.new_zeros(n_latents), y.new_zeros(n_latents, y.shape[1]), y.new_zeros(y.shape[1])
    parameters = [p.requires_grad_() for p in (W_enc, b_enc, W_dec, b_out)]

    # 3. Adam over shuffled batches.
    optimizer = torch.optim.Adam(parameters, lr=config.lr, fused=True)
    batch_size = min(config.batch_size, len(x))
    steps = config.epochs * (len(x) // batch_size)
    for step, batch in enumerate(_batches(len(x), batch_size, config.epochs, generator)):
        lr = config.lr * min((step + 1) / (config.warmup_steps + 1), 1.0) * (1 - step / steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        batch = batch.to(x.device)
        values, indices = encode_topk(inputs[batch], W_enc, b_enc, config.k)
        error = decode_rows(values, indices, W_dec) + b_out - targets[batch]
        loss = error.square().sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report(StepReport(step + 1, steps, (step + 1) * batch_size, float(loss.detach()), lr))

    # 4. Fold the scales, then solve the skip path again around the finished latents.
    with torch.no_grad():
        transcoder = Transcoder(
            DictionaryConfig(
                kind="transcoder",
                d_in=x.shape[1],
                d_out=y.shape[1],
                n_latents=n_latents,
                activation=ActivationConfig(config.activation_fn, config.k),
                skip=True,
                normalisation={"input_scale": scale_in, "output_scale": scale_out},
            )
        ).to(x.device)
        transcoder.W_enc.copy_(W_enc / scale_in)
        transcoder.b_enc.copy_(b_enc - F.linear(mean / scale_in, W_enc))
        transcoder.W_dec.copy_(W_dec * scale_out)
        found = [transcoder.encode_sparse(x[part]) for part in _parts(len(x))]
        values, indices = (torch.cat(column) for column in zip(*found, strict=True))
        left = (
            (x[part], y[part] - decode_rows(values[part], indices[part], transcoder.W_dec)) for part in _parts(len(x))
        )
        skip = least_squares(moments, left)
        assert transcoder.W_skip is not None
        transcoder.W_skip.copy_(skip.weight)
        transcoder.b_dec.copy_(skip.bias)
    return Fitted(transcoder.eval().requires_grad_(False), linear, values, indices, steps * batch_size)


def initial_directions(
    inputs: Float[Tensor, "tokens d"], n_latents: int, generator: torch.Generator
) -> Float[Tensor, "n_latents d"]:
    """Unit vectors along randomly chosen tokens, each at most once; along random directions where tokens run out."""
    chosen = inputs[torch.randperm(len(inputs), generator=generator)[:n_latents].to(inputs.device)]
    missing = torch.randn(n_latents - len(chosen), inputs.shape[1], generator=generator).to(inputs)
    return F.normalize(torch.cat([chosen, missing]), dim=-1)


def _parts(n_tokens: int) -> Iterator[slice]:
    return (slice(start, start + CHUNK) for start in range(0, n_tokens, CHUNK))


def _batches(n_tokens: int, batch_size: int, epochs: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Every token once per epoch in a new order, but for a last batch that would be short."""
    for _ in range(epochs):
        order = torch.randperm(n_tokens, generator=generator)
        for start in range(0, n_tokens - batch_size + 1, batch_size):
            yield order[start : start + batch_size]
