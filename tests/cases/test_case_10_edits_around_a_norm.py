"""TransformerLens#1526: an edit at a norm's input or output acts as in a forward written by hand, or is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from interp.edits import Replace
from interp.engines.base import Request
from interp.errors import PointRefused
from tests.families.loaded import F64, engine, writable

TOKENS = [11, 64, 2, 130, 5]
NEOX, GEMMA = "gpt_neox.layers.1", "model.layers.1"
BY_HAND: dict[str, dict[str, tuple[str, str]]] = {
    "gpt_neox_parallel": {
        "resid_pre.1": (NEOX, "input"),
        "attn_in.1": (f"{NEOX}.attention", "input"),
        "attn_out.1": (f"{NEOX}.attention", "output"),
        "attn_out_post.1": (f"{NEOX}.attention", "output"),
        "mlp_in.1": (f"{NEOX}.mlp", "input"),
        "mlp_pre.1": (f"{NEOX}.mlp.dense_h_to_4h", "output"),
        "mlp_act.1": (f"{NEOX}.mlp.dense_4h_to_h", "input"),
        "mlp_out.1": (f"{NEOX}.mlp", "output"),
        "mlp_out_post.1": (f"{NEOX}.mlp", "output"),
        "resid_post.1": (NEOX, "output"),
        "z.1": (f"{NEOX}.attention.dense", "input"),
        "final_norm": ("gpt_neox.final_layer_norm", "output"),
        "embeddings": ("gpt_neox.embed_in", "output"),
        "lm_head": ("lm_head", "output"),
    },
    "gemma3": {
        "resid_pre.1": (GEMMA, "input"),
        "attn_in.1": (f"{GEMMA}.input_layernorm", "output"),
        "q_norm_in.1": (f"{GEMMA}.self_attn.q_norm", "input"),
        "q_norm_out.1": (f"{GEMMA}.self_attn.q_norm", "output"),
        "k_norm_in.1": (f"{GEMMA}.self_attn.k_norm", "input"),
        "k_norm_out.1": (f"{GEMMA}.self_attn.k_norm", "output"),
        "query.1": (f"{GEMMA}.self_attn.q_proj", "output"),
        "key.1": (f"{GEMMA}.self_attn.k_proj", "output"),
        "value.1": (f"{GEMMA}.self_attn.v_proj", "output"),
        "z.1": (f"{GEMMA}.self_attn.o_proj", "input"),
        "attn_out.1": (f"{GEMMA}.post_attention_layernorm", "input"),
        "attn_out_post.1": (f"{GEMMA}.post_attention_layernorm", "output"),
        "mlp_in.1": (f"{GEMMA}.pre_feedforward_layernorm", "output"),
        "mlp_pre.1": (f"{GEMMA}.mlp.gate_proj", "output"),
        "mlp_pre_linear.1": (f"{GEMMA}.mlp.up_proj", "output"),
        "mlp_act.1": (f"{GEMMA}.mlp.down_proj", "input"),
        "mlp_out.1": (f"{GEMMA}.post_feedforward_layernorm", "input"),
        "mlp_out_post.1": (f"{GEMMA}.post_feedforward_layernorm", "output"),
        "resid_post.1": (GEMMA, "output"),
        "final_norm": ("model.norm", "output"),
        "embeddings": ("model.embed_tokens", "output"),
        "lm_head": ("lm_head", "output"),
    },
}
"""Point -> the module around whose call a plain hook puts the same value."""
ELSEWHERE = {"resid_mid.1", "query.1", "key.1", "value.1"}
"""Points whose hand-written forward stands in other tests: the skip path, and the fused heads of GPT-NeoX."""


def by_hand(model: Any, path: str, side: str, new: Callable[[Tensor], Tensor]) -> Tensor:
    def after(m: Any, a: tuple, output: Any) -> Any:
        return new(output) if isinstance(output, Tensor) else (new(output[0]), *output[1:])

    def before(m: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (new(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": new(kwargs["hidden_states"])}

    module = model.module.get_submodule(path)
    handle = (
        module.register_forward_pre_hook(before, with_kwargs=True)
        if side == "input"
        else module.register_forward_hook(after)
    )
    with torch.no_grad(), model.numerics():
        logits = model.module(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    handle.remove()
    return logits


@pytest.mark.parametrize("family", BY_HAND)
def test_every_point_advertised_as_writable_changes_the_logits_as_by_hand(family: str) -> None:
    model = engine(family)
    offered = set(writable(model))
    assert set(BY_HAND[family]) <= offered and offered - set(BY_HAND[family]) <= ELSEWHERE
    (clean,) = model.run([Request(TOKENS, capture=sorted(offered), return_logits=True)])
    for at, (path, side) in BY_HAND[family].items():
        generator = torch.Generator().manual_seed(3)
        value = torch.randn(clean.capture[at].shape, generator=generator, dtype=F64)

        def new(x: Tensor, value: Tensor = value, at: str = at) -> Tensor:
            heads_first = x.ndim == 4 and x.shape[1] != len(TOKENS)
            return (value.transpose(0, 1) if heads_first else value).reshape(x.shape)

        right = by_hand(model, path, side, new)
        (result,) = model.run([Request(TOKENS, edits=[Replace(at, value)], return_logits=True)])
        assert result.logits is not None and clean.logits is not None
        assert torch.allclose(result.logits, right, rtol=0, atol=1e-12 * (1 + float(right.abs().max()))), at
        assert (result.logits - clean.logits).abs().max() > 1e-3, at


@pytest.mark.parametrize("family", BY_HAND)
@pytest.mark.parametrize("point", ["mlp_normalized.1", "mlp_norm_scale.1", "attn_normalized.1", "final_normalized"])
def test_the_inside_of_a_norm_can_be_read_and_says_why_it_cannot_be_written(family: str, point: str) -> None:
    model = engine(family)
    v = torch.zeros(1 if "scale" in point else 48, dtype=F64)
    with pytest.raises(PointRefused, match=f"{point} can be read but not written: the value is computed inside"):
        model.run([Request(TOKENS, capture=[point], edits=[Replace(point, v)])])
