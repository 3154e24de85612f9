"""The prover of families, on a sample of them: one of each kind of attention, stream and trunk."""

import pytest

from interp.engines.families import Verdict, examine, examine_all, page, types

INSIDE = {"attn_probs", "attn_scores", "value", "z"}
SAMPLE = {
    "gpt2": INSIDE | {"query", "key"},
    "opt": INSIDE,
    "bloom": INSIDE,  # its own softmax, the residual added inside, a norm behind the embeddings
    "deepseek_v3": INSIDE | {"query_rot", "key_rot"},  # latent attention
    "gpt_oss": {"attn_probs", "value", "z"},  # sinks
    "afmoe": INSIDE | {"attn_gate"},  # gated attention
    "mamba": {"attn_out", "attn_out_post"},  # a mixer that is no attention
    "gemma3": {"mlp_out", "mlp_out_post", "query_rot"},  # the text trunk of a multimodal wrapper
    "minimax": {"resid_mid", "attn_out_post"},  # a stream that is normed and weighed
    "openai-gpt": INSIDE | {"resid_mid"},  # a stream that is normed after each sum
    "granitemoe": {"mlp_out_post"},
}


@pytest.mark.parametrize("family", SAMPLE)
def test_a_family_is_proven_with_the_points_of_its_kind(family: str) -> None:
    verdict = examine(family)
    assert verdict.status == "proven", verdict.reason
    assert SAMPLE[family] <= set(verdict.served), verdict.refused


def test_what_sees_ahead_is_not_causal_and_what_cannot_be_built_says_why() -> None:
    assert examine("bert").status == "not causal"
    dbrx = examine("dbrx")
    assert dbrx.status == "not built" and dbrx.reason


def test_each_type_runs_in_a_process_of_its_own_and_lands_on_the_page() -> None:
    seen = []
    verdicts = examine_all(["llama", "bert"], jobs=2, progress=lambda done, total: seen.append((done, total)))
    assert [v.status for v in verdicts] == ["proven", "not causal"] and seen == [(1, 2), (2, 2)]
    text = page([*verdicts, Verdict("strange", "not proven", "the head is not resolved")])
    assert "| llama |" in text and "## Not causal" in text and "| strange | the head is not resolved |" in text
    assert "1 are proven" in text


def test_every_causal_type_of_transformers_is_known() -> None:
    assert len(types()) > 150 and {"gpt2", "llama", "gemma3_text"} <= set(types())
