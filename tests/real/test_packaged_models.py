"""Both packaged models convert and say what they are known to say."""

import json
import time
from itertools import pairwise
from typing import Any

import pytest
import torch

from interp.models.checkpoint import Checkpoint, checkpoint_dtype, fingerprint, resolve
from interp.models.gguf import is_complete
from interp.models.loading import load_model_and_tokenizer

pytestmark = pytest.mark.real


def quiet(line: str) -> None:
    """A report that nobody reads."""


def continuation(found: Checkpoint, prompt: str, n_tokens: int) -> str:
    model, tokenizer = load_model_and_tokenizer(found, torch.device("cpu"), torch.float32)
    assert tokenizer is not None
    tokens = tokenizer(prompt, return_tensors="pt")
    generate: Any = model.generate
    out = generate(**tokens, do_sample=False, max_new_tokens=n_tokens)
    return str(tokenizer.decode(out[0, tokens.input_ids.shape[1] :]))


def test_gemma_continues_as_known() -> None:
    found = resolve("gemma-3-270m", quiet)
    assert continuation(found, "The capital of France is", 8) == " the capital of the country of France."


def test_smollm_continues_as_known() -> None:
    found = resolve("smollm2-135m-instruct", quiet)
    assert continuation(found, "The capital of France is", 2) == " Paris."


def test_gemma_config_is_that_of_the_published_model() -> None:
    found = resolve("gemma-3-270m", quiet)
    config = json.loads((found.path / "config.json").read_text())
    expected = {
        "model_type": "gemma3_text",
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
        "rms_norm_eps": 1e-6,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "dtype": "float32",
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    assert {key: config.get(key) for key in expected} == expected


def test_smollm_config_is_that_of_the_published_model() -> None:
    found = resolve("smollm2-135m-instruct", quiet)
    config = json.loads((found.path / "config.json").read_text())
    expected = {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        "dtype": "float32",
    }
    assert {key: config.get(key) for key in expected} == expected


def test_tokenizers_survive_the_round_trip_and_split_as_trained() -> None:
    from transformers import AutoTokenizer

    gemma = AutoTokenizer.from_pretrained(resolve("gemma-3-270m", quiet).path)
    smollm = AutoTokenizer.from_pretrained(resolve("smollm2-135m-instruct", quiet).path)
    text = "In 1969, two people  walked\n\n\ton the Moon — naïve? 月 🚀 def f(x): return x**2"
    for tokenizer in (gemma, smollm):
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    assert gemma("Hello").input_ids[0] == gemma.bos_token_id == 2
    assert smollm.convert_ids_to_tokens(smollm("in 1969").input_ids) == ["in", "Ġ", "1", "9", "6", "9"]
    chat = smollm.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert smollm(chat).input_ids.count(smollm.convert_tokens_to_ids("<|im_start|>")) == 3


def test_gemma_tokens_are_those_of_greedy_merging() -> None:
    """Independent of the rebuilt merges: join the adjacent pair whose union comes first in the vocabulary."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve("gemma-3-270m", quiet).path)
    rank = tokenizer.get_vocab()

    def merged(text: str) -> list[str]:
        pieces = list(text.replace(" ", "▁"))
        while True:
            pairs = [(rank[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in rank]
            if not pairs:
                return pieces
            i = min(pairs)[1]
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]

    for text in (
        "The capital of France is Paris, and its river is the Seine.",
        "Antidisestablishmentarianism was unbelievably overcomplicated in 1869!",
        "def fibonacci(n): return n if n < 2 else fibonacci(n-1) + fibonacci(n-2)",
    ):
        assert tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False).input_ids) == merged(text)


@pytest.mark.parametrize("name", ["gemma-3-270m", "smollm2-135m-instruct"])
def test_a_converted_model_is_found_and_recognised_in_no_time(name: str) -> None:
    found = resolve(name, quiet)
    start = time.perf_counter()
    assert resolve(name.upper(), quiet) == found
    assert is_complete(found.path)
    assert time.perf_counter() - start < 0.4
    start = time.perf_counter()
    assert len(fingerprint(found.path)) == 16
    assert time.perf_counter() - start < 0.3
    assert checkpoint_dtype(found) == "float32"
