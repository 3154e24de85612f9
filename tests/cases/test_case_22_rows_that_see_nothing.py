"""transformers#32390: a row of padding sees nothing, and the NaN that some kernels give it must reach no real row."""

import pytest
import torch

from interp.dictionaries import SparseAutoencoder
from interp.engines.base import Request
from interp.engines.cache import run_with_cache
from interp.points import POINTS
from tests.families.loaded import F32, F64, engine, readable

FAMILIES, LONGEST = ["gemma2", "gemma3", "llama"], [31, 32, 33]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("longest", LONGEST)
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
def test_fully_masked_rows_spread_no_nan(family: str, longest: int, dtype: torch.dtype) -> None:
    """Generation pads at the front, where a pad row sees nothing at all."""
    model = engine(family, dtype)
    points = [name for name in readable(model) if POINTS[name.split(".")[0]].block_level]
    prompts = [list(range(3, 3 + longest)), [9, 4]]
    for new in (0, 3):
        for result in model.run([Request(p, capture=points, max_new_tokens=new) for p in prompts]):
            assert all(bool(result.capture[point].isfinite().all()) for point in points)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("longest", LONGEST)
def test_left_padded_rows_equal_the_solo_run_and_means_know_no_padding(family: str, longest: int) -> None:
    model, point = engine(family), "resid_post.1"
    torch.manual_seed(0)
    sae = SparseAutoencoder(d_in=48, n_latents=96, k=4).double()
    for parameter in sae.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(0, 131, (2, longest), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(tokens)
    mask[1, :-4] = 0
    cache = run_with_cache(model, tokens, [point, "logits"], attention_mask=mask)
    means = []
    for row in range(2):
        keep = mask[row].bool()
        (alone,) = model.run([Request(tokens[row][keep].tolist(), capture=[point], return_logits=True)])
        real = cache[point][row][keep]  # type: ignore[index]
        assert real.dtype == F64 and bool(real.isfinite().all())
        assert torch.allclose(real, alone.capture[point], rtol=0, atol=1e-12)
        assert torch.allclose(cache["logits"][row][keep], alone.logits, rtol=0, atol=1e-11)  # type: ignore[index]
        with torch.no_grad():
            assert torch.allclose(
                sae.encode(real).mean(0), sae.encode(alone.capture[point]).mean(0), rtol=0, atol=1e-12
            )
        means.append(cache[point][row].mean(0))  # type: ignore[index]
    assert bool(means[0].isfinite().all()) and bool(means[1].isnan().all())  # a mean over padding cannot pass unnoticed
