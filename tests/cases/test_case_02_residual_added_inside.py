"""nnterp#51, TransformerLens#1639: where the residual is added inside a submodule, the contribution is what it adds."""

import pytest
import torch

from interp.edits import Ablate
from interp.engines.base import Request
from tests.families.loaded import engine

TOKENS = [7, 3, 99, 64]


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_contributions_sum_to_the_stream(family: str) -> None:
    model = engine(family)
    for layer in range(3):
        names = ["resid_pre", "attn_out_post", "resid_mid", "mlp_out_post", "resid_post"]
        (result,) = model.run([Request(TOKENS, capture=[f"{name}.{layer}" for name in names])])
        x, a, m, b, y = (result.capture[f"{name}.{layer}"] for name in names)
        assert torch.allclose(x + a, m, rtol=0, atol=1e-13) and torch.allclose(m + b, y, rtol=0, atol=1e-13)


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_a_zero_contribution_leaves_the_stream_alone(family: str) -> None:
    model = engine(family)
    (result,) = model.run([Request(TOKENS, capture=["resid_pre.1", "resid_mid.1"], edits=[Ablate("attn_out_post.1")])])
    assert torch.equal(result.capture["resid_mid.1"], result.capture["resid_pre.1"])
    (result,) = model.run([Request(TOKENS, capture=["resid_mid.1", "resid_post.1"], edits=[Ablate("mlp_out_post.1")])])
    assert torch.equal(result.capture["resid_post.1"], result.capture["resid_mid.1"])
