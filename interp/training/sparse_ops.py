"""Encode and decode through the few latents that fire: what a training step costs beyond one dense encoder product.

With I_b the latents that fire at token b (m of them, with values v) and e the gradient at the output:

    decode            y_b = Σ_{i∈I_b} v_bi W_dec[i]
    its gradients     ∂v_bi = W_dec[i]·e_b,     ∂W_dec[i] = Σ_{b: i∈I_b} v_bi e_b
    of the encoder    ∂W_enc[i] = Σ_{b: i∈I_b} ∂v_bi x_b,     ∂b_enc[i] = Σ ∂v_bi

Each is a sum over m·tokens rows; a dense backward pass would multiply tokens × n_latents matrices. The encoder's
input gets no gradient: it is data.
"""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


class _SparseEncode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, W_enc: Tensor, b_enc: Tensor, k: int) -> tuple[Tensor, Tensor]:
        values, indices = torch.addmm(b_enc, x, W_enc.T).topk(k, dim=-1, sorted=False)
        values = values.relu_()
        ctx.save_for_backward(x, values, indices)
        ctx.n_latents = len(b_enc)
        ctx.mark_non_differentiable(indices)
        return values, indices

    @staticmethod
    def backward(ctx: Any, grad_values: Tensor, _: Tensor) -> tuple[None, Tensor, Tensor, None]:  # type: ignore[override]
        x, values, indices = ctx.saved_tensors
        grad = grad_values * (values > 0)
        grad_b = torch.zeros(ctx.n_latents, dtype=grad.dtype, device=grad.device)
        grad_b.index_add_(0, indices.flatten(), grad.flatten())
        return None, sum_by_latent(grad, indices, x, ctx.n_latents), grad_b, None


class _SparseDecode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor, W_dec: Tensor) -> Tensor:
        ctx.save_for_backward(values, indices, W_dec)
        return F.embedding_bag(indices, W_dec, per_sample_weights=values, mode="sum")

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None, Tensor]:  # type: ignore[override]
        values, indices, W_dec = ctx.saved_tensors
        grad_y = grad_y.contiguous()
        return _rows_dot(W_dec, indices, grad_y), None, sum_by_latent(values, indices, grad_y, len(W_dec))


def encode_topk(
    x: Float[Tensor, "tokens d_in"], W_enc: Float[Tensor, "n d_in"], b_enc: Float[Tensor, " n"], k: int
) -> tuple[Float[Tensor, "tokens k"], Int[Tensor, "tokens k"]]:
    """Values max(p, 0) and indices of the k largest pre-activations p = x W_encᵀ + b_enc, in no particular order."""
    return _SparseEncode.apply(x, W_enc, b_enc, k)  # type: ignore[return-value]


def decode_rows(
    values: Float[Tensor, "tokens k"], indices: Int[Tensor, "tokens k"], W_dec: Float[Tensor, "n d_out"]
) -> Float[Tensor, "tokens d_out"]:
    """Σ values · W_dec[indices] for each token."""
    return _SparseDecode.apply(values, indices, W_dec)  # type: ignore[return-value]


def sum_by_latent(
    weights: Float[Tensor, "tokens k"],
    indices: Int[Tensor, "tokens k"],
    rows: Float[Tensor, "tokens d"],
    n_latents: int,
) -> Float[Tensor, "n_latents d"]:
    """For each latent, Σ weights · rows over the tokens that name it in `indices`."""
    flat = indices.flatten()
    order = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=n_latents).cumsum(0)
    offsets = torch.cat([ends.new_zeros(1), ends])
    return F.embedding_bag(
        order // indices.shape[1],
        rows,
        offsets,
        per_sample_weights=weights.flatten()[order],
        mode="sum",
        include_last_offset=True,
    )


def _rows_dot(W: Tensor, indices: Tensor, rows: Tensor) -> Tensor:
    """W[indices[b, j]] · rows[b], as [tokens, k]."""
    tokens, k = indices.shape
    order = indices.argsort(-1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse")  # said once per process: the layout is in beta
        pattern = torch.sparse_csr_tensor(
            torch.arange(0, tokens * k + 1, k, device=W.device),
            indices.gather(-1, order).flatten(),
            torch.zeros(tokens * k, dtype=W.dtype, device=W.device),
            (tokens, len(W)),
            check_invariants=False,
        )
    dots = torch.sparse.sampled_addmm(pattern, rows, W.T, beta=0).values().view(tokens, k)
    return torch.empty_like(dots).scatter_(-1, order, dots)
