"""transformers#26142: hidden_states[i] enters block i, and the last one is already normed."""

import pytest
import torch

from interp.engines.base import Request
from tests.families.loaded import F32, engine

PLACES = {
    "llama": ("model.norm", "lm_head"),
    "gemma3": ("model.norm", "lm_head"),
    "gpt2": ("transformer.ln_f", "lm_head"),
}


@pytest.mark.parametrize("family", PLACES)
def test_identities(family: str) -> None:
    model, tokens = engine(family, F32), [7, 3, 99, 64]
    with torch.no_grad():
        own = model.module(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    points = ["resid_pre.0", "resid_pre.1", "resid_pre.2", "resid_post.2", "final_norm", "logits"]
    got = model.run([Request(tokens, capture=points)])[0].capture
    for layer in range(3):
        assert torch.equal(own.hidden_states[layer][0], got[f"resid_pre.{layer}"])
    assert torch.equal(own.hidden_states[3][0], got["final_norm"])
    assert not torch.allclose(own.hidden_states[3][0], got["resid_post.2"])
    norm, head = (model.module.get_submodule(path) for path in PLACES[family])
    with torch.no_grad():
        assert torch.equal(norm(got["resid_post.2"]), got["final_norm"])
        assert torch.allclose(head(got["final_norm"]), got["logits"], rtol=0, atol=1e-5)
    assert torch.equal(got["logits"], own.logits[0])
