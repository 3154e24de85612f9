"""An Anatomy that is written by hand is the resolved one where both can be had, and its lies are found out."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interp.edits import Scale
from interp.engines.base import Request
from interp.engines.doctor import prove
from interp.engines.eager import EagerEngine
from interp.engines.echo import echo
from interp.engines.load import wrap
from interp.errors import UserError
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
    edited = [Request(PROMPTS[0], ["logits"], [Scale(p, 1.5)]) for p in points if written.support(p).writable]
    for one, other in zip(written.run(edited), resolved.run(edited), strict=True):
        assert torch.equal(one.capture["logits"], other.capture["logits"])
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


def test_what_is_not_written_is_resolved() -> None:
    model = own_model()
    resolved = wrap(model)
    plain = own_block(1, attention=None, neurons=None)
    same_everywhere(resolved, wrap(model, anatomy=own_anatomy(model, own_block(0), plain)))
    anatomy = by_hand.anatomy(
        model, embeddings="tokens", blocks=["blocks.0", "blocks.1"], final_norm="norm", head="head", d_vocab=5
    )
    same_everywhere(resolved, wrap(model, anatomy=anatomy))


class Spread(nn.Module):
    """The block of `own_model` with its sublayers' modules in the block itself, whose forward is the attention."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = block.norm1, block.attention.qkv, block.attention.out
        self.norm2, self.up, self.down = block.norm2, block.mlp[0], block.mlp[2]

    def forward(self, x: Tensor) -> Tensor:
        batch, n_pos, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, n_pos, 3, N_HEADS, D_HEAD).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / D_HEAD**0.5).masked_fill(torch.ones(n_pos, n_pos).triu(1) > 0, -torch.inf)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


def test_sublayers_of_several_modules_are_named_by_where_they_begin_and_end() -> None:
    model, plain = own_model(), wrap(own_model())
    model.blocks = nn.ModuleList(Spread(block) for block in model.blocks)
    blocks = [
        Block(
            f"blocks.{layer}",
            attn=Sublayer("", norm="norm1", reads="qkv", returns="out"),
            mlp=Sublayer("down", norm="norm2", reads="up"),
            attention=Attention(
                query=Slice("qkv", range(WIDTH)),
                key=Slice("qkv", range(WIDTH, 2 * WIDTH)),
                value=Slice("qkv", range(2 * WIDTH, 3 * WIDTH)),
                output="out",
                n_heads=N_HEADS,
            ),
            neurons=Neurons(down="down", pre="up"),
        )
        for layer in range(N_LAYERS)
    ]
    engine = wrap(model, anatomy=own_anatomy(model, *blocks))
    points = needed(plain.anatomy)
    assert needed(engine.anatomy) == points and not engine.anatomy.refused
    assert all(claim.holds for claim in echo(engine))
    (one,), (other,) = (each.run([Request(PROMPTS[1], points)]) for each in (engine, plain))
    for point in points:
        assert torch.allclose(one.capture[point].double(), other.capture[point].double(), rtol=1e-12, atol=0), point


