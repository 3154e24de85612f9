"""On SmolLM2 the nnsight engine gives what the eager engine gives; docs/engines.md runs as it is pasted."""

from pathlib import Path

import pytest
import torch

from interp.edits import Add
from interp.engines.base import Request
from interp.engines.eager import EagerEngine
from interp.engines.load import load_model
from interp.points import POINTS

from .conftest import SMOLLM
from .page import blocks, check_page

pytestmark = pytest.mark.real
PROMPTS = ["The capital of France is", "Water boils at a temperature of", "One"]


def test_generation_with_captures_and_an_edit_is_bit_identical(smollm: EagerEngine) -> None:
    nnsight = load_model(SMOLLM, device="cpu", dtype="float32", engine="nnsight")
    points = [f"{p.name}.{layer}" for p in POINTS.values() if p.per_layer for layer in (0, 14, 29)]
    points = [p for p in [*points, "embeddings", "final_norm", "logits"] if nnsight.support(p).readable]
    refused = {p.name for p in POINTS.values() if p.per_layer and not nnsight.support(f"{p.name}.3").readable}
    refused -= {p.name for p in POINTS.values() if p.per_layer and not smollm.support(f"{p.name}.3").readable}
    assert refused == {"attn_probs", "attn_scores", "query_rot", "key_rot"} and len(points) > 60
    vector = torch.randn(576, generator=torch.Generator().manual_seed(0))
    requests = [Request(p, points, [Add("resid_mid.14", vector, positions="generated")], 4) for p in PROMPTS]
    for one, other in zip(nnsight.run(requests), smollm.run(requests), strict=True):
        assert one.tokens == other.tokens and one.text == other.text
        for point in points:
            assert torch.equal(one.capture[point], other.capture[point]), point


def test_every_block_of_the_page_is_code_or_what_it_prints() -> None:
    assert [language for language, _ in blocks("engines.md")] == ["python", *["python", ""] * 2]


def test_the_page_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    check_page("engines.md", tmp_path)
