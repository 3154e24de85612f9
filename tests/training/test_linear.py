"""The streamed least-squares map is the one that a direct solver finds."""

import numpy as np
import torch

from interp.training.linear import InputMoments, least_squares


def data(n: int = 500) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(7, 7, generator=generator)
    x = torch.randn(n, 7, generator=generator) @ mix + 50
    y = x @ torch.randn(7, 4, generator=generator) + torch.randn(n, 4, generator=generator) - 20
    return x, y


def fit(x: torch.Tensor, y: torch.Tensor, sizes: list[int]):
    parts = list(zip(x.split(sizes), y.split(sizes), strict=True))
    return least_squares(InputMoments(a for a, _ in parts), parts)


def test_against_a_direct_solver() -> None:
    x, y = data()
    found = fit(x, y, [1, 99, 400])
    augmented = np.concatenate([x.double().numpy(), np.ones((500, 1))], axis=1)
    expected, *_ = np.linalg.lstsq(augmented, y.double().numpy(), rcond=None)
    np.testing.assert_allclose(found.weight.numpy(), expected[:7].T, atol=1e-7)
    np.testing.assert_allclose(found.bias.numpy(), expected[7], atol=1e-5)


def test_what_it_leaves_is_orthogonal_to_the_inputs() -> None:
    x, y = data()
    found = fit(x, y, [250, 250])
    left = y.double() - found(x.double())
    centred = x.double() - x.double().mean(0)
    assert float(left.mean(0).abs().max()) < 1e-8
    assert float((centred.T @ left).abs().max() / centred.norm() / left.norm()) < 1e-9


def test_moments_of_any_batches_are_those_of_the_whole() -> None:
    x, _ = data()
    moments = InputMoments(x.split([3, 100, 397]))
    torch.testing.assert_close(moments.mean, x.double().mean(0))
    torch.testing.assert_close(moments.scatter / 499, x.double().T.cov())


def test_an_input_that_never_varies_gets_no_weight() -> None:
    x, y = data()
    x[:, 2] = 3.0
    found = fit(x, y, [500])
    assert float(found.weight[:, 2].abs().max()) < 1e-3
    others = [i for i in range(7) if i != 2]
    augmented = np.concatenate([x[:, others].double().numpy(), np.ones((500, 1))], axis=1)
    expected, *_ = np.linalg.lstsq(augmented, y.double().numpy(), rcond=None)
    np.testing.assert_allclose(found.weight[:, others].numpy(), expected[:6].T, atol=1e-7)
