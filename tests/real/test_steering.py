"""Steering along a contrastive vector equals a loop of plain transformers with one hook, token by token."""

from typing import Any

import pytest
import torch
from torch import Tensor

from interp.edits import Add
from interp.engines.base import Request
from interp.engines.eager import EagerEngine

pytestmark = pytest.mark.real

PAIRS = [
    ("I love this wonderful film", "I hate this terrible film"),
    ("The food was delicious and the service was kind", "The food was disgusting and the service was rude"),
    ("What a beautiful and happy day", "What an ugly and miserable day"),
    ("She praised the excellent book", "She condemned the awful book"),
    ("Our holiday was a complete joy", "Our holiday was a complete disaster"),
    ("He is a generous and honest friend", "He is a greedy and dishonest enemy"),
]
PROMPT, SCALE, N_NEW = "I think that this movie is", 4.0, 20


def difference(engine: EagerEngine, point: str) -> Tensor:
    """Mean of positive minus negative at the last token: [d_model]."""
    results = engine.run([Request(text, capture=[point]) for pair in PAIRS for text in pair])
    last = torch.stack([result.capture[point][-1] for result in results])
    return (last[0::2] - last[1::2]).mean(0)


def by_hand(module: Any, layer: int, ids: list[int], vector: Tensor) -> tuple[list[int], Tensor]:
    """New tokens, and the logits behind each: cached, the block's output moved from the last prompt token on."""

    def steer(block: Any, args: tuple[Any, ...], output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        moved = torch.cat([hidden[:, :-1], hidden[:, -1:] + vector], dim=1)
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    tokens, logits, cache, fed = [], [], None, torch.tensor([ids])
    handle = module.model.layers[layer].register_forward_hook(steer)
    with torch.no_grad():
        for _ in range(N_NEW):
            output = module(input_ids=fed, cache=cache, use_cache=True)
            cache = output["cache"]
            logits.append(output.logits[0, -1])
            tokens.append(int(logits[-1].argmax()))
            fed = torch.tensor([[tokens[-1]]])
    handle.remove()
    return tokens, torch.stack(logits)


def test_steering_equals_a_hand_written_loop(engine: EagerEngine) -> None:
    layer = engine.model.n_layers // 2
    point = f"resid_post.{layer}"
    vector = SCALE * difference(engine, point)
    ids = engine.to_tokens(PROMPT)[0].tolist()
    last = len(ids) - 1
    edit = Add(point, vector, positions=("last_prompt", "generated"))
    expected, right = by_hand(engine.module, layer, ids, vector)
    steered, plain = (
        engine.run([Request(ids, edits=edits, max_new_tokens=N_NEW, return_logits=True)])[0] for edits in ([edit], [])
    )
    assert steered.tokens[len(ids) :] == expected and plain.tokens[len(ids) :] != expected
    assert steered.logits is not None and plain.logits is not None
    assert (steered.logits[last:] - right).abs().max() <= 1e-4
    assert (plain.logits[last] - right[0]).abs().max() > 1
    # Nothing before the last prompt token moved.
    assert torch.equal(steered.logits[:last], plain.logits[:last])
