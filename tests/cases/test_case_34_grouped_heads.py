"""TransformerLens#520, pyvene#158: six query heads share two key-value heads, three each, in reading and in writing."""

import pytest
import torch

from interp.edits import Ablate, Add, Scale
from interp.engines.base import Request
from interp.engines.cache import run_with_cache
from tests.families.loaded import F64, engine

TOKENS = torch.tensor([[11, 64, 2, 130, 5], [3, 9, 2, 41, 77]])


def test_heads_mix_the_values_of_their_group() -> None:
    model = engine("llama")
    got = run_with_cache(model, TOKENS, ["attn_probs.1", "key.1", "value.1", "z.1"])
    d_head = model.model.d_head
    assert got["value.1"].shape == got["key.1"].shape == (2, 5, 2, d_head)  # type: ignore[index]
    each = got["value.1"].repeat_interleave(3, dim=2)  # type: ignore[index]
    right = torch.einsum("bhqk,bkhd->bqhd", got["attn_probs.1"], each)  # type: ignore[index]
    assert torch.allclose(got["z.1"], right, rtol=0, atol=1e-13)  # type: ignore[index]
    tiled = torch.einsum("bhqk,bkhd->bqhd", got["attn_probs.1"], got["value.1"].repeat(1, 1, 3, 1))  # type: ignore[index]
    assert not torch.allclose(got["z.1"], tiled, atol=0.1)  # type: ignore[index]


@pytest.mark.parametrize("point", ["value", "key"])
@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_a_key_value_head_moves_only_its_own_query_heads(family: str, group: int, point: str) -> None:
    model, at = engine(family), f"{point}.1.head-{group}"
    v = torch.linspace(-1, 1, model.model.d_head, dtype=F64)
    (clean,) = model.run([Request(TOKENS[0].tolist(), capture=["z.1", f"{point}.1"])])
    for edit in (Ablate(at), Add(at, v), Scale(at, 3.0)):
        (result,) = model.run([Request(TOKENS[0].tolist(), capture=["z.1", f"{point}.1"], edits=[edit])])
        moved = (clean.capture["z.1"] != result.capture["z.1"]).flatten(2).any(-1).any(0)
        assert moved.tolist() == [head // 3 == group for head in range(6)]
        other = 1 - group
        assert torch.equal(result.capture[f"{point}.1"][:, other], clean.capture[f"{point}.1"][:, other])
