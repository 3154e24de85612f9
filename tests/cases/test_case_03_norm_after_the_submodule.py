"""nnterp#53: where a norm follows the submodule, what is added is the norm's output; a raw write passes through it."""

import pytest
import torch

from interp.edits import Replace
from interp.engines.base import Request
from tests.families.loaded import F64, engine

TOKENS = [7, 3, 99, 64]
POST_NORM = {
    "gemma2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "gemma3": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "glm4": ("post_self_attn_layernorm", "post_mlp_layernorm"),
    "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm"),
}


@pytest.mark.parametrize("family", POST_NORM)
def test_the_sums_hold_for_contributions_only(family: str) -> None:
    names = ["resid_pre", "attn_out", "attn_out_post", "resid_mid", "mlp_out", "mlp_out_post", "resid_post"]
    for layer in range(3):
        (result,) = engine(family).run([Request(TOKENS, capture=[f"{name}.{layer}" for name in names])])
        x, a, a_post, m, b, b_post, y = (result.capture[f"{name}.{layer}"] for name in names)
        assert torch.allclose(x + a_post, m, rtol=0, atol=1e-13) and torch.allclose(m + b_post, y, rtol=0, atol=1e-13)
        assert (x + a - m).abs().max() > 0.1 and (m + b - y).abs().max() > 0.1


@pytest.mark.parametrize("family", POST_NORM)
def test_the_contribution_is_the_norm_of_the_raw_output(family: str) -> None:
    model = engine(family)
    for name, path in zip(("attn", "mlp"), POST_NORM[family], strict=True):
        norm = model.module.get_submodule(f"model.layers.1.{path}")
        (result,) = model.run([Request(TOKENS, capture=[f"{name}_out.1", f"{name}_out_post.1"])])
        raw, contribution = result.capture[f"{name}_out.1"], result.capture[f"{name}_out_post.1"]
        with torch.no_grad(), model.numerics():
            assert torch.equal(norm(raw), contribution)
        assert (raw - contribution).abs().max() > 0.1

        value = torch.linspace(-3, 3, 48, dtype=F64)
        around = [f"{name}_out_post.1", "resid_post.1"]
        (through,) = model.run([Request(TOKENS, capture=around, edits=[Replace(f"{name}_out.1", value)])])
        (past,) = model.run([Request(TOKENS, capture=around, edits=[Replace(f"{name}_out_post.1", value)])])
        with torch.no_grad(), model.numerics():
            assert torch.allclose(through.capture[around[0]], norm(value.expand(4, -1)), rtol=0, atol=1e-14)
        assert torch.equal(past.capture[around[0]], value.expand(4, -1))
        assert (through.capture["resid_post.1"] - past.capture["resid_post.1"]).abs().max() > 0.1
