"""Every tiny family resolves, all its claims hold in true float64, and it serves what its mathematics has."""

import pytest
import torch
from torch import Tensor

from interp.engines.base import Request, Result
from interp.engines.doctor import prove
from interp.engines.eager import EagerEngine
from interp.errors import PointRefused
from interp.models.anatomy import Refusal
from interp.points import POINTS, Address
from tests.families.loaded import engine as engine_of
from tests.families.tiny import D_MODEL, EVERY, N_LAYERS, SPLIT_LLAMAS

Q, K = {"q_norm_in", "q_norm_out"}, {"k_norm_in", "k_norm_out"}
POST = {"attn_post_normalized", "attn_post_norm_scale", "mlp_post_normalized", "mlp_post_norm_scale"}
PRE = {"attn_normalized", "attn_norm_scale", "mlp_normalized", "mlp_norm_scale"}
NEURONS = {"mlp_pre", "mlp_pre_linear", "mlp_act"}
PLAIN_MLP, PARALLEL = {"mlp_pre_linear"}, {"resid_mid"}
LLAMA = Q | K | POST
NOWHERE = {point for point in POINTS if "stream" in point} | {"attn_gate", "extra_out_post"}
ROUTING = {"router_logits", "expert_weights", "expert_indices", "expert_out"}

ABSENT = {
    "llama": LLAMA,
    "gpt2": LLAMA | PLAIN_MLP,
    "gpt_neox_parallel": LLAMA | PLAIN_MLP | PARALLEL,
    "gpt_neox_sequential": LLAMA | PLAIN_MLP,
    "qwen2": LLAMA,
    "qwen3": POST,
    "gemma": LLAMA,
    "gemma2": Q | K,
    "gemma3": set(),
    "olmo": LLAMA,
    "olmo2": PRE,
    "glm4": Q | K,
    "granite": LLAMA,
    "cohere": LLAMA | PARALLEL,
    "cohere2": LLAMA | PARALLEL,
    "phi": LLAMA | PLAIN_MLP | PARALLEL,
    "phi3": LLAMA,
    "stablelm": LLAMA,
    "gptj": LLAMA | PLAIN_MLP | PARALLEL,
    "opt": LLAMA | PLAIN_MLP,
    "split_llama": LLAMA,
    "split_llama_mlp": LLAMA,
}
"""Points that do not exist in a layer of the family, by its paper; those of every family are left out."""
UNSEEN_ATTENTION = ("bloom", "mpt", "falcon")
"""Families outside transformers' attention registry: seen at their softmax."""
STREAM = ("resid_pre", "attn_in", "attn_out", "attn_out_post", "mlp_in", "mlp_out", "mlp_out_post", "resid_post")


def served(engine: EagerEngine, layer: int) -> set[str]:
    names = [p.name for p in POINTS.values() if p.per_layer]
    return {name for name in names if engine.support(Address(name, layer)).readable}


def capture_all(engine: EagerEngine, points: list[str], tokens: list[int]) -> Result:
    return engine.run([Request(tokens, capture=points, return_logits=True)])[0]


def adapted(engine: EagerEngine, x: Tensor) -> Tensor:
    """What the next block receives of a stream that leaves layer 0: itself, but in a SplitLlama."""
    if engine.model.family != "split_llama":
        return x
    with torch.no_grad():
        return engine.module.adapter(x[None])[0]  # type: ignore[operator]


def relative(found: Tensor, right: Tensor) -> float:
    return float((found - right).abs().max() / right.abs().max())


@pytest.mark.parametrize("family", EVERY)
def test_every_claim_holds_in_float64_and_nothing_is_taken_away(family: str) -> None:
    engine = engine_of(family)
    claims = prove(engine)
    assert [c for c in claims if not c.holds] == []
    assert engine.anatomy.refused == {}
    for layer in range(N_LAYERS):
        assert {"P1", "P3", "P8"} <= {c.proof for c in claims if c.layer == layer}
    assert {c.layer for c in claims if c.proof == "P2"} >= set(range(N_LAYERS))
    assert [c for c in claims if c.proof == "P4"]
    assert engine.model.n_layers == N_LAYERS
    assert engine.model.d_model == D_MODEL


@pytest.mark.parametrize("family", ABSENT)
def test_a_family_serves_what_its_equations_have_and_nothing_else(family: str) -> None:
    everything = {p.name for p in POINTS.values() if p.per_layer}
    for layer in range(N_LAYERS):
        assert served(engine_of(family), layer) == everything - ABSENT[family] - NOWHERE - ROUTING


def test_dense_and_sparse_layers_of_one_model_differ_in_neurons_and_routing_only() -> None:
    engine = engine_of("qwen3_moe")  # every second layer has experts
    dense, sparse = served(engine, 0), served(engine, 1)
    assert dense - sparse == NEURONS
    assert sparse - dense == ROUTING
    assert POST.isdisjoint(dense | sparse)
    assert dense >= Q | K


@pytest.mark.parametrize("family", UNSEEN_ATTENTION)
def test_families_with_attention_of_their_own_serve_its_inside_too(family: str) -> None:
    engine = engine_of(family)
    inside = {"query", "key", "value", "query_rot", "key_rot", "attn_scores", "attn_probs", "z"}
    right = {*STREAM, "mlp_pre", "mlp_act", *PRE, *inside} | ({"resid_mid"} if family != "falcon" else set())
    assert served(engine, 1) >= right
    assert served(engine, 1).isdisjoint(LLAMA | PLAIN_MLP)
    assert ("resid_mid" in served(engine, 1)) == (family != "falcon")


