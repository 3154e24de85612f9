"""The attention matrix and the rotated queries and keys are those that the eager forward pass itself uses."""

from typing import Any

import pytest
import torch

from interp.engines.base import Request
from interp.errors import UserError
from tests.families.loaded import F32, F64, PROMPTS, engine

MATRIX = ["attn_scores.{l}", "attn_probs.{l}", "query_rot.{l}", "key_rot.{l}"]
GROUPED = ["llama", "qwen3", "gemma2", "gemma3", "olmo2", "glm4", "granite", "stablelm", "phi3", "split_llama"]
TOKENS = [11, 64, 2, 130, 5, 5, 88]


def own_eager(model: Any, **inputs: Any) -> Any:
    before = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    try:
        with torch.no_grad():
            return model(**inputs, use_cache=False, output_attentions=True)
    finally:
        model.config._attn_implementation = before


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "gemma2", "gemma3", "gpt_neox_parallel", "qwen3", "granite", "opt"]
)
def test_logits_of_the_observed_attention_are_those_of_eager_bit_for_bit(family: str) -> None:
    model = engine(family, F32)
    config: Any = model.module.config
    before = config._attn_implementation
    assert before in ("sdpa", "eager")
    points = [text.format(l=layer) for text in MATRIX for layer in range(3)]
    (result,) = model.run([Request(TOKENS, capture=points, return_logits=True)])
    right = own_eager(model.module, input_ids=torch.tensor([TOKENS]))
    assert result.logits is not None and torch.equal(result.logits, right.logits[0])
    for layer, probs in enumerate(right.attentions):
        assert torch.equal(result.capture[f"attn_probs.{layer}"], probs[0])
    assert result.provenance.attention == "eager, observed"
    assert config._attn_implementation == before


@pytest.mark.parametrize("family", GROUPED)
def test_grouped_heads_mix_their_own_values(family: str) -> None:
    model = engine(family)
    (result,) = model.run([Request(TOKENS, capture=["attn_probs.1", "value.1", "z.1", "head_out.1", "attn_out.1"])])
    got = result.capture
    assert got["value.1"].shape[1:] == (2, model.model.d_head)
    each = got["value.1"].repeat_interleave(3, dim=1)
    assert torch.allclose(torch.einsum("hqk,khd->qhd", got["attn_probs.1"], each), got["z.1"], rtol=0, atol=1e-13)
    output = model.anatomy.blocks[1].mixer.output  # type: ignore[union-attr]
    bias = 0.0 if output.bias is None else output.bias  # type: ignore[union-attr]
    assert torch.allclose(got["head_out.1"].sum(1) + bias, got["attn_out.1"], rtol=0, atol=1e-13)


@pytest.mark.parametrize("family", GROUPED)
def test_scores_are_scaled_products_of_the_rotated_queries_and_keys(family: str) -> None:
    model = engine(family)
    (result,) = model.run([Request(TOKENS, capture=[text.format(l=1) for text in MATRIX])])
    query, key, scores = (result.capture[f"{name}.1"] for name in ("query_rot", "key_rot", "attn_scores"))
    each = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scale: float = {"gemma2": 7**-0.5, "gemma3": 7**-0.5, "granite": 0.2}.get(family) or model.model.d_head**-0.5
    right = torch.einsum("qhd,khd->hqk", query, each) * scale
    if family == "gemma2":
        right = (right / 50.0).tanh() * 50.0
    causal = torch.ones(len(TOKENS), len(TOKENS), dtype=torch.bool).tril()
    seen = causal & (result.capture["attn_probs.1"][0] > 0)
    assert seen.sum() >= 4 * len(TOKENS) - 6
    assert torch.allclose(scores[:, seen], right[:, seen], rtol=0, atol=1e-12)
    assert (scores[:, ~causal] < -1e30).all() and (result.capture["attn_probs.1"][:, ~causal] == 0).all()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi", "gpt_neox_parallel", "gptj", "split_llama"])
def test_rotation_keeps_lengths_and_leaves_the_first_position_alone(family: str) -> None:
    """What is rotated is the query after its norm, where it has one."""
    model = engine(family)
    for side in ("query", "key"):
        normed = f"{side[0]}_norm_out.1"
        before = normed if model.support(normed).readable else f"{side}.1"
        (result,) = model.run([Request(TOKENS, capture=[before, f"{side}_rot.1"])])
        x, y = result.capture[before], result.capture[f"{side}_rot.1"]
        assert torch.allclose(x.norm(dim=-1), y.norm(dim=-1), rtol=1e-12)
        assert torch.allclose(x[0], y[0], rtol=0, atol=1e-13)
        assert (x[3] - y[3]).abs().max() > 0.01


