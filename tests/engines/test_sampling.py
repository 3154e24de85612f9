"""Next tokens are drawn from the distribution that the limits say, by a generator of the request's own."""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from interp.engines.base import Request
from interp.engines.sampling import Chooser, Sampling
from interp.errors import UserError
from tests.families.loaded import F64, PROMPTS, engine

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, -3.0], dtype=F64)
P = LOGITS.softmax(-1)


def shares(sampling: dict[str, Any], before: list[int], n: int = 4000) -> list[float]:
    chooser = Chooser(Sampling(seed=11, **sampling), 0)
    drawn = Counter(chooser.choose(LOGITS, before) for _ in range(n))
    return [drawn[i] / n for i in range(len(LOGITS))]


def renormalised(weights: torch.Tensor) -> list[float]:
    return (weights / weights.sum()).tolist()


# P is 0.602, 0.222, 0.134, 0.030, 0.004 (with rounding).
CASES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "plain": ({"temperature": 1.0}, P.tolist()),
    "colder": ({"temperature": 0.5}, (LOGITS / 0.5).softmax(-1).tolist()),
    "top-k": ({"temperature": 1.0, "top_k": 2}, renormalised(P * torch.tensor([1, 1, 0, 0, 0]))),
    # 0.602 + 0.222 = 0.824 does not reach 0.9, with 0.134 it does
    "top-p": ({"temperature": 1.0, "top_p": 0.9}, renormalised(P * torch.tensor([1, 1, 1, 0, 0]))),
    # at least 0.3 times 0.602 = 0.181
    "min-p": ({"temperature": 1.0, "min_p": 0.3}, renormalised(P * torch.tensor([1, 1, 0, 0, 0]))),
    # limits hold after the temperature: at 2, P is 0.41, 0.25, 0.19, 0.09, 0.03 and the first three reach 0.85
    "top-p, hotter": (
        {"temperature": 2.0, "top_p": 0.85},
        renormalised((LOGITS / 2).softmax(-1) * torch.tensor([1, 1, 1, 0, 0])),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_draws_have_the_stated_distribution(name: str) -> None:
    sampling, right = CASES[name]
    for found, expected in zip(shares(sampling, [0]), right, strict=True):
        assert abs(found - expected) <= 4 * math.sqrt(expected * (1 - expected) / 4000)  # four standard deviations


def test_a_repetition_penalty_divides_positive_logits_and_multiplies_negative_ones() -> None:
    penalised = torch.tensor([2.0 / 4, 1.0, 0.5, -1.0 * 4, -3.0], dtype=F64).softmax(-1)  # tokens 0 and 3 occurred
    found = shares({"temperature": 1.0, "repetition_penalty": 4.0}, [0, 3, 0])
    for share, expected in zip(found, penalised.tolist(), strict=True):
        assert abs(share - expected) <= 4 * math.sqrt(expected * (1 - expected) / 4000)
    assert Chooser(Sampling(repetition_penalty=4.0), 0).choose(LOGITS, [0]) == 1  # greedy, too


def requests(**changes: Any) -> list[Request]:
    limits = [
        {"temperature": 0.9, "seed": 5},
        {"temperature": 1.7, "seed": 5, "top_k": 20},
        {"temperature": 1.2, "seed": 8, "top_p": 0.8, "repetition_penalty": 1.3},
    ]
    return [
        Request(p, max_new_tokens=n, sampling=Sampling(ignore_eos=True, **one), **changes)
        for p, n, one in zip(PROMPTS, (9, 4, 7), limits, strict=True)
    ]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "bloom"])
def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(family: str) -> None:
    model = engine(family)
    together = model.run(requests(capture=["resid_post.1"]))
    for request, result in zip(requests(capture=["resid_post.1"]), together, strict=True):
        (alone,) = model.run([request])
        (again,) = model.run([request])
        assert alone.tokens == again.tokens == result.tokens
        assert result.provenance.seed == request.sampling.seed
        assert (alone.capture["resid_post.1"] - result.capture["resid_post.1"]).abs().max() < 1e-11
    assert together[0].tokens != model.run([Request(PROMPTS[0], max_new_tokens=9)])[0].tokens


def test_without_a_seed_one_is_drawn_and_named() -> None:
    model = engine("llama")
    free = Sampling(temperature=2.0, ignore_eos=True)
    results = [model.run([Request([5, 9], max_new_tokens=12, sampling=free)])[0] for _ in range(2)]
    assert results[0].tokens != results[1].tokens
    for result in results:
        told = Sampling(temperature=2.0, ignore_eos=True, seed=result.provenance.seed)
        assert model.run([Request([5, 9], max_new_tokens=12, sampling=told)])[0].tokens == result.tokens
    (greedy,) = model.run([Request([5, 9], max_new_tokens=1)])
    assert greedy.provenance.seed is None


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_logprobs_are_those_of_the_teacher_forced_pass(temperature: float) -> None:
    model, n = engine("gemma2"), 5
    sampling = Sampling(temperature=temperature, seed=3, repetition_penalty=1.5, ignore_eos=True)
    for result in model.run([Request(p, max_new_tokens=n, logprobs=3, sampling=sampling) for p in PROMPTS]):
        (full,) = model.run([Request(result.tokens[:-1], return_logits=True)])
        assert full.logits is not None and result.logprobs is not None and len(result.logprobs) == n
        right = full.logits[result.n_prompt - 1 :].log_softmax(-1)
        for one, token, row in zip(result.logprobs, result.tokens[result.n_prompt :], right, strict=True):
            values, ids = row.topk(3)
            assert one.token == token and abs(one.logprob - float(row[token])) < 1e-11
            assert [i for i, _ in one.top] == ids.tolist()
            assert max(abs(a - float(b)) for (_, a), b in zip(one.top, values, strict=True)) < 1e-11
    assert model.run([Request([1], max_new_tokens=1)])[0].logprobs is None


def test_an_end_token_is_passed_by_where_asked() -> None:
    model = engine("llama")
    (free,) = model.run([Request(PROMPTS[0], max_new_tokens=8, sampling=Sampling(ignore_eos=True))])
    new = free.tokens[free.n_prompt :]
    end = new[2]
    own: Any = model.module.generation_config
    before, own.eos_token_id = own.eos_token_id, end
    try:
        (short,) = model.run([Request(PROMPTS[0], max_new_tokens=8)])
        (long,) = model.run([Request(PROMPTS[0], max_new_tokens=8, sampling=Sampling(ignore_eos=True))])
    finally:
        own.eos_token_id = before
    assert short.tokens == free.tokens[: free.n_prompt + new.index(end) + 1] and short.finish_reason == "stop"
    assert long.tokens == free.tokens and long.finish_reason == "length"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("repetition_penalty", 0.0),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("seed", -1),
        ("stop", [""]),
    ],
)
def test_a_limit_out_of_range_is_an_error_that_names_it(field: str, value: Any, unchecked_signatures: None) -> None:
    with pytest.raises(UserError, match=field):
        Sampling(**{field: value})


def test_unknown_keywords_raise() -> None:
    with pytest.raises(TypeError, match="temprature"):
        Sampling(temprature=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="max_tokens"):
        Request([1], max_tokens=3)  # type: ignore[call-arg]
