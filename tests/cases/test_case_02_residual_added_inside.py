"""nnterp#51, TransformerLens#1639: where the residual is added inside a submodule, the contribution is what it adds."""

from functools import cache

import pytest
import torch

from interp.edits import Ablate
from interp.engines.base import Request
from interp.engines.eager import EagerEngine
from interp.engines.load import wrap
from interp.models.tiny import tiny_model
from tests.families.loaded import engine

TOKENS = [7, 3, 99, 64]
ADDERS = {
    "bloom": ("transformer.h.1.self_attention", "transformer.h.1.mlp"),
    "mpt": (None, "transformer.blocks.1.ffn"),
    "dbrx": ("transformer.blocks.1.norm_attn_norm", None),
}
"""The modules that add the stream to what they compute: for attention, for the MLP."""


@cache
def dbrx() -> EagerEngine:
    return wrap(tiny_model("dbrx"))


def model_of(family: str) -> EagerEngine:
    return dbrx() if family == "dbrx" else engine(family)


@pytest.mark.parametrize("family", ADDERS)
def test_contributions_sum_to_the_stream(family: str) -> None:
    model = model_of(family)
    for layer in range(3):
        names = ["resid_pre", "attn_out_post", "resid_mid", "mlp_out_post", "resid_post"]
        (result,) = model.run([Request(TOKENS, capture=[f"{name}.{layer}" for name in names])])
        x, a, m, b, y = (result.capture[f"{name}.{layer}"] for name in names)
        assert torch.allclose(x + a, m, rtol=0, atol=1e-13) and torch.allclose(m + b, y, rtol=0, atol=1e-13)


@pytest.mark.parametrize("family", ADDERS)
def test_the_submodule_that_adds_returns_another_tensor_of_the_same_shape(family: str) -> None:
    model = model_of(family)
    for name, path in zip(("attn_out_post.1", "mlp_out_post.1"), ADDERS[family], strict=True):
        if path is None:
            continue
        returned: list[torch.Tensor] = []
        handle = model.module.get_submodule(path).register_forward_hook(
            lambda m, a, output, returned=returned: returned.append(
                (output if isinstance(output, torch.Tensor) else output[0]).clone()  # type: ignore[misc]
            )
        )
        (result,) = model.run([Request(TOKENS, capture=[name])])
        handle.remove()
        assert returned[0][0].shape == result.capture[name].shape
        assert (returned[0][0] - result.capture[name]).abs().max() > 0.1


@pytest.mark.parametrize("family", ADDERS)
def test_a_zero_contribution_leaves_the_stream_alone(family: str) -> None:
    model = model_of(family)
    (result,) = model.run([Request(TOKENS, capture=["resid_pre.1", "resid_mid.1"], edits=[Ablate("attn_out_post.1")])])
    assert torch.equal(result.capture["resid_mid.1"], result.capture["resid_pre.1"])
    (result,) = model.run([Request(TOKENS, capture=["resid_mid.1", "resid_post.1"], edits=[Ablate("mlp_out_post.1")])])
    assert torch.equal(result.capture["resid_post.1"], result.capture["resid_mid.1"])


def test_what_the_mlp_of_dbrx_receives_is_normed_inside_its_attention_part() -> None:
    model = dbrx()
    norm = model.module.get_submodule("transformer.blocks.1.norm_attn_norm.norm_2")
    (result,) = model.run([Request(TOKENS, capture=["resid_mid.1", "mlp_in.1", "mlp_out.1"])])
    with torch.no_grad(), model.numerics():
        assert torch.equal(norm(result.capture["resid_mid.1"]), result.capture["mlp_in.1"])
        ffn = model.module.get_submodule("transformer.blocks.1.ffn")
        assert torch.allclose(ffn(result.capture["mlp_in.1"][None])[0], result.capture["mlp_out.1"], rtol=0, atol=1e-13)
