"""vllm#52158, TransformerLens#1726: final scale, bias and cap are each applied once; a scale shows in no text."""

import pytest
import torch

from interp.engines.base import Request
from tests.families.loaded import engine

TOKENS = [7, 3, 99, 64]


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
