"""TransformerLens#777: with a cache, a position bias must be that of the last rows; every step equals the full pass."""

import pytest
import torch

from interp.engines.base import Request
from tests.families.loaded import engine
from tests.families.tiny import EVERY


@pytest.mark.parametrize("family", EVERY)
def test_logits_of_every_cached_step_equal_those_of_one_full_forward(family: str) -> None:
    model = engine(family)
    results = model.run([Request(p, max_new_tokens=6, return_logits=True) for p in ([7, 3, 99], [5, 4, 3, 2, 1, 9])])
    for result in results:
        with torch.no_grad(), model.numerics():
            full = model.module(input_ids=torch.tensor([result.tokens[:-1]]), use_cache=False).logits[0]
        assert result.logits is not None
        assert (result.logits - full).abs().max() <= 1e-12 * (1 + full.abs().max())
