"""FVU, L0 and dead latents have known values where they can be computed by hand."""

import pytest
import torch

from interp.eval import ReconstructionMeter, SparsityMeter, fraction_of_variance_unexplained


def test_predicting_the_mean_scores_one_and_the_target_itself_zero() -> None:
    y = torch.randn(50, 3) + 7
    assert fraction_of_variance_unexplained(y, y.double().mean(0).float().expand_as(y)) == pytest.approx(1, abs=1e-6)
    assert fraction_of_variance_unexplained(y, y.clone()) == 0


def test_hand_computed() -> None:
    y = torch.tensor([[0.0, 0.0], [2.0, 4.0]])
    # Mean (1, 2): spread 2·(1 + 4) = 10. Errors (1, 0) and (0, 2): 1 + 4 = 5.
    prediction = torch.tensor([[1.0, 0.0], [2.0, 2.0]])
    meter = ReconstructionMeter()
    meter.add(y, prediction)
    result = meter.result()
    assert result.fvu == 0.5
    assert result.explained_variance == 0.5
    assert result.mse == 2.5
    assert result.n_tokens == 2


def test_a_constant_shift_is_not_forgiven() -> None:
    y = torch.randn(1000, 4)
    variance = y.double().var(0, correction=0).sum()
    assert fraction_of_variance_unexplained(y, y + 1) == pytest.approx(float(4 / variance), rel=1e-5)


def test_batches_of_any_size_give_what_one_batch_gives() -> None:
    y = torch.randn(97, 5) * torch.arange(1, 98)[:, None] + 1000
    prediction = y + torch.randn(97, 5)
    meter = ReconstructionMeter()
    for start, stop in ((0, 1), (1, 40), (40, 40), (40, 97)):
        meter.add(y[start:stop], prediction[start:stop])
    assert meter.result().fvu == pytest.approx(fraction_of_variance_unexplained(y, prediction), rel=1e-12)


def test_targets_without_variance_have_no_fvu() -> None:
    meter = ReconstructionMeter()
    meter.add(torch.ones(3, 2), torch.zeros(3, 2))
    with pytest.raises(ValueError, match="vary"):
        meter.result()


def test_shapes_must_agree(unchecked_signatures: None) -> None:
    meter = ReconstructionMeter()
    with pytest.raises(ValueError, match="shape"):
        meter.add(torch.ones(3, 2), torch.zeros(2, 2))


def test_sparsity_counts_only_what_fires() -> None:
    meter = SparsityMeter(5)
    meter.add(torch.tensor([[2.0, 0.0], [1.0, 3.0]]), torch.tensor([[4, 0], [4, 1]]))
    meter.add(torch.tensor([[0.0, 0.0]]), torch.tensor([[2, 3]]))
    assert meter.fired.tolist() == [0, 1, 0, 0, 2]
    assert meter.result() == (1.0, 3, 3)
