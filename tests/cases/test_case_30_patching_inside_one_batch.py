"""nnsight#502, #398: a patched row of a batch gives the clean result, and the order of reads changes nothing."""

import random

import pytest
import torch

from interp.edits import Replace
from interp.engines.base import Request
from interp.engines.cache import run_with_cache
from tests.families.loaded import engine, readable

CLEAN, CORRUPTED = [11, 64, 2, 130, 5, 5, 88], [3, 9, 2, 41, 77, 5, 12]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "gpt_neox_parallel"])
def test_copying_a_clean_stream_restores_the_clean_logits(family: str) -> None:
    model = engine(family)
    clean = run_with_cache(model, torch.tensor([CLEAN, CORRUPTED]), ["resid_post.1", "logits"])
    assert (clean["logits"][0] - clean["logits"][1]).abs().max() > 0.1  # type: ignore[index]
    patch = Replace("resid_post.1", clean["resid_post.1"][0])  # type: ignore[index]
    untouched, patched, corrupted = model.run(
        [
            Request(CLEAN, return_logits=True),
            Request(CORRUPTED, edits=[patch], return_logits=True),
            Request(CORRUPTED, return_logits=True),
        ]
    )
    for result, row in ((untouched, 0), (patched, 0), (corrupted, 1)):
        assert result.logits is not None
        assert torch.allclose(result.logits, clean["logits"][row], rtol=0, atol=1e-12)  # type: ignore[index]


@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_the_order_of_reads_changes_no_edited_result(family: str) -> None:
    model = engine(family)
    points = readable(model)
    patch = Replace("attn_out_post.1", torch.linspace(-1, 1, 48, dtype=torch.float64), positions=(2, 4))
    results = [
        model.run([Request(CORRUPTED, capture=order, edits=[patch], return_logits=True)])[0]
        for order in (points, points[::-1], random.Random(0).sample(points, len(points)), [])
    ]
    for other in results[1:]:
        assert torch.equal(other.logits, results[0].logits)  # type: ignore[arg-type]
        assert all(torch.equal(other.capture[a], results[0].capture[a]) for a in other.capture)
