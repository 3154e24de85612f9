"""The sparse step computes what dense automatic differentiation computes."""

import torch

from interp.training.sparse_ops import decode_rows, encode_topk, sum_by_latent

TOKENS, D_IN, D_OUT, N, K = 13, 5, 7, 11, 3


def loss_and_gradients(sparse: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x, target, W_enc, b_enc, W_dec = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((TOKENS, D_IN), (TOKENS, D_OUT), (N, D_IN), (N,), (N, D_OUT))
    )
    b_enc = b_enc - 2
    parameters = [p.requires_grad_() for p in (W_enc, b_enc, W_dec)]
    if sparse:
        values, indices = encode_topk(x, W_enc, b_enc, K)
        prediction = decode_rows(values, indices, W_dec)
    else:
        pre = x @ W_enc.T + b_enc
        kept = torch.zeros_like(pre).scatter(-1, pre.topk(K).indices, 1.0)
        latents = torch.relu(pre) * kept
        assert 0 < int((latents > 0).sum()) < TOKENS * K, "some of the k must be negative for this test to bite"
        prediction = latents @ W_dec
    loss = (prediction - target).square().sum()
    return loss.detach(), list(torch.autograd.grad(loss, parameters))


def test_gradients_are_those_of_the_dense_step() -> None:
    loss, gradients = loss_and_gradients(sparse=True)
    expected_loss, expected = loss_and_gradients(sparse=False)
    torch.testing.assert_close(loss, expected_loss)
    for found, dense in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found, dense)


def test_sum_by_latent_by_hand() -> None:
    rows = torch.tensor([[1.0, 10.0], [2.0, 20.0]])
    weights, indices = torch.tensor([[1.0, 2.0], [3.0, 0.5]]), torch.tensor([[2, 0], [2, 3]])
    expected = [[2, 20], [0, 0], [1 + 6, 10 + 60], [1, 10], [0, 0]]
    assert sum_by_latent(weights, indices, rows, 5).tolist() == expected