@pytest.mark.parametrize("family", ["gpt_neox_parallel", "cohere", "cohere2", "phi", "gptj", "falcon"])
def test_a_parallel_block_refuses_its_middle_with_the_reason(family: str) -> None:
    engine = engine_of(family)
    assert engine.model.parallel
    with pytest.raises(PointRefused, match=r"^resid_mid\.1 does not exist here: .*parallel.* Nearest: resid_post\.1"):
        engine.run([Request([3, 4], capture=["resid_mid.1"])])


@pytest.mark.parametrize("family", EVERY)
def test_the_residual_sums_close_on_captured_tensors(family: str) -> None:
    engine = engine_of(family)
    names = [name for name in (*STREAM, "resid_mid") if engine.support(f"{name}.1").readable]
    points = [f"{name}.{layer}" for layer in range(N_LAYERS) for name in names]
    result = capture_all(engine, points, [5, 9, 120, 33, 71, 5])
    for layer in range(N_LAYERS):
        at = {name: result.capture[f"{name}.{layer}"] for name in names}
        total = at["resid_pre"] + at["attn_out_post"] + at["mlp_out_post"]
        assert relative(total, at["resid_post"]) < 1e-14
        assert at["attn_out_post"].abs().max() > 1e-3 < at["mlp_out_post"].abs().max()
        if "resid_mid" in at:
            assert relative(at["resid_pre"] + at["attn_out_post"], at["resid_mid"]) < 1e-14
        if layer:
            left = result.capture[f"resid_post.{layer - 1}"]
            assert torch.equal(at["resid_pre"], adapted(engine, left) if layer == 1 else left)


@pytest.mark.parametrize("family", EVERY)
def test_normalized_points_are_float64_inside(family: str) -> None:
    """P8 at 1e-14: a single cast to float32 inside the model would cost nine digits."""
    engine = engine_of(family)
    pairs = [("attn", "attn_in"), ("mlp", "mlp_in"), ("attn_post", "attn_out_post"), ("mlp_post", "mlp_out_post")]
    checked = 0
    for layer in range(N_LAYERS):
        block = engine.anatomy.blocks[layer]
        for name, output in pairs:
            if not engine.support(f"{name}_normalized.{layer}").readable:
                continue
            sublayer = getattr(block, name.removesuffix("_post"))
            norm = sublayer.post_norm if name.endswith("_post") else sublayer.pre_norm
            got = capture_all(engine, [f"{name}_normalized.{layer}", f"{output}.{layer}"], [8, 1, 55, 2]).capture
            bias = 0.0 if norm.bias is None else norm.bias
            expected = got[f"{name}_normalized.{layer}"] * norm.gain + bias
            factor = sublayer.multiplier if name.endswith("_post") else 1.0
            assert relative(expected * factor, got[f"{output}.{layer}"]) <= 1e-14
            checked += 1
    assert checked >= 2 * N_LAYERS


@pytest.mark.parametrize("family", EVERY)
def test_the_head_closes(family: str) -> None:
    """Scale, bias and cap each once: the last stream through the real head gives the model's own logits."""
    engine = engine_of(family)
    tokens = [5, 9, 120, 33]
    with torch.no_grad(), engine.numerics():
        own = engine.module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    result = capture_all(engine, [f"resid_post.{N_LAYERS - 1}"], tokens)
    assert result.logits is not None and torch.equal(result.logits, own)
    assert relative(engine.unembed(result.capture[f"resid_post.{N_LAYERS - 1}"]), own) < 1e-14


@pytest.mark.parametrize("family", EVERY)
def test_every_point_has_the_shape_of_the_table(family: str) -> None:
    engine = engine_of(family)
    model, n = engine.model, 5
    names = [Address(p.name, layer) for p in POINTS.values() if p.per_layer for layer in range(N_LAYERS)]
    names += [Address(p.name) for p in POINTS.values() if not p.per_layer]
    points = [str(address) for address in names if engine.support(address).readable]
    captured = engine.run([Request([5, 9, 120, 33, 71], capture=points)])[0].capture
    late = {"d_model": D_MODEL, "heads": model.n_heads, "kv_heads": model.n_kv_heads, "d_head": model.d_head}
    early = {"d_model": 36, "heads": 4, "kv_heads": 1, "d_head": 14} if family in SPLIT_LLAMAS else late
    sizes = {"d_vocab": model.d_vocab, "query": n, "key": n, "experts": 4, "selected": 2, "1": 1}
    for point in map(Address.parse, points):
        shape = list(captured[point].shape)
        neurons = engine.anatomy.blocks[point.layer or 0].neurons
        wide = sizes | (early if point.layer == 0 or point.name == "embeddings" else late)
        wide |= {} if isinstance(neurons, Refusal) else {"d_mlp": neurons.down.weight.shape[1]}
        right = [wide[axis] for axis in POINTS[point.name].shape]
        assert shape == (right if POINTS[point.name].matrix else [n, *right]), point
