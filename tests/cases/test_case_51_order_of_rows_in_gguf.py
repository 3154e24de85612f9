"""transformers#31766: llama.cpp stores the rows of q and k in another order; they come back in the model's own."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from interp.engines.base import Request
from interp.engines.load import load_model
from interp.models.gguf import checkpoint_from_gguf
from tests.models.test_gguf import assert_same_model, permuted_as_llama_cpp_stores, tiny_llama, write_llama


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERP_CACHE", str(tmp_path / "cache"))


def test_every_tensor_of_a_grouped_head_llama_comes_back_bit_equal(tmp_path: Path) -> None:
    model = tiny_llama()
    folder = checkpoint_from_gguf(write_llama(tmp_path / "tiny.gguf", model), [].append)
    assert_same_model(folder, model)
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_key_value_heads"], config["rms_norm_eps"], config["vocab_size"]) == (2, 1e-5, 261)
    assert "quantization_config" not in config


@pytest.mark.parametrize(("projection", "heads"), [("q_proj", 6), ("k_proj", 2)])
def test_the_stored_order_is_another(projection: str, heads: int) -> None:
    weights = tiny_llama().state_dict()[f"model.layers.0.self_attn.{projection}.weight"].numpy()
    assert not np.array_equal(permuted_as_llama_cpp_stores(weights, heads), weights)


def test_logits_and_heads_of_the_loaded_file_are_those_of_the_model(tmp_path: Path) -> None:
    model, tokens = tiny_llama(), [7, 3, 99, 64]
    loaded = load_model(write_llama(tmp_path / "tiny.gguf", model), device="cpu", dtype="float32")
    points = ["attn_in.1", "query.1", "key.1", "value.1"]
    (result,) = loaded.run([Request(tokens, capture=points, return_logits=True)])
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        assert torch.equal(result.logits, model(torch.tensor([tokens]), use_cache=False).logits[0])  # type: ignore[arg-type]
        x = result.capture["attn_in.1"]
        for point, projection in (("query.1", "q_proj"), ("key.1", "k_proj"), ("value.1", "v_proj")):
            right = getattr(attention, projection)(x).view(len(tokens), -1, 8)
            assert torch.allclose(result.capture[point], right, rtol=0, atol=1e-6), point
