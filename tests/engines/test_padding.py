"""A prompt in a batch gives what it gives alone, wherever the padding stands; masked rows come back as NaN."""

import pytest
import torch
from torch import Tensor

from interp.engines.base import Request
from interp.engines.batching import pad
from interp.engines.cache import run_with_cache
from interp.engines.load import wrap
from interp.errors import UserError
from interp.models.tiny import tiny_model
from tests.families.loaded import F64, PROMPTS, engine, readable
from tests.families.tiny import EVERY

SOME = ["gpt2", "opt", "llama", "gemma2", "gemma3", "cohere2", "bloom", "mpt", "falcon", "gpt_neox_parallel"]
SOME += ["split_llama_mlp"]


def close(found: Tensor, right: Tensor) -> bool:
    return found.shape == right.shape and float((found - right).abs().max()) <= 1e-12 * (1 + float(right.abs().max()))


@pytest.mark.parametrize("family", EVERY)
def test_every_point_of_a_batch_of_unequal_prompts_equals_the_solo_run(family: str) -> None:
    model = engine(family, F64)
    points = readable(model, layers=[2])
    together = model.run([Request(prompt, capture=points, return_logits=True) for prompt in PROMPTS])
    for prompt, result in zip(PROMPTS, together, strict=True):
        (alone,) = model.run([Request(prompt, capture=points, return_logits=True)])
        assert result.tokens == prompt
        assert result.logits is not None and alone.logits is not None and close(result.logits, alone.logits)
        for point in points:
            assert close(result.capture[point], alone.capture[point]), point


def rectangle(masks: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Random tokens everywhere, also where the mask hides them."""
    mask = torch.tensor(masks)
    return torch.randint(0, 131, mask.shape, generator=torch.Generator().manual_seed(3)), mask


MASKS = {
    "left": [[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]],
    "right": [[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0]],
    "gap": [[1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 1, 0], [1, 0, 1, 0, 1, 0]],
}


@pytest.mark.parametrize("family", SOME)
@pytest.mark.parametrize("where", MASKS)
def test_masked_columns_are_nan_and_change_nothing(family: str, where: str) -> None:
    model = engine(family, F64)
    tokens, mask = rectangle(MASKS[where])
    points = ["resid_pre.0", "resid_post.2", "mlp_act.1", "mlp_norm_scale.1", "logits"]
    cache = run_with_cache(model, tokens, points, attention_mask=mask)
    for row in range(len(tokens)):
        keep = mask[row].bool()
        (alone,) = model.run([Request(tokens[row][keep].tolist(), capture=points)])
        for point in points:
            assert cache[point].shape[:2] == tokens.shape  # type: ignore[index]
            assert close(cache[point][row][keep], alone.capture[point])  # type: ignore[index]
            assert bool(cache[point][row][~keep].isnan().all())  # type: ignore[index]


@pytest.mark.parametrize(("family", "layer", "heads"), [("llama", 1, 6), ("split_llama", 0, 4), ("split_llama", 1, 6)])
def test_a_masked_matrix_is_nan_in_rows_and_columns_of_padding(family: str, layer: int, heads: int) -> None:
    model, at = engine(family, F64), f"attn_probs.{layer}"
    tokens, mask = rectangle(MASKS["gap"])
    cache = run_with_cache(model, tokens, [at], attention_mask=mask)
    probs = cache[at]  # type: ignore[index]
    assert probs.shape == (3, heads, 6, 6)
    for row in range(3):
        keep = mask[row].bool()
        (alone,) = model.run([Request(tokens[row][keep].tolist(), capture=[at])])
        assert close(probs[row][:, keep][:, :, keep], alone.capture[at])
        both = keep[:, None] & keep
        assert bool(probs[row][:, ~both].isnan().all())


def test_positions_are_those_of_the_mask() -> None:
    for front in (False, True):
        batch = pad([[5, 6, 7], [8]], torch.device("cpu"), front=front)
        assert batch.mask is not None
        assert torch.equal(batch.positions, (batch.mask.cumsum(-1) - 1).clamp(min=0))
        assert [batch.tokens[row, span].tolist() for row, span in enumerate(batch.spans)] == [[5, 6, 7], [8]]
    assert pad([[5, 6], [7, 8]], torch.device("cpu"), front=True).mask is None


@pytest.mark.parametrize("mask", [[[1, 1], [0, 0]], [[1, 1, 1], [1, 1, 1]]])
@pytest.mark.usefixtures("unchecked_signatures")
def test_a_mask_that_fits_no_prompt_is_an_error(mask: list[list[int]]) -> None:
    with pytest.raises(UserError, match="attention_mask"):
        run_with_cache(engine("llama"), torch.tensor([[1, 2], [3, 4]]), ["resid_post.0"], torch.tensor(mask))


@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta", "camembert", "opt", "biogpt"])
def test_types_with_a_count_of_positions_of_their_own_keep_it_in_a_batch(kind: str) -> None:
    """RoBERTa's positions begin behind its padding id, OPT's and BioGPT's are read from the mask."""
    model = wrap(tiny_model(kind), prove=False)
    asked = [Request(p, return_logits=True) for p in ([7, 3, 9], [11, 6, 2, 13, 5, 5, 8], [4])]
    for ask, result in zip(asked, model.run(asked), strict=True):
        (alone,) = model.run([ask])
        assert result.logits is not None and alone.logits is not None
        assert (result.logits - alone.logits).abs().max() <= 1e-12 * alone.logits.abs().max()
