"""An Anatomy that is written by hand is the resolved one where both can be had, and its lies are found out."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from interp.edits import Scale
from interp.engines.base import Request
from interp.engines.doctor import prove
from interp.engines.eager import EagerEngine
from interp.engines.load import wrap
from interp.models import by_hand
from interp.models.anatomy import Anatomy
from interp.models.by_hand import Attention, Block, Neurons, Slice, Sublayer
from interp.models.proofs import needed
from interp.models.tiny import tiny_model
from interp.models.weights import BlockWeights
from tests.engines.own_modules import D_HEAD, N_HEADS, N_LAYERS, own_model

PROMPTS = ([7, 3, 9], [11, 60, 2, 30, 5, 5])
WIDTH = N_HEADS * D_HEAD


def own_block(layer: int, **changes: Any) -> Block:
    """Everything that can be said of a block of `own_model`."""
    stated = {
        "attn": Sublayer("attention", norm="norm1"),
        "mlp": Sublayer("mlp", norm="norm2"),
        "attention": Attention(
            query=Slice("attention.qkv", range(WIDTH)),
            key=Slice("attention.qkv", range(WIDTH, 2 * WIDTH)),
            value=Slice("attention.qkv", torch.arange(2 * WIDTH, 3 * WIDTH).view(N_HEADS, D_HEAD)),
            output="attention.out",
            n_heads=N_HEADS,
        ),
        "neurons": Neurons(down="mlp.2", pre="mlp.0"),
    }
    return Block(f"blocks.{layer}", **(stated | changes))


def own_anatomy(model: nn.Module, *blocks: Block) -> Anatomy:
    return by_hand.anatomy(
        model,
        embeddings="tokens",
        blocks=blocks or [own_block(layer) for layer in range(N_LAYERS)],
        final_norm="norm",
        head="head",
    )


LLAMA = {
    "attn": Sublayer("self_attn", norm="input_layernorm"),
    "mlp": Sublayer("mlp", norm="post_attention_layernorm"),
    "attention": Attention(
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        output="self_attn.o_proj",
        n_heads=6,
        n_kv_heads=2,
    ),
    "neurons": Neurons(down="mlp.down_proj", pre="mlp.gate_proj", pre_linear="mlp.up_proj"),
}
GEMMA = LLAMA | {
    "attn": Sublayer("self_attn", norm="input_layernorm", post_norm="post_attention_layernorm"),
    "mlp": Sublayer("mlp", norm="pre_feedforward_layernorm", post_norm="post_feedforward_layernorm"),
    "attention": replace(LLAMA["attention"], q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"),
}
GRANITE = LLAMA | {name: replace(LLAMA[name], multiplier=0.22) for name in ("attn", "mlp")}
COHERE = LLAMA | {
    "attn": Sublayer("self_attn", norm="input_layernorm"),
    "mlp": Sublayer("mlp", norm="input_layernorm"),
    "parallel": True,
}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "gemma3_text": (GEMMA, {}),
    "gemma2, capped": ({k: v for k, v in GEMMA.items() if k != "attention"}, {"logit_cap": 3.0}),
    "granite, all multipliers": (GRANITE, {"logit_scale": 1 / 8}),
    "cohere": (COHERE, {"logit_scale": 0.0625}),
}


def family_anatomy(model: nn.Module, family: str) -> Anatomy:
    stated, head = FAMILIES[family]
    return by_hand.anatomy(
        model,
        embeddings="model.embed_tokens",
        blocks=[Block(f"model.layers.{layer}", **stated) for layer in range(3)],
        final_norm="model.norm",
        head="lm_head",
        **head,
    )


def same_everywhere(resolved: EagerEngine, written: EagerEngine) -> None:
    """Points, refusals, claims with their numbers, tensors bit for bit, writes, weights."""
    points = needed(resolved.anatomy)
    assert needed(written.anatomy) == points and written.anatomy.refused == resolved.anatomy.refused
    assert prove(written) == prove(resolved)
    assert written.model == replace(resolved.model, fingerprint=written.model.fingerprint)
    assert [written.support(p) for p in points] == [resolved.support(p) for p in points]
    asked = [Request(prompt, points) for prompt in PROMPTS]
    for one, other in zip(written.run(asked), resolved.run(asked), strict=True):
        for point in points:
            assert torch.equal(one.capture[point], other.capture[point]), point
    for point in points:
        if written.support(point).writable:
            (one,), (other,) = (
                engine.run([Request(PROMPTS[0], ["logits"], [Scale(point, 1.5)])]) for engine in (written, resolved)
            )
            assert torch.equal(one.capture["logits"], other.capture["logits"]), point
    for layer in range(resolved.model.n_layers):
        mine, right = written.weights(layer), resolved.weights(layer)
        assert isinstance(mine, BlockWeights) == isinstance(right, BlockWeights)
        if isinstance(mine, BlockWeights) and isinstance(right, BlockWeights):
            assert torch.equal(mine.W_V, right.W_V) and torch.equal(mine.W_O, right.W_O)
            assert (mine.attn.multiplier, mine.parallel) == (right.attn.multiplier, right.parallel)
            assert mine.mlp.pre is not None and right.mlp.pre is not None
            assert torch.equal(mine.mlp.pre.gain, right.mlp.pre.gain)


def test_a_hand_written_model_is_what_it_is_resolved_to() -> None:
    model = own_model()
    same_everywhere(wrap(model), wrap(model, anatomy=own_anatomy(model)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_transformers_is_what_it_is_resolved_to(family: str) -> None:
    model = tiny_model(family)
    same_everywhere(wrap(model), wrap(model, anatomy=family_anatomy(model, family)))
