"""The prover of families, on a sample of them: one of each kind of attention, stream and trunk."""

import re
from functools import cache
from pathlib import Path

import pytest

from interp.engines.families import Verdict, examine, examine_all, page, types
from interp.models.tiny import VARIANTS

INSIDE = {"attn_probs", "attn_scores", "value", "z"}
SAMPLE = {
    "gpt2": INSIDE | {"query", "key"},
    "opt": INSIDE,
    "bloom": INSIDE,  # its own softmax, the residual added inside, a norm behind the embeddings
    "deepseek_v3": INSIDE | {"query_rot", "key_rot"},  # latent attention
    "gpt_oss": INSIDE | {"query_rot"},  # sinks
    "afmoe": INSIDE | {"attn_gate"},  # gated attention
    "mamba": {"attn_out", "attn_out_post"},  # a mixer that is no attention
    "gemma3": {"mlp_out", "mlp_out_post", "query_rot"},  # the text trunk of a multimodal wrapper
    "minimax": {"resid_mid", "attn_out_post"},  # a stream that is normed and weighed
    "openai-gpt": INSIDE | {"resid_mid"},  # a stream that is normed after each sum
    "granitemoe": {"mlp_out_post"},
    "deepseek_v4": {"resid_streams", "attn_stream_mix", "mlp_stream_write", "resid_mid"},  # hyper-connections
    "gemma4_text": {"extra_out_post", "mlp_out_post", "q_norm_in"},  # a layer's factor, a third sublayer
    "dbrx": INSIDE | {"resid_mid", "mlp_in"},  # norms and addition in one module, clipped values
    "zamba2": {"attn_out_post", "resid_post"},  # a mixer that reads more than the stream
    "doge": {"resid_mid", "attn_out_post"},  # a weight per channel on the stream
    "modernbert-decoder": {"final_norm", "lm_head"},  # a network before the unembedding
    "opt, projected embedding": {"embeddings", "resid_pre", "final_norm"},
    "opt, norm behind": {"resid_mid", "mlp_out_post"},
    "falcon, old": {"resid_mid", "attn_probs"},
    "falcon, new": {"attn_out_post", "mlp_out_post"},
    "gpt_neox, sequential": INSIDE | {"resid_mid"},
    "olmo, clipped": INSIDE,
    "stablelm, parallel": INSIDE,  # one norm per head
}
EXPECTED = """gpt2 gpt_neo gpt_neox gptj gpt_bigcode codegen bloom mpt falcon opt llama llama4_text mistral mixtral
qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next qwen3_5_text gemma gemma2 gemma3_text gemma4_text vaultgemma
olmo olmo2 olmo3 olmoe phi phi3 phimoe stablelm starcoder2 granite granitemoe granitemoehybrid cohere
cohere2 glm glm4 glm4_moe deepseek_v2 deepseek_v3 deepseek_v4 gpt_oss dbrx lfm2 nemotron nemotron_h mamba
mamba2 jamba zamba2 bamba falcon_h1 smollm3 exaone4 ernie4_5 minimax hunyuan_v1_dense modernbert-decoder
gemma3"""
NUMBER = re.compile(r"[-+.e\d]*\d")
"""Measured numbers inside a reason: they differ from machine to machine."""


@cache
def verdict_of(family: str) -> Verdict:
    return examine(family)


@pytest.mark.parametrize("family", SAMPLE)
def test_a_family_is_proven_with_the_points_of_its_kind(family: str) -> None:
    verdict = verdict_of(family)
    assert verdict.status == "proven", verdict.reason
    assert SAMPLE[family] <= set(verdict.served), verdict.refused


PAGE = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")


def on_the_page(family: str) -> tuple[int, dict[str, str], str]:
    """Points served, reason by refused point, and what only some layers have, as the page states them."""
    reasons = dict(re.findall(r"^(\d+)\. (.+)$", PAGE, re.MULTILINE))
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {family} |"))
    _, served, _, _, refused, some = (cell.strip() for cell in row.strip("|").split("|"))
    groups = [group.split(": ", 1) for group in refused.split("; ") if group]
    return int(served), {p: reasons[number] for number, points in groups for p in points.split(", ")}, some


@pytest.mark.parametrize("family", SAMPLE)
def test_the_page_says_what_the_proofs_say_today(family: str) -> None:
    served, refused, some = on_the_page(family)
    verdict = verdict_of(family)
    assert served == len(verdict.served)
    assert {point: NUMBER.sub("#", reason) for point, reason in refused.items()} == {
        point: NUMBER.sub("#", reason) for point, reason in verdict.refused.items()
    }
    assert all(point in some for point in verdict.partly) and bool(some) == bool(verdict.partly)


def test_the_page_proves_every_family_that_a_user_may_expect() -> None:
    for family in EXPECTED.split():
        assert f"\n| {family} |" in PAGE.split("## Why")[0], family
    for family in VARIANTS:
        assert f"\n| {family} |" in PAGE.split("## Why")[0], family
    proven = re.search(r"(\d+) types are proven", PAGE)
    assert proven is not None and int(proven[1]) >= 120


def test_what_sees_ahead_is_not_causal_and_what_cannot_be_built_says_why() -> None:
    assert examine("bert").status == "not causal"
    reformer = examine("reformer")
    assert reformer.status == "not built" and "is_decoder" in reformer.reason


def test_each_type_runs_in_a_process_of_its_own_and_lands_on_the_page() -> None:
    seen = []
    verdicts = examine_all(["llama", "bert"], jobs=2, progress=lambda done, total: seen.append((done, total)))
    assert [v.status for v in verdicts] == ["proven", "not causal"] and seen == [(1, 2), (2, 2)]
    text = page([*verdicts, Verdict("strange", "not proven", "the head is not resolved")])
    assert "| llama |" in text and "## Not causal" in text and "| strange | the head is not resolved |" in text
    assert "1 types are proven" in text


def test_every_causal_type_of_transformers_is_known() -> None:
    assert len(types()) > 150 and {"gpt2", "llama", "gemma3_text"} <= set(types())
