"""nnsight#672, TransformerLens#1609: padded prompts of a model with learned positions run as they run alone."""

import torch

from interp.engines.base import Request
from interp.engines.cache import run_with_cache
from tests.families.loaded import engine, readable


def test_left_padding_and_gaps_move_no_position() -> None:
    model = engine("gpt2")
    tokens = torch.tensor([[9, 9, 9, 9, 4, 8, 15], [16, 23, 42, 4, 8, 15, 16], [5, 9, 6, 9, 9, 7, 8]])
    mask = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [1] * 7, [1, 0, 1, 0, 0, 1, 1]])
    cache = run_with_cache(model, tokens, ["resid_pre.0", "resid_post.2", "logits"], attention_mask=mask)
    for row in range(3):
        real = mask[row].bool()
        with torch.no_grad(), model.numerics():
            alone = model.module(input_ids=tokens[row][real][None], use_cache=False).logits[0]
        assert torch.allclose(cache["logits"][row][real], alone, rtol=0, atol=1e-12)  # type: ignore[index]
        table = model.module.get_submodule("transformer.wpe").weight
        words = model.module.get_submodule("transformer.wte").weight
        first = words[tokens[row][real]] + table[: int(real.sum())]  # type: ignore[index]
        assert torch.equal(cache["resid_pre.0"][row][real], first)  # type: ignore[index]


def test_real_rows_equal_the_solo_run_at_every_point() -> None:
    model = engine("gpt2")
    points = readable(model, matrices=True)
    tokens = torch.tensor([[9, 9, 9, 9, 4, 8, 15], [16, 23, 42, 4, 8, 15, 16], [5, 9, 6, 9, 9, 7, 8]])
    mask = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [1] * 7, [1, 0, 1, 0, 0, 1, 1]])
    cache = run_with_cache(model, tokens, points, attention_mask=mask)
    for row in range(3):
        keep = mask[row].bool()
        alone = run_with_cache(model, tokens[row][keep][None], points)
        for point in points:
            found, right = cache[point][row], alone[point][0]  # type: ignore[index]
            real = found[:, keep][..., keep] if point.startswith(("attn_probs", "attn_scores")) else found[keep]
            assert real.shape == right.shape, point
            seen = right.abs() < 1e30  # masked scores hold the dtype's minimum
            assert torch.allclose(real[seen], right[seen], rtol=0, atol=1e-12), point


def test_generation_from_unequal_prompts_continues_each_as_alone() -> None:
    model = engine("gpt2")
    prompts = ([4, 8, 15], [16, 23, 42, 4, 8, 15, 16])
    requests = [Request(prompt, max_new_tokens=6, return_logits=True) for prompt in prompts]
    for request, result in zip(requests, model.run(requests), strict=True):
        (alone,) = model.run([request])
        assert result.tokens == alone.tokens
        assert result.logits is not None and alone.logits is not None
        assert torch.allclose(result.logits, alone.logits, rtol=0, atol=1e-12)
