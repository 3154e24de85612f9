"""Greedy generation gives transformers' own tokens, and captures while decoding what one full pass would give."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from interp.edits import Ablate, Add, Edit, Replace, Scale
from interp.engines.base import Request
from interp.engines.eager import EagerEngine
from interp.engines.load import wrap
from interp.engines.local import ENDLESS
from interp.errors import UserError
from interp.models.tiny import tiny_model
from tests.families.loaded import F32, F64, PROMPTS, engine, readable
from tests.families.tiny import D_VOCAB, SPLIT_LLAMAS

NEW = 6
SOME = ["llama", "gpt2", "gemma2", "gemma3", "bloom", "mpt", "falcon", "gpt_neox_parallel", "opt", "qwen3_moe"]
SOME += SPLIT_LLAMAS


def own_greedy(model: Any, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    """transformers' generate, left-padded by hand; without one, a full pass per prompt and token."""
    if not hasattr(model, "generate"):
        return [uncached(model, list(prompt), new) for prompt in prompts]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.no_grad():
        out = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=new, pad_token_id=0, eos_token_id=None
        )
    return out[:, longest:].tolist()


def uncached(model: Any, tokens: list[int], new: int) -> list[int]:
    for _ in range(new):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        tokens = [*tokens, int(logits[0, -1].argmax())]
    return tokens[-new:]