def test_no_position_encoding_of_queries_leaves_them_as_they_are() -> None:
    (result,) = engine("gpt2").run([Request(TOKENS, capture=["query.1", "query_rot.1", "key.1", "key_rot.1"])])
    assert torch.equal(result.capture["query.1"], result.capture["query_rot.1"])
    assert torch.equal(result.capture["key.1"], result.capture["key_rot.1"])


@pytest.mark.parametrize("family", ["llama", "gpt_neox_parallel", "phi3", "gpt2"])
def test_queries_and_keys_are_their_head_of_the_projection(family: str) -> None:
    """Fused layouts differ: GPT-NeoX interleaves q, k, v per head, GPT-2 and Phi-3 stack them."""
    model = engine(family)
    info = model.model
    (result,) = model.run([Request(TOKENS, capture=["attn_in.1", "query.1", "key.1", "value.1"])])
    layer: Any = model.anatomy.blocks[1].module
    x, h, kv, d = result.capture["attn_in.1"], info.n_heads, info.n_kv_heads, info.d_head
    if family == "llama":
        attn = layer.self_attn
        parts = [attn.q_proj(x).view(-1, h, d), attn.k_proj(x).view(-1, kv, d), attn.v_proj(x).view(-1, kv, d)]
    elif family == "gpt_neox_parallel":
        parts = list(layer.attention.query_key_value(x).view(-1, h, 3 * d).split(d, -1))
    elif family == "phi3":
        parts = [
            p.view(-1, p.shape[-1] // d, d) for p in layer.self_attn.qkv_proj(x).split([h * d, kv * d, kv * d], -1)
        ]
    else:
        parts = [p.view(-1, h, d) for p in (x @ layer.attn.c_attn.weight + layer.attn.c_attn.bias).split(h * d, -1)]
    for name, right in zip(("query", "key", "value"), parts, strict=True):
        assert torch.allclose(result.capture[f"{name}.1"], right, rtol=0, atol=1e-13), name


def test_other_points_of_such_a_request_equal_the_usual_ones_within_the_floor() -> None:
    model = engine("gemma3", F64)
    (usual,) = model.run([Request(TOKENS, capture=["resid_post.2"])])
    (beside,) = model.run([Request(TOKENS, capture=["resid_post.2", "attn_probs.0"])])
    assert torch.allclose(usual.capture["resid_post.2"], beside.capture["resid_post.2"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "split_llama_mlp"])
def test_matrices_of_unequal_prompts_equal_those_alone(family: str) -> None:
    model = engine(family)
    points = [text.format(l=2) for text in MATRIX]
    together = model.run([Request(prompt, capture=points) for prompt in PROMPTS])
    for prompt, result in zip(PROMPTS, together, strict=True):
        (alone,) = model.run([Request(prompt, capture=points)])
        for point in points:
            assert result.capture[point].shape == alone.capture[point].shape
            assert torch.allclose(result.capture[point], alone.capture[point], rtol=0, atol=1e-12), point


def test_a_matrix_request_beside_plain_ones_leaves_those_bit_identical() -> None:
    model = engine("llama", F32)
    plain = Request(TOKENS, capture=["resid_post.2"])
    matrix = Request(TOKENS, capture=["attn_probs.1", "resid_post.2"])
    (alone,) = model.run([plain])
    beside, _ = model.run([plain, matrix])
    assert torch.equal(alone.capture["resid_post.2"], beside.capture["resid_post.2"])
    assert beside.provenance.attention == "sdpa"


def test_matrices_are_refused_while_generating() -> None:
    with pytest.raises(UserError, match="max_new_tokens=0"):
        engine("llama").run([Request(TOKENS, capture=["attn_probs.0"], max_new_tokens=2)])


@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon"])
def test_queries_and_keys_of_a_family_outside_the_registry_make_its_scores(family: str) -> None:
    """Without rotation a query is its projection (BLOOM, MPT); scores are scaled products plus a bias by distance."""
    points = ["query.1", "key.1", "query_rot.1", "key_rot.1", "attn_scores.1", "attn_probs.1"]
    result = engine(family).run([Request([5, 9, 120, 33, 71], capture=points)])[0]
    query, key, query_rot, key_rot, scores, probs = (result.capture[point] for point in points)
    assert torch.equal(query, query_rot) == torch.equal(key, key_rot) == (family != "falcon")
    groups = query_rot.shape[1] // key_rot.shape[1]
    product = torch.einsum("qhd,khd->hqk", query_rot, key_rot.repeat_interleave(groups, 1)) / query.shape[-1] ** 0.5
    last = scores[:, -1] - product[:, -1]  # the last query sees every key
    seen = probs > 0
    assert ((scores - product - last[:, None])[seen]).abs().max() < 1e-13
    assert (last.abs().max() > 0.1) == (family != "falcon")
