"""Tiny models in float64 for all tests of analysis; one has a cap that matters, one a tokenizer."""

from functools import cache

import torch
from torch import Tensor

from interp.engines.eager import EagerEngine
from interp.engines.load import wrap
from interp.models.tiny import tiny_model
from tests.families.loaded import F64
from tests.families.loaded import engine as plain_engine
from tests.families.tiny import SPLIT_LLAMAS, build
from tests.training.conftest import tiny_tokenizer

CLEAN, CORRUPTED = [11, 64, 2, 130, 5, 5, 88], [11, 9, 2, 130, 77, 5, 88]
FAMILIES = ["gpt2", "llama", "gemma2", "granite", "gpt_neox_parallel", "olmo2", "cohere2", *SPLIT_LLAMAS]
"""LayerNorm and biases; RMSNorm and attention biases; norms behind and a cap; multipliers; parallel; norms behind only;
parallel with a factor at the logits; a narrower first layer with a matrix behind it, or an MLP."""
CAP = 30.0


@cache
def subject(family: str) -> EagerEngine:
    """A proven engine; Gemma's logits reach beyond its cap of 30."""
    if family != "gemma2":
        return plain_engine(family)
    module = build("gemma2", F64, tie_word_embeddings=False)
    module.config.final_logit_softcapping = CAP  # type: ignore[union-attr]
    module.get_submodule("lm_head").weight.data.mul_(25.0)  # type: ignore[union-attr, operator]
    return wrap(module)


@cache
def other(model_type: str) -> EagerEngine:
    """A proven engine of any type of transformers."""
    return wrap(tiny_model(model_type), name=model_type)


@cache
def reader() -> EagerEngine:
    """One that reads text: words `w0` to `w59`, a BOS before them."""
    return wrap(build("llama", F64), tiny_tokenizer(), name="reader")


def own_logits(model: EagerEngine, tokens: list[int]) -> Tensor:
    """[pos, d_vocab] of the bare module."""
    with torch.no_grad(), model.numerics():
        return model.module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