def endless(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> EagerEngine:
    """An engine for which no token ends a continuation, so that its length is known."""
    model = engine(family, dtype)
    monkeypatch.setattr(model.module.generation_config, "eos_token_id", None)
    return model


@pytest.mark.parametrize("family", SOME)
def test_greedy_tokens_are_those_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = endless(family, F32, monkeypatch)
    batch = model.run([Request(prompt, max_new_tokens=NEW) for prompt in PROMPTS])
    right = own_greedy(model.module, PROMPTS, NEW)
    for prompt, result, expected in zip(PROMPTS, batch, right, strict=True):
        assert result.tokens == list(prompt) + expected
        assert (result.n_prompt, result.finish_reason) == (len(prompt), "length")
        (alone,) = model.run([Request(prompt, max_new_tokens=NEW)])
        assert alone.tokens == result.tokens
        assert own_greedy(model.module, [prompt], NEW) == [expected]


@pytest.mark.parametrize("family", SOME)
def test_capture_changes_no_token_and_equals_the_teacher_forced_pass(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = endless(family, F64, monkeypatch)
    points = readable(model, layers=[2])
    plain = model.run([Request(prompt, max_new_tokens=NEW) for prompt in PROMPTS])
    requests = [Request(prompt, capture=points, max_new_tokens=NEW, return_logits=True) for prompt in PROMPTS]
    for bare, result in zip(plain, model.run(requests), strict=True):
        assert result.tokens == bare.tokens
        (full,) = model.run([Request(result.tokens[:-1], capture=points, return_logits=True)])
        for point in points:
            found, right = result.capture[point], full.capture[point]
            assert found.shape == right.shape and len(found) == result.n_prompt + NEW - 1
            assert (found - right).abs().max() <= 1e-12 * (1 + right.abs().max()), point
        assert result.logits is not None and full.logits is not None
        assert (result.logits - full.logits).abs().max() <= 1e-12 * (1 + full.logits.abs().max())
        assert result.logits[result.n_prompt - 1 :].argmax(-1).tolist() == result.tokens[result.n_prompt :]


EDITS: list[Callable[[int], Edit]] = [
    lambda early: Add("resid_post.1", torch.linspace(-2, 2, 48, dtype=F64), positions=(2,)),
    lambda early: Add("resid_post.0", torch.linspace(2, -2, early, dtype=F64), positions=(2, 3, 4, 5, 6)),
    lambda early: Scale("mlp_out_post.1", -2.0),
    lambda early: Ablate("resid_pre.2", positions=(4, 6)),
    lambda early: Replace("resid_post.1", torch.linspace(-1, 1, 13 * 48, dtype=F64).view(13, 48), positions=(1, 5, 7)),
]
"""By the width of the stream in layer 0; the second acts from a prompt's last token on."""


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "bloom", "split_llama"])
@pytest.mark.parametrize("make", EDITS, ids=lambda make: f"{type(make(48)).__name__}-{make(48).positions}")
def test_edits_while_decoding_hit_absolute_positions(
    family: str, make: Callable[[int], Edit], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASES 32: cached steps, unequal prompts; each must equal one uncached pass with the same positions."""
    model, prompts = endless(family, F64, monkeypatch), (PROMPTS[0], [1, 2, 9, 4])
    edit = make(model.model.width(0))
    requests = [Request(p, edits=[edit], max_new_tokens=NEW, return_logits=True) for p in prompts]
    for request, result in zip(requests, model.run(requests), strict=True):
        assert isinstance(request.tokens, list)
        (full,) = model.run([Request(result.tokens[:-1], edits=[edit], return_logits=True)])
        (clean,) = model.run([Request(result.tokens[:-1], return_logits=True)])
        assert result.logits is not None and full.logits is not None and clean.logits is not None
        assert (result.logits - full.logits).abs().max() < 1e-11
        assert (result.logits - clean.logits).abs().max() > 1e-3
        (alone,) = model.run([request])
        assert alone.tokens == result.tokens


@pytest.mark.parametrize("family", ["llama", "gpt2", "split_llama"])
def test_an_end_token_stops_its_own_prompt_only(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = endless(family, F32, monkeypatch)
    full = model.run([Request(p, max_new_tokens=NEW) for p in PROMPTS])
    new = [r.tokens[r.n_prompt :] for r in full]
    end = new[0][2]
    monkeypatch.setattr(model.module.generation_config, "eos_token_id", [end, D_VOCAB - 1])
    stopped = model.run([Request(p, capture=["resid_post.2"], max_new_tokens=NEW) for p in PROMPTS])
    for before, result in zip(new, stopped, strict=True):
        found = result.tokens[result.n_prompt :]
        ends = [i for i, t in enumerate(before) if t in (end, D_VOCAB - 1)]
        assert found == (before[: ends[0] + 1] if ends else before)
        assert result.finish_reason == ("stop" if ends else "length")
        assert len(result.capture["resid_post.2"]) == len(result.tokens) - 1
    assert stopped[0].finish_reason == "stop"


def test_prompts_may_ask_for_different_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished prompt rides along; with learned positions it must not run past the end of the table."""
    for family in ("gpt2", "opt", "llama", "split_llama"):
        model = endless(family, F32, monkeypatch)
        long = [5] * 58
        requests = [Request(long, max_new_tokens=4), Request([3, 4], max_new_tokens=40), Request([3, 4])]
        results = model.run(requests)
        assert [len(r.tokens) - r.n_prompt for r in results] == [4, 40, 0]
        for request, result in zip(requests, results, strict=True):
            assert model.run([request])[0].tokens == result.tokens


def test_a_continuation_past_the_context_is_an_error_before_any_forward() -> None:
    model = engine("llama", F32)
    assert model.model.n_ctx == 64
    with pytest.raises(UserError, match=r"take 65 tokens, but the model's context is 64"):
        model.run([Request([1] * 60, max_new_tokens=5)])
    model.run([Request([1] * 60, max_new_tokens=4)])


def test_results_of_a_mixed_call_come_in_the_order_of_the_requests() -> None:
    model = engine("llama", F32)
    requests = [
        Request([1, 2], max_new_tokens=2),
        Request([3]),
        Request([4], capture=["attn_probs.0"]),
        Request([5, 6, 7]),
    ]
    assert [r.tokens[: r.n_prompt] for r in model.run(requests)] == [[1, 2], [3], [4], [5, 6, 7]]


@pytest.mark.parametrize("kind", ["git", "bart", "marian", "mamba", "falcon_mamba", "blenderbot", "deepseek_v4"])
def test_types_that_padding_would_change_are_decoded_apart(kind: str) -> None:
    """Positions counted from the first column, states that run through it: a batch of them must not be padded."""
    model = wrap(tiny_model(kind), prove=False)
    asked = [Request(p, max_new_tokens=4, return_logits=True, sampling=ENDLESS) for p in ([7, 3], PROMPTS[1], [5, 1])]
    assert not model.pads_in_front
    for ask, result in zip(asked, model.run(asked), strict=True):
        (alone,) = model.run([ask])
        (full,) = model.run([Request(result.tokens[:-1], return_logits=True)])
        assert result.tokens == alone.tokens
        assert result.logits is not None and full.logits is not None
        assert (result.logits - full.logits).abs().max() <= 1e-11 * full.logits.abs().max()


def test_types_that_honour_the_mask_share_their_passes() -> None:
    for family in ("llama", "gpt2", "bloom", "opt", "gemma3", "split_llama"):
        model, passes = engine(family), []
        assert model.pads_in_front
        handle = model.module.register_forward_hook(lambda m, a, out, passes=passes: passes.append(1))
        model.run([Request(p, max_new_tokens=3, sampling=ENDLESS) for p in PROMPTS])
        handle.remove()
        assert len(passes) == 3


@pytest.mark.parametrize("kind", ["bert", "roformer", "recurrent_gemma"])
def test_what_gives_no_cache_back_is_refused_by_a_sentence(kind: str) -> None:
    with pytest.raises(UserError, match="cannot generate: its forward gives no cache back"):
        wrap(tiny_model(kind), prove=False).run([Request([1, 2, 3], max_new_tokens=2)])
