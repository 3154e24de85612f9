"""Linear maps whose matrices are packed: told by what they compute, read by unit vectors, refused where none is."""

import pytest
import torch
from torch import Tensor, nn

from interp.errors import InterpError
from interp.models.linear import Linear, Packed
from interp.models.probe import recording
from interp.models.recognise import linear_of

D_IN, D_OUT = 24, 40


class Eight(nn.Module):
    """Eight-bit weights with a scale per row; what it reads is rounded, too, where `rounds` says so."""

    step: Tensor

    def __init__(self, rounds: bool = False, bias: bool = True, activation: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        matrix = torch.randn(D_OUT, D_IN, generator=generator, dtype=torch.float64)
        self.rounds, self.activation = rounds, activation
        self.register_buffer("step", matrix.abs().amax(1, keepdim=True) / 127)
        self.qweight = nn.Parameter((matrix / self.step).round().to(torch.int8), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(D_OUT, generator=generator, dtype=torch.float64)) if bias else None

    @property
    def matrix(self) -> Tensor:
        return self.qweight.to(torch.float64) * self.step

    def forward(self, x: Tensor) -> Tensor:
        if self.rounds:
            step = x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 127
            x = (x / step).round() * step
        y = nn.functional.linear(x, self.matrix.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        return nn.functional.silu(y) if self.activation else y


def found(module: nn.Module, dtype: torch.dtype = torch.float64) -> Linear | None:
    x = torch.randn(1, 11, D_IN, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    with recording(module) as trace:
        module(x)
    return linear_of(trace, trace.calls_of("")[0])


@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_matrix_is_read_as_the_module_applies_it(bias: bool) -> None:
    module = Eight(bias=bias)
    linear = found(module)
    assert linear is not None and linear.packed == Packed(torch.float64, (D_OUT, D_IN), exact=True)
    assert linear.shape == (D_OUT, D_IN) and torch.equal(linear.weight, module.matrix)
    assert (linear.bias is module.bias) if bias else linear.bias is None
    x = torch.randn(3, D_IN, dtype=torch.float64)
    left, magnitude = linear.sums(x)
    assert torch.equal(left, module(x)) and bool((magnitude >= left.abs()).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_module_that_rounds_what_it_reads_has_no_matrix_but_is_asked_itself(dtype: torch.dtype) -> None:
    module = Eight(rounds=True)
    linear = found(module, dtype)
    assert linear is not None and linear.packed is not None and not linear.packed.exact
    assert "no matrix is what it computes" in linear.refusal
    with pytest.raises(InterpError, match="rounds what it reads"):
        _ = linear.weight
    x = torch.randn(3, D_IN).to(dtype)
    assert torch.equal(linear.sums(x.double())[0], module(x).double())


def test_in_bfloat16_eight_bits_of_input_are_within_its_own_rounding() -> None:
    linear = found(Eight(rounds=True), torch.bfloat16)
    assert linear is not None and linear.refusal == ""


def test_what_is_not_linear_is_no_linear_map() -> None:
    assert found(Eight(activation=True)) is None
    assert found(Eight(activation=True, rounds=True)) is None


def test_reading_the_matrix_runs_no_hook() -> None:
    module = Eight()
    linear = found(module)
    module.register_forward_hook(lambda *_: pytest.fail("a hook ran"))
    assert linear is not None
    assert torch.equal(linear.weight, module.matrix) and linear.sums(torch.ones(1, D_IN, dtype=torch.float64))