class Squeeze(nn.Module):
    """A norm of no known kind."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + x.abs())


def test_behind_a_norm_of_no_known_kind_everything_else_is_served() -> None:
    model = own_model()
    model.blocks[1].norm1 = Squeeze()
    resolved, written = wrap(model), wrap(model, anatomy=own_anatomy(model))
    same_everywhere(resolved, written)
    assert written.support("attn_in.1").writable and written.support("value.1").writable
    assert written.support("attn_normalized.1").reason == "what stands before this sublayer is no known norm"
    with pytest.raises(UserError, match=r"'norm' as a norm, and it computes neither RMSNorm nor LayerNorm"):
        model.norm = Squeeze()  # type: ignore[assignment]
        own_anatomy(model)


# What is not so.


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return tiny_model("llama")


def refusals(model: nn.Module, **changes: Any) -> dict[str, str]:
    """Points of layer 1 that are lost, with the reason, where layer 1 is described with these changes."""
    blocks = [Block(f"model.layers.{layer}", **(LLAMA | (changes if layer == 1 else {}))) for layer in range(3)]
    anatomy = by_hand.anatomy(
        model, embeddings="model.embed_tokens", blocks=blocks, final_norm="model.norm", head="lm_head"
    )
    engine, right = wrap(model, anatomy=anatomy), wrap(model)
    lost = {}
    for point in needed(right.anatomy):
        if not engine.support(point).readable:
            lost[str(point)] = engine.support(point).reason
    return lost


def inside(**changes: Any) -> Attention:
    return replace(LLAMA["attention"], **changes)


SWAPPED = Neurons(down="mlp.down_proj", pre="mlp.up_proj", pre_linear="mlp.gate_proj")


@pytest.mark.parametrize(
    ("changes", "lost", "reason"),
    [
        (
            {"attention": inside(value="self_attn.k_proj")},
            "attn_probs.1 value.1 z.1",
            r"attn_probs @ value = z \(P5\) is off by [0-9.e+]+ units of rounding where [0-9.]+ are explained",
        ),
        (
            {"attn": replace(LLAMA["attn"], multiplier=0.5)},
            "attn_out_post.1 resid_mid.1",
            r"resid_pre \+ attn_out_post = resid_mid \(P1\) is off by [0-9.e+]+ units",
        ),
        (
            {"mlp": replace(LLAMA["mlp"], multiplier=1.01)},
            "mlp_out_post.1 resid_post.1",
            r"resid_mid \+ mlp_out_post = resid_post \(P1\) is off by",
        ),
        (
            {"attn": replace(LLAMA["attn"], norm="post_attention_layernorm")},
            "attn_in.1 attn_norm_scale.1 attn_normalized.1",
            r"attn_normalized · gain \+ bias = attn_in \(P8\) is off by",
        ),
        (
            {"attn": replace(LLAMA["attn"], norm=None)},
            "attn_in.1 attn_norm_scale.1 attn_normalized.1",
            r"no norm stands there in this model|attn_in is the stream \(P8\) is off by",
        ),
        (
            {"neurons": replace(SWAPPED, activation=nn.functional.silu)},
            "mlp_pre.1 mlp_pre_linear.1",
            r"act\(mlp_pre\) · mlp_pre_linear = mlp_act \(P6\) is off by",
        ),
        (
            {"neurons": SWAPPED},
            "mlp_pre.1 mlp_pre_linear.1",
            r"act\(mlp_pre\) is a known function \(P6\) is off by inf",
        ),
        ({"attention": inside(output="self_attn.q_proj")}, "z.1 head_out.1", "does not read the mixed values"),
        (
            {"parallel": True},
            "resid_mid.1 mlp_in.1 mlp_normalized.1 mlp_norm_scale.1",
            r"adds attention and MLP in parallel|mlp_normalized · gain \+ bias = mlp_in \(P8\) is off by",
        ),
    ],
    ids=[
        "value",
        "attention's multiplier",
        "MLP's multiplier",
        "another norm",
        "no norm",
        "gate and up",
        "gate and up, no function",
        "output",
        "parallel",
    ],
)
def test_a_wrong_statement_takes_its_points_away_and_no_others(
    llama: nn.Module, changes: dict[str, Any], lost: str, reason: str
) -> None:
    found = refusals(llama, **changes)
    assert set(found) == set(lost.split())
    assert all(re.search(reason, why) for why in found.values()), found


def test_queries_and_keys_are_told_apart_by_the_pass() -> None:
    """No equation tells them apart where they have equally many heads."""
    model, right = own_model(), own_block(1).attention
    assert right is not None
    exchanged = own_block(1, attention=replace(right, query=right.key, key=right.query))
    engine = wrap(model, anatomy=own_anatomy(model, own_block(0), exchanged))
    lost = {str(p): engine.support(p).reason for p in needed(wrap(model).anatomy) if not engine.support(p).readable}
    assert set(lost) == {"query.1", "key.1"}
    assert lost["query.1"] == "other channels of blocks.1.attention.qkv are its query than the anatomy names"


def test_the_head_is_proven_with_its_scale_and_cap(llama: nn.Module) -> None:
    def lost(**changes: Any) -> set[str]:
        stated: dict[str, Any] = {"final_norm": "model.norm", "head": "lm_head", "blocks": ["model.layers.0"]}
        stated |= {"blocks": [f"model.layers.{i}" for i in range(3)], "embeddings": "model.embed_tokens"}
        engine = wrap(llama, anatomy=by_hand.anatomy(llama, **(stated | changes)))
        every = [*map(str, needed(wrap(llama).anatomy))]
        return {point for point in every if not engine.support(point).readable}

    assert lost() == set()
    assert lost(logit_scale=2.0) == {"final_norm", "lm_head", "logits"}
    assert lost(logit_cap=30.0) == {"final_norm", "lm_head", "logits"}
    assert lost(final_norm="model.layers.0.input_layernorm") >= {"final_norm", "final_normalized", "final_norm_scale"}
    assert lost(blocks=["model.layers.0", "model.layers.2"]) >= {"resid_post.0", "resid_pre.1", "resid_pre.2"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attn": Sublayer("attn")}, "'model.layers.1.attn', and LlamaForCausalLM has no module of that path"),
        ({"mlp": Sublayer("mlp", post_norm="mlp")}, "'model.layers.1.mlp' as a norm, and it computes neither"),
        ({"attention": inside(key="input_layernorm")}, "'model.layers.1.input_layernorm' as a projection, and it"),
        ({"attention": inside(n_heads=7)}, "says 7 heads of .*self_attn, and the pass shows 6"),
        ({"attention": inside(n_kv_heads=3)}, "gives 20 channels, which 3 heads do not divide"),
        (
            {"attention": inside(n_kv_heads=4)},
            "4 heads of 5 channels in .*v_proj; the mixed values have 10",
        ),
        ({"attention": inside(value=Slice("self_attn.v_proj", [0, 20]))}, "has channels 0 to 19, and the anatomy"),
        ({"mlp": Sublayer("mlp.up_proj")}, "takes or returns nothing shaped like the stream"),
    ],
)
def test_what_cannot_be_is_said_at_once(llama: nn.Module, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        refusals(llama, **changes)
    assert "\n" not in str(error.value)


def test_what_no_pass_reaches_and_what_is_no_block(llama: nn.Module) -> None:
    model = own_model()
    model.unused = nn.Linear(2, 2)
    with pytest.raises(UserError, match="'unused', which does not run"):
        by_hand.anatomy(model, embeddings="tokens", blocks=["blocks.0"], final_norm="norm", head="unused")
    with pytest.raises(UserError, match="'head' as a block, and it returns no tensor"):
        by_hand.anatomy(model, embeddings="tokens", blocks=["head"], final_norm="norm", head="head")
    with pytest.raises(UserError, match="name at least one"):
        by_hand.anatomy(model, embeddings="tokens", blocks=[], final_norm="norm", head="head")
