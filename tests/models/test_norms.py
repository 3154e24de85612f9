"""Norms are recognised by what they compute: hand-computed values, both gains, float64 and bfloat16, and impostors."""

import pytest
import torch
from torch import nn

from interp.models.norms import Norm, classify


class Rms(nn.Module):
    """x / sqrt(mean(x^2) + eps) · (offset + weight), computed in float32 or wider, as transformers does."""

    def __init__(self, d: int, eps: float = 1e-6, offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = nn.Parameter(torch.randn(d) * 0.3 + (1 - offset)), eps, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        y = wide / (wide.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return (y * (self.offset + self.weight.to(wide.dtype))).to(x.dtype)


def recognised(module: nn.Module, x: torch.Tensor) -> Norm | None:
    with torch.no_grad():
        return classify("n", module, x, module(x))


def test_rms_by_hand() -> None:
    norm = Norm("n", nn.Module(), centred=False, eps=1.0, gain_offset=0.0)
    x = torch.tensor([[3.0, 4.0, 0.0, 0.0]])  # mean square 25/4, plus 1
    assert norm.scale(x).item() == pytest.approx(7.25**0.5)
    assert norm.normalized(x)[0].tolist() == pytest.approx([3 / 7.25**0.5, 4 / 7.25**0.5, 0, 0])


def test_layer_norm_by_hand() -> None:
    norm = Norm("n", nn.Module(), centred=True, eps=0.0, gain_offset=0.0)
    x = torch.tensor([[1.0, 3.0]])  # mean 2, variance 1
    assert norm.scale(x).item() == 1.0
    assert norm.normalized(x)[0].tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_gain_is_found_in_every_dtype(dtype: torch.dtype, offset: float) -> None:
    """Bfloat16 rounds so coarsely that weight and 1 + weight may both fit within rounding; the closer one is right."""
    torch.manual_seed(0)
    module = Rms(32, offset=offset).to(dtype)
    norm = recognised(module, torch.randn(1, 50, 32).to(dtype))
    assert norm is not None
    assert (norm.centred, norm.gain_offset) == (False, offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_gain_beside_a_small_offset_is_told_apart(dtype: torch.dtype) -> None:
    """Gemma's trained gains reach tens, beside which the 1 of 1 + weight is a small correction."""
    torch.manual_seed(0)
    module = Rms(32, offset=1.0).to(dtype)
    module.weight.data.mul_(30)
    norm = recognised(module, torch.randn(1, 50, 32).to(dtype))
    assert norm is not None and norm.gain_offset == 1.0
    expected = 1.0 + module.weight.float()
    assert torch.equal(norm.gain, expected)


def test_layer_norm_and_its_bias_are_found() -> None:
    torch.manual_seed(0)
    module = nn.LayerNorm(32, eps=1e-3).double()
    module.weight.data.normal_()
    module.bias.data.normal_()
    norm = recognised(module, torch.randn(2, 5, 32).double() + 3)
    assert norm is not None and norm.centred and norm.eps == 1e-3
    assert norm.bias is module.bias


@pytest.mark.parametrize("module", [nn.Identity(), nn.ReLU(), nn.Linear(32, 32), nn.Softmax(-1), nn.Tanh()])
def test_what_is_no_norm_is_not_taken_for_one(module: nn.Module) -> None:
    torch.manual_seed(0)
    assert recognised(module.double(), torch.randn(2, 5, 32).double()) is None


def test_a_norm_over_another_axis_is_not_taken_for_one() -> None:
    class AcrossPositions(Rms):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / (x.square().mean(1, keepdim=True) + self.eps).sqrt() * self.weight

    torch.manual_seed(0)
    assert recognised(AcrossPositions(32).double(), torch.randn(2, 5, 32).double()) is None
