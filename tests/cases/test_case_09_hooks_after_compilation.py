"""pytorch#117758, #115750: a compiled graph passes later hooks by; what is read and edited must not."""

import logging

import pytest
import torch

from interp.edits import Add
from interp.engines.base import Request
from interp.engines.load import wrap
from tests.families.tiny import build

TOKENS = [7, 3, 99, 64]


@pytest.mark.parametrize("whole", [True, False])
def test_plain_capture_steer_plain_equal_the_uncompiled_model(whole: bool, caplog: pytest.LogCaptureFixture) -> None:
    v = torch.linspace(-1, 1, 48)
    requests = [
        Request(TOKENS, return_logits=True),
        Request(TOKENS, capture=["resid_post.1", "attn_probs.1"], return_logits=True),
        Request(TOKENS, edits=[Add("resid_post.1", v)], return_logits=True),
        Request(TOKENS, return_logits=True),
    ]
    right = [wrap(build("llama")).run([request])[0] for request in requests]
    module = build("llama")
    if whole:
        compiled = wrap(torch.compile(module, backend="eager"))  # type: ignore[arg-type]
    else:
        compiled = wrap(module)
        for layer in module.model.layers:  # type: ignore[union-attr]
            layer.compile(backend="eager")
        with torch.no_grad():
            module(input_ids=torch.tensor([TOKENS]), use_cache=False)  # the graph is recorded before any hook is there
    with caplog.at_level(logging.INFO, logger="interp"):
        for request, expected in zip(requests, right, strict=True):
            (found,) = compiled.run([request])
            assert torch.equal(found.logits, expected.logits)  # type: ignore[arg-type]
            for address, tensor in expected.capture.items():
                assert torch.equal(found.capture[address], tensor)
    assert not torch.equal(right[2].logits, right[0].logits)  # type: ignore[arg-type]
    assert len([r for r in caplog.records if "runs it uncompiled" in r.message]) == (0 if whole else 1)
