"""Which pre-activations fire: by hand, whatever the leading axes, dense and sparse alike."""

import pytest
import torch

from interp.dictionaries import ActivationConfig
from interp.dictionaries.activations import BatchTopK, JumpReLU, TopK, make_activation
from interp.errors import UserError

CONFIGS = [
    ActivationConfig("topk", 3),
    ActivationConfig("relu"),
    ActivationConfig("jumprelu"),
    ActivationConfig("batchtopk", 3),
]


def test_topk_keeps_the_largest_and_drops_what_is_not_positive() -> None:
    pre = torch.tensor([[1.0, 5.0, -2.0, 3.0], [-1.0, -2.0, 4.0, 0.0]])
    assert TopK(2)(pre).tolist() == [[0, 5, 0, 3], [0, 0, 4, 0]]
    assert TopK(3)(pre).tolist() == [[1, 5, 0, 3], [0, 0, 4, 0]]


def test_jumprelu_is_strict_and_passes_the_value_itself() -> None:
    activation = JumpReLU(3)
    activation.threshold.data = torch.tensor([1.0, 0.0, -5.0])
    pre = torch.tensor([[1.0, 0.5, -1.0], [1.25, 0.0, 2.0]])
    assert activation(pre).tolist() == [[0, 0.5, 0], [1.25, 0, 2]]


def test_batchtopk_shares_the_budget_of_the_whole_batch_in_training() -> None:
    activation = BatchTopK(1, 3).train()
    pre = torch.tensor([[[5.0, 4.0, 3.0]], [[1.0, 2.0, 0.5]]])
    assert activation(pre).tolist() == [[[5, 4, 0]], [[0, 0, 0]]]
    assert activation.threshold.tolist() == [4, 4, 4]


def test_batchtopk_at_inference_treats_each_token_alone() -> None:
    activation = BatchTopK(1, 3).eval()
    activation.threshold.data.fill_(2.0)
    pre = torch.tensor([[5.0, 4.0, 2.0], [1.0, 2.0, 0.5]])
    assert activation(pre).tolist() == [[5, 4, 0], [0, 0, 0]]
    assert activation(pre[1:]).tolist() == activation(pre)[1:].tolist()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
@pytest.mark.parametrize("training", [False, True])
def test_leading_axes_mean_nothing(config: ActivationConfig, training: bool) -> None:
    activation = make_activation(config, 11).train(training)
    pre = torch.randn(2, 5, 11)
    assert torch.equal(activation(pre), activation(pre.flatten(0, 1)).view(2, 5, 11))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_sparse_and_dense_hold_the_same_latents(config: ActivationConfig) -> None:
    activation = make_activation(config, 11).eval()
    pre = torch.randn(2, 5, 11)
    values, indices = activation.sparse(pre)
    assert torch.equal(torch.zeros_like(pre).scatter(-1, indices, values), activation(pre))


def test_nothing_fires() -> None:
    for config in CONFIGS:
        values, _ = make_activation(config, 4).eval().sparse(torch.full((2, 4), -1.0))
        assert not values.any()


def test_a_config_says_what_is_missing() -> None:
    with pytest.raises(UserError, match="needs k"):
        ActivationConfig("topk")
    with pytest.raises(UserError, match="has no k"):
        ActivationConfig("relu", 4)


def test_an_unknown_name_is_refused(unchecked_signatures: None) -> None:
    with pytest.raises(UserError, match="choose one of"):
        ActivationConfig("gelu", 4)  # type: ignore[arg-type]
