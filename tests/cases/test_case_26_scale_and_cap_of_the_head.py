"""vllm#52158, TransformerLens#1726: final scale, bias and cap are each applied once; a scale shows in no text."""

import pytest
import torch

from interp.engines.base import Request
from interp.engines.load import wrap
from tests.families.loaded import engine
from tests.families.tiny import build

TOKENS = [7, 3, 99, 64]


def test_a_tied_head_with_a_bias() -> None:
    """The matrix is the embedding's own, the bias the head's alone; each counts once."""
    model = wrap(build("phi", torch.float64, tie_word_embeddings=True))
    head, words = (model.module.get_submodule(path) for path in ("lm_head", "model.embed_tokens"))
    assert head.weight is words.weight and head.bias.abs().max() > 0.1  # type: ignore[union-attr, operator]
    with torch.no_grad(), model.numerics():
        own = model.module(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    (result,) = model.run([Request(TOKENS, capture=["final_norm", "resid_post.2", "lm_head"], return_logits=True)])
    by_hand = result.capture["final_norm"] @ words.weight.T + head.bias  # type: ignore[operator]
    for logits in (by_hand, result.logits, result.capture["lm_head"], model.unembed(result.capture["resid_post.2"])):
        assert torch.allclose(logits.log_softmax(-1), own.log_softmax(-1), rtol=0, atol=1e-12)  # type: ignore[union-attr]
    assert (by_hand - head.bias - own).abs().max() > 0.1  # type: ignore[operator]


@pytest.mark.parametrize(
    ("family", "from_lm_head"),
    [
        ("granite", lambda z: z / 8.0),
        ("cohere", lambda z: z * 0.0625),
        ("gemma2", lambda z: 5.0 * torch.tanh(z / 5.0)),
        ("phi", lambda z: z),  # a head with a bias, which is already in lm_head's output
        ("gptj", lambda z: z),
    ],
)
def test_log_probabilities_are_transformers_own(family: str, from_lm_head) -> None:
    model = engine(family)
    with torch.no_grad(), model.numerics():
        own = model.module(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0].log_softmax(-1)
    (result,) = model.run([Request(TOKENS, capture=["resid_post.2", "final_norm", "lm_head"], return_logits=True)])
    assert result.logits is not None
    for logits in (
        result.logits,
        model.unembed(result.capture["resid_post.2"]),
        from_lm_head(result.capture["lm_head"]),
    ):
        assert torch.allclose(logits.log_softmax(-1), own, rtol=0, atol=1e-12)
    head = model.module.get_submodule("lm_head")
    bias = 0.0 if head.bias is None else head.bias
    by_hand = result.capture["final_norm"] @ head.weight.T + bias  # type: ignore[operator]
    assert torch.allclose(by_hand, result.capture["lm_head"], rtol=0, atol=1e-12)
    assert (head.bias is not None) == (family in ("phi", "gptj"))
