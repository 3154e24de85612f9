"""TransformerLens#1636, #1323: a capture takes no hook of the user's away and leaves none of its own behind."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interp.edits import Edit
from interp.engines.base import Request
from interp.models.attention import observed
from tests.families.loaded import F32, engine, hook_count

TOKENS = [7, 3, 99]


class Exploding(Edit):
    def change(self, value: Tensor, positions: Tensor) -> Tensor:
        raise RuntimeError("in the middle of the model")


def mlp_of(model: Any) -> Any:
    return model.module.get_submodule("model.layers.1.mlp")


@pytest.mark.parametrize("points", [["resid_post.0"], ["attn_probs.0", "resid_post.1"]])
def test_an_edit_that_raises_leaves_nothing_behind(points: list[str]) -> None:
    model = engine("llama", F32)
    request = Request(TOKENS, capture=points, return_logits=True)
    (before,) = model.run([request])
    config: Any = model.module.config
    hooks, attention = hook_count(model.module), config._attn_implementation
    for at in ("mlp_out.1", "resid_mid.1"):
        with pytest.raises(RuntimeError, match="middle"):
            model.run([Request(TOKENS, capture=points, edits=[Exploding(at)])])
        assert (hook_count(model.module), config._attn_implementation) == (hooks, attention)
    (after,) = model.run([request])
    assert before.logits is not None and after.logits is not None and torch.equal(before.logits, after.logits)


def test_a_users_own_hooks_stay_and_act_and_their_errors_leave_nothing_behind() -> None:
    model = engine("llama", F32)
    mlp = mlp_of(model)
    (clean,) = model.run([Request(TOKENS, capture=["mlp_out.1"])])
    handle = mlp.register_forward_hook(lambda m, a, output: output * 2)
    hooks = hook_count(model.module)
    for _ in range(2):
        (doubled,) = model.run([Request(TOKENS, capture=["mlp_out.1"])])
        assert torch.equal(doubled.capture["mlp_out.1"], clean.capture["mlp_out.1"] * 2)
        assert hook_count(model.module) == hooks
    handle.remove()

    def explode(*_: Any) -> None:
        raise RuntimeError("a user's hook")

    handle = mlp.register_forward_hook(explode)
    hooks = hook_count(model.module)
    with pytest.raises(RuntimeError, match="a user's hook"):
        model.run([Request(TOKENS, capture=["mlp_in.1", "resid_post.2"])])
    assert hook_count(model.module) == hooks
    handle.remove()
    (again,) = model.run([Request(TOKENS, capture=["mlp_out.1"])])
    assert torch.equal(again.capture["mlp_out.1"], clean.capture["mlp_out.1"])


def test_a_capture_inside_a_users_hook_leaves_both_as_they_were() -> None:
    """Nested: while one run passes layer 1, a hook of the user's runs the model once more."""
    model = engine("llama", F32)
    points, inner = ["mlp_out.1", "attn_probs.1", "resid_post.2"], []
    (clean,) = model.run([Request(TOKENS, capture=points, return_logits=True)])
    (other,) = model.run([Request([5, 4], capture=points)])
    busy: list[int] = []

    def again(*_: Any) -> None:
        if not busy:
            busy.append(1)
            inner.extend(model.run([Request([5, 4], capture=points)]))

    handle = mlp_of(model).register_forward_hook(again)
    hooks = hook_count(model.module)
    (outer,) = model.run([Request(TOKENS, capture=points, return_logits=True)])
    assert hook_count(model.module) == hooks and len(inner) == 1
    handle.remove()
    for point in points:
        assert torch.equal(outer.capture[point], clean.capture[point]), point
        assert torch.equal(inner[0].capture[point], other.capture[point]), point
    assert torch.equal(outer.logits, clean.logits)  # type: ignore[arg-type]
    assert model.module.config._attn_implementation == "sdpa"  # type: ignore[union-attr]


def test_backward_hooks_of_a_user_stay_and_act() -> None:
    model = engine("llama", F32)
    gradients: list[Tensor] = []
    handle = mlp_of(model).register_full_backward_hook(lambda m, entered, left: gradients.append(left[0]))
    hooks = hook_count(model.module)
    (result,) = model.run([Request(TOKENS, capture=["mlp_out.1"], return_logits=True)])
    assert hook_count(model.module) == hooks and result.logits is not None and not gradients
    embedded = model.module.get_input_embeddings()(torch.tensor([TOKENS])).requires_grad_()  # type: ignore[operator]
    logits = model.module(inputs_embeds=embedded, use_cache=False).logits
    logits.sum().backward()
    handle.remove()
    assert len(gradients) == 1 and torch.allclose(logits[0], result.logits, atol=1e-5)


def test_contexts_of_the_observed_attention_may_be_nested() -> None:
    model = engine("llama", F32)
    outer, inner = [], []
    config: Any = model.module.config
    module: nn.Module = model.module
    tokens = torch.tensor([TOKENS])
    with torch.no_grad(), observed(module, lambda m, call: outer.append(call.probs)):
        with observed(module, lambda m, call: inner.append(call.probs)):
            module(input_ids=tokens, use_cache=False)
        module(input_ids=tokens, use_cache=False)
    assert (len(outer), len(inner)) == (6, 3) and config._attn_implementation == "sdpa"
