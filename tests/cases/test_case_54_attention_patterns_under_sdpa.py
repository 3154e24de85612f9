"""transformers#38750, pytorch#170604: a kernel that shows no attention matrix is exchanged for one that does."""

from typing import Any

import pytest
import torch

from interp.engines.base import Request
from tests.families.loaded import F32, engine

TOKENS, OTHER = [11, 64, 2, 130, 5, 5, 88], [1, 2, 3]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gpt_neox_parallel"])
def test_the_pattern_of_a_model_that_runs_sdpa(family: str) -> None:
    model = engine(family, F32)
    config: Any = model.module.config
    assert config._attn_implementation == "sdpa"
    points = [f"attn_probs.{layer}" for layer in range(3)]
    plain, (result,) = model.run([Request(TOKENS)])[0], model.run([Request(TOKENS, capture=points)])
    assert plain.provenance.attention == "sdpa" and result.provenance.attention == "eager, observed"
    assert config._attn_implementation == "sdpa"
    config._attn_implementation = "eager"
    try:
        with torch.no_grad():
            own = model.module(input_ids=torch.tensor([TOKENS]), use_cache=False, output_attentions=True).attentions
    finally:
        config._attn_implementation = "sdpa"
    for layer, right in enumerate(own):
        assert torch.equal(result.capture[f"attn_probs.{layer}"], right[0])


def test_captures_of_two_runs_are_independent_copies() -> None:
    model = engine("llama", F32)
    points = ["attn_probs.1", "resid_post.1", "value.1"]
    (first,) = model.run([Request(TOKENS, capture=points)])
    kept = {point: first.capture[point].clone() for point in points}
    (second,) = model.run([Request(OTHER, capture=points)])
    for point in points:
        second.capture[point].fill_(9.0)
        assert torch.equal(first.capture[point], kept[point])
    (third,) = model.run([Request(TOKENS, capture=points)])
    assert all(torch.equal(third.capture[point], kept[point]) for point in points)
