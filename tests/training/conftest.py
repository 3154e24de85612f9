"""A tiny model with a tokenizer, and a text that it can read."""

import random

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from interp.engines.eager import EagerEngine
from interp.engines.load import wrap

WORDS = [f"w{i}" for i in range(60)]
BOS = 1


def tiny_tokenizer(bos: bool = True) -> PreTrainedTokenizerFast:
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "<unk>", "a", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>" if bos else None, pad_token="<pad>", unk_token="<unk>"
    )


@pytest.fixture(scope="session")
def engine() -> EagerEngine:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=12, intermediate_size=20, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, max_position_embeddings=64, pad_token_id=0, bos_token_id=BOS,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 2)
            elif "mlp" in name:
                parameter.normal_(std=0.5)
            else:
                parameter.normal_(std=0.3)
    return wrap(model, tiny_tokenizer(), name="tiny", fingerprint="abc")


@pytest.fixture(scope="session")
def documents() -> list[str]:
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=rng.randrange(10, 60))) for _ in range(120)]
