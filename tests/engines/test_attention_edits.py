"""Writes inside attention reach the logits as a forward pass written by hand does."""

from typing import Any

import pytest
import torch
from torch import Tensor

from interp.edits import Ablate, Add, Edit, Replace, Scale
from interp.engines.base import Request
from interp.engines.eager import EagerEngine
from interp.errors import UserError
from tests.families.loaded import engine

TOKENS = [5, 9, 120, 33, 71]
FAMILIES = ["llama", "qwen3", "gemma2", "gpt2", "bloom", "mpt", "falcon", "split_llama"]


def run(model: EagerEngine, *edits: Edit, capture: tuple[str, ...] = ()) -> tuple[Tensor, Any]:
    result = model.run([Request(TOKENS, capture=capture, edits=edits, return_logits=True)])[0]
    assert result.logits is not None
    return result.logits, result.capture


def through_z(model: EagerEngine, probs: Tensor) -> Tensor:
    """Logits where layer 1 mixes its values with `probs`: the values by hand, written at z."""
    value = run(model, capture=("value.1",))[1]["value.1"]
    each = value.repeat_interleave(probs.shape[0] // value.shape[1], dim=1)
    z = torch.einsum("hqk,khd->qhd", probs, each)
    return run(model, Replace("z.1", z))[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_other_probabilities_mix_the_values_anew(family: str) -> None:
    model = engine(family)
    probs = run(model, capture=("attn_probs.1",))[1]["attn_probs.1"]
    swapped = probs.flip(0) * 0.5
    logits, captured = run(model, Replace("attn_probs.1", swapped), capture=("attn_probs.1", "z.1"))
    assert torch.equal(captured["attn_probs.1"], swapped)
    assert (logits - through_z(model, swapped)).abs().max() < 1e-13
    assert (logits - run(model)[0]).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_other_scores_give_the_softmax_of_them(family: str) -> None:
    model = engine(family)
    scores = run(model, capture=("attn_scores.1",))[1]["attn_scores.1"]
    warmer = torch.where(scores > torch.finfo(scores.dtype).min / 2, scores * 0.5, scores)
    logits, captured = run(model, Replace("attn_scores.1", warmer), capture=("attn_scores.1", "attn_probs.1"))
    assert torch.equal(captured["attn_scores.1"], warmer)
    assert (captured["attn_probs.1"] - warmer.softmax(-1)).abs().max() < 1e-15
    assert (logits - through_z(model, warmer.softmax(-1))).abs().max() < 1e-13


def test_a_sink_keeps_its_share_when_scores_are_written() -> None:
    from interp.engines.load import wrap
    from interp.models.tiny import tiny_model

    model = wrap(tiny_model("gpt_oss"))
    captured = run(model, capture=("attn_scores.1", "attn_probs.1"))[1]
    scores, probs = captured["attn_scores.1"], captured["attn_probs.1"]
    sink = (1 - probs.sum(-1)).log() - probs[..., 0].log() + scores[..., 0]  # of every head and query
    changed = torch.where(probs > 0, scores + 0.3, scores)
    right = torch.cat([changed, sink[..., None]], -1).softmax(-1)[..., :-1]
    got = run(model, Replace("attn_scores.1", changed), capture=("attn_probs.1",))[1]["attn_probs.1"]
    assert (got - right).abs().max() < 1e-14
    assert torch.equal(run(model, Replace("attn_scores.1", scores))[0], run(model)[0])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_a_rotated_query_or_key_is_what_the_scores_are_made_of(family: str) -> None:
    model = engine(family)
    points = ("query_rot.1", "key_rot.1", "attn_scores.1")
    plain = run(model, capture=points)[1]
    _, edited = run(model, Scale("query_rot.1", 3.0), Ablate("key_rot.1", positions=(2,)), capture=points)
    assert torch.equal(edited["query_rot.1"], plain["query_rot.1"] * 3.0)
    assert edited["key_rot.1"][2].abs().max() == 0
    seen = plain["attn_scores.1"] > torch.finfo(torch.float64).min / 2
    right = plain["attn_scores.1"] * 3.0
    right[:, :, 2] = 0.0
    assert ((edited["attn_scores.1"] - right)[seen]).abs().max() < 1e-13


def test_one_head_and_chosen_queries_alone_are_changed() -> None:
    model = engine("llama")
    plain = run(model, capture=("attn_probs.1",))[1]["attn_probs.1"]
    _, captured = run(model, Ablate("attn_probs.1.head-4", positions=(1, 3)), capture=("attn_probs.1",))
    right = plain.clone()
    right[4, [1, 3]] = 0.0
    assert torch.equal(captured["attn_probs.1"], right)
    one = torch.full((len(TOKENS), len(TOKENS)), 0.2, dtype=torch.float64)
    _, captured = run(model, Replace("attn_probs.1.head-0", one), capture=("attn_probs.1",))
    assert torch.equal(captured["attn_probs.1"][0], one) and torch.equal(captured["attn_probs.1"][1:], plain[1:])


def test_in_a_batch_each_prompt_has_its_own_queries_and_keys() -> None:
    model = engine("llama")
    short = [7, 3, 99]
    matrix = torch.full((6, 3, 3), 1 / 3, dtype=torch.float64)
    edit = Replace("attn_probs.1", matrix)
    alone = model.run([Request(short, edits=[edit], return_logits=True)])[0].logits
    together = model.run(
        [
            Request(TOKENS, return_logits=True, capture=["attn_probs.1"]),
            Request(short, edits=[edit], return_logits=True),
        ]
    )
    assert alone is not None and together[1].logits is not None
    assert (together[1].logits - alone).abs().max() < 1e-13
    unedited = run(model, capture=("attn_probs.1",))[1]["attn_probs.1"]
    assert (together[0].capture["attn_probs.1"] - unedited).abs().max() < 1e-15


def test_a_matrix_of_the_wrong_size_is_refused_before_the_model_runs() -> None:
    model = engine("llama")
    with pytest.raises(UserError, match=r"shape \[6, 4, 4\]; give \[6, 5, 5\], or \[5\] for all queries"):
        run(model, Replace("attn_probs.1", torch.zeros(6, 4, 4)))
    with pytest.raises(UserError, match=r"give \[5, 5\]"):
        run(model, Add("attn_scores.1.head-2", torch.zeros(6, 5, 5)))
    with pytest.raises(UserError, match="max_new_tokens=0"):
        model.run([Request(TOKENS, edits=[Ablate("attn_probs.1")], max_new_tokens=2)])


def test_queries_that_a_family_multiplies_inside_are_read_and_not_written() -> None:
    support = engine("bloom").support("query_rot.1")
    assert support.readable and not support.writable
