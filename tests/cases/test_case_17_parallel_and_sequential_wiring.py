"""TransformerLens#1644: the wiring of GPT-NeoX is that of the model at hand, not of its family's name."""

import pytest
import torch

from interp.engines.base import Request
from interp.errors import PointRefused
from tests.families.loaded import engine

TOKENS = [7, 3, 99, 64]
NAMES = ["resid_pre.1", "attn_out_post.1", "mlp_out_post.1", "resid_post.1"]


def test_sequential() -> None:
    (result,) = engine("gpt_neox_sequential").run([Request(TOKENS, capture=[*NAMES, "resid_mid.1"])])
    x, a, b, y = (result.capture[name] for name in NAMES)
    assert torch.allclose(result.capture["resid_mid.1"], x + a, rtol=0, atol=1e-14)
    assert torch.allclose(y, x + a + b, rtol=0, atol=1e-13)


def test_parallel() -> None:
    model = engine("gpt_neox_parallel")
    (result,) = model.run([Request(TOKENS, capture=[*NAMES, "mlp_in.1"])])
    x, a, b, y = (result.capture[name] for name in NAMES)
    assert torch.allclose(y, x + a + b, rtol=0, atol=1e-13)
    with torch.no_grad(), model.numerics():
        norm = model.module.get_submodule("gpt_neox.layers.1.post_attention_layernorm")
        assert torch.equal(result.capture["mlp_in.1"], norm(x))
    with pytest.raises(PointRefused, match="adds attention and MLP in parallel"):
        model.run([Request(TOKENS, capture=["resid_mid.1"])])
