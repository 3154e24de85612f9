"""True float64: casts to float32 inside it are lifted, and nothing of it is left outside."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from interp.models.float64 import numerics, true_float64


def test_the_casts_that_models_contain_are_lifted() -> None:
    x = torch.tensor([1.0, 1.0 + 2**-40], dtype=torch.float64)
    with true_float64():
        assert x.float().dtype == torch.float64
        assert x.to(torch.float32).dtype == torch.float64
        assert x.to(dtype=torch.float32).dtype == torch.float64
        assert x.type(torch.float32).dtype == torch.float64
        assert torch.softmax(x, -1, dtype=torch.float32).dtype == torch.float64
        assert torch.nn.functional.softmax(x, dim=-1, dtype=torch.float32).dtype == torch.float64
        assert x.to(torch.bfloat16).dtype == torch.bfloat16
    assert x.float().dtype == torch.float32
    assert torch.softmax(x, -1, dtype=torch.float32).dtype == torch.float32


def test_a_norm_of_transformers_reaches_float64_accuracy() -> None:
    torch.manual_seed(0)
    norm, x = LlamaRMSNorm(48, eps=1e-6).double(), torch.randn(5, 48, dtype=torch.float64)
    right = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    with true_float64():
        lifted = norm(x)
    assert (lifted - right).abs().max() < 1e-15
    assert (norm(x) - right).abs().max() > 1e-9  # the control: outside, the cast is there


@pytest.mark.parametrize(("dtype", "lifted"), [(torch.float64, True), (torch.float32, False), (torch.bfloat16, False)])
def test_only_float64_models_run_lifted(dtype: torch.dtype, lifted: bool) -> None:
    with numerics(dtype):
        assert (torch.ones(1, dtype=torch.float64).float().dtype == torch.float64) == lifted


def test_an_error_inside_restores_the_casts() -> None:
    with pytest.raises(ZeroDivisionError), true_float64():
        _ = 1 / 0
    assert torch.ones(1, dtype=torch.float64).float().dtype == torch.float32
