"""nrimsky/CAA#3, steering-vectors#60, pyvene#193: steering "after the prompt" acts on the prompt's last token and on.

Absolute positions stay absolute in cached steps: each mask equals an uncached, teacher-forced forward that was written
by hand with the same mask, for prompts of unequal length in one batch.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from interp.edits import Add
from interp.engines.base import Request
from tests.families.loaded import F64, PROMPTS, engine

NEW = 6
LAYERS = {"llama": "model.layers.1", "gpt2": "transformer.h.1", "bloom": "transformer.h.1", "gemma3": "model.layers.1"}
V = torch.linspace(-2, 2, 48, dtype=F64)


def by_hand(family: str, tokens: list[int], mask: Tensor) -> Tensor:
    """Logits of one full forward in which layer 1's output gets 4 V at the positions of the mask, [pos]."""
    model: Any = engine(family).module

    def add(module: Any, args: Any, output: Any) -> Any:
        new = (output if isinstance(output, Tensor) else output[0]) + mask[:, None] * (4.0 * V)
        return new if isinstance(output, Tensor) else (new, *output[1:])

    handle = model.get_submodule(LAYERS[family]).register_forward_hook(add)
    with torch.no_grad(), engine(family).numerics():
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    handle.remove()
    return logits


@pytest.mark.parametrize("family", LAYERS)
@pytest.mark.parametrize("positions", [2, ("last_prompt", "generated"), None, "generated", "last_prompt", "prompt"])
def test_a_mask_equals_a_teacher_forced_forward(family: str, positions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = engine(family)
    monkeypatch.setattr(model.module.generation_config, "eos_token_id", None)
    edit = Add("resid_post.1", V, 4.0, positions=positions)
    requests = [Request(p, edits=[edit], max_new_tokens=NEW, return_logits=True) for p in PROMPTS]
    for prompt, request, result in zip(PROMPTS, requests, model.run(requests), strict=True):
        run = torch.arange(len(result.tokens) - 1)
        last = len(prompt) - 1
        masks = {
            2: run == 2,
            ("last_prompt", "generated"): run >= last,
            None: run >= 0,
            "generated": run > last,
            "last_prompt": run == last,
            "prompt": run <= last,
        }
        right = by_hand(family, result.tokens[:-1], masks[positions])
        assert result.logits is not None and len(result.tokens) == len(prompt) + NEW
        assert (result.logits - right).abs().max() <= 1e-12 * (1 + right.abs().max())
        assert right[last:].argmax(-1).tolist() == result.tokens[len(prompt) :]
        unsteered = by_hand(family, result.tokens[:-1], torch.zeros(len(run)))
        assert (result.logits - unsteered).abs().max() > 1e-3
        assert model.run([request])[0].tokens == result.tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_adding_is_bit_identical_to_a_hook_that_adds(dtype: torch.dtype) -> None:
    model: Any = engine("llama", dtype).module
    v, tokens = V.to(dtype), PROMPTS[1]

    def add(module: Any, args: Any, output: Any) -> Any:
        new = (output if isinstance(output, Tensor) else output[0]).clone()
        new[:, 4:] += 3.7 * v
        return new if isinstance(output, Tensor) else (new, *output[1:])

    handle = model.get_submodule(LAYERS["llama"]).register_forward_hook(add)
    with torch.no_grad():
        right = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    handle.remove()
    edit = Add("resid_post.1", v, 3.7, positions="4:")
    (result,) = engine("llama", dtype).run([Request(tokens, edits=[edit], return_logits=True)])
    assert result.logits is not None and torch.equal(result.logits, right)
