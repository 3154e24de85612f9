"""interp-engine#24: the stream before a norm and what the sublayer receives are two tensors of one shape."""

import pytest
import torch

from interp.engines.base import Request
from interp.errors import UserError
from interp.names import point_of
from tests.families.loaded import engine


@pytest.mark.parametrize("name", ["blocks.1.hook_mlp_in", "blocks.1.hook_attn_in"])
def test_the_names_of_the_stream_are_refused_without_a_model(name: str) -> None:
    with pytest.raises(UserError, match="no meaning that holds on every family"):
        point_of(name, "transformer_lens")


@pytest.mark.parametrize(
    ("family", "stream", "norm"),
    [
        ("gpt2", "resid_mid.1", "transformer.h.1.ln_2"),
        ("gpt_neox_parallel", "resid_pre.1", "gpt_neox.layers.1.post_attention_layernorm"),
    ],
)
def test_what_the_mlp_receives_is_the_norm_of_the_stream(family: str, stream: str, norm: str) -> None:
    model, address = engine(family), point_of("blocks.1.mlp.hook_in", "transformer_lens")
    for tool in ("transformer_lens", "transformer_lens_legacy"):
        assert str(point_of("blocks.1.hook_mlp_in", tool, model.layout)) == stream
    (result,) = model.run([Request([7, 3, 99], capture=[stream, address])])
    with torch.no_grad(), model.numerics():
        assert torch.equal(model.module.get_submodule(norm)(result.capture[stream]), result.capture[address])
