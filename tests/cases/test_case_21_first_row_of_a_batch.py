"""transformers#39120: a block that returns a bare tensor must not be indexed; every row is captured and edited."""

import pytest
import torch

from interp.edits import Add
from interp.engines.base import Request
from interp.engines.cache import run_with_cache
from tests.families.loaded import F64, engine
from tests.families.tiny import EVERY

TOKENS = torch.tensor([[7, 3, 99, 64], [1, 2, 3, 4], [88, 88, 5, 0]])


@pytest.mark.parametrize("family", EVERY)
def test_three_rows_are_three_rows(family: str) -> None:
    model, v = engine(family), torch.linspace(-1, 1, 48, dtype=F64)
    cache = run_with_cache(model, TOKENS, ["resid_post.1", "attn_out.1"])
    for point in ("resid_post.1", "attn_out.1"):
        assert cache[point].shape == (3, 4, 48)  # type: ignore[index]
    edits = [Add("resid_post.1", v)]
    steered = model.run([Request(row, capture=["resid_post.1"], edits=edits) for row in TOKENS.tolist()])
    for row, result in enumerate(steered):
        solo = run_with_cache(model, TOKENS[row : row + 1], ["resid_post.1"])["resid_post.1"][0]  # type: ignore[index]
        assert torch.allclose(cache["resid_post.1"][row], solo, rtol=0, atol=1e-12)  # type: ignore[index]
        assert torch.allclose(result.capture["resid_post.1"], solo + v, rtol=0, atol=1e-12)
