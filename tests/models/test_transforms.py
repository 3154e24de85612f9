"""A step that writes back what it read changes no bit, whatever rounding lies between."""

import pytest
import torch

from interp.models.transforms import Channels, HeadsFirst, OneHead, Scale, Step

STEPS = [
    (Scale(0.22), (2, 3, 48)),
    (Scale(12.0), (2, 3, 48)),
    (Channels(torch.tensor([[5, 1], [0, 2]])), (2, 3, 6)),
    (Channels(torch.arange(6).view(3, 2)), (2, 3, 6)),
    (HeadsFirst(), (2, 4, 3, 5)),
    (OneHead(), (2, 1, 3, 5)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("step", "shape"), STEPS)
def test_reading_and_writing_back_keeps_the_bits(step: Step, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(100, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for part in x:
        assert torch.equal(step.write(part, step.read(part)), part)
        new = torch.randn(step.read(part).shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        torch.testing.assert_close(step.read(step.write(part, new)), new, rtol=2 * torch.finfo(dtype).eps, atol=0)
