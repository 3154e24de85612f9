"""`steer` is the edits of every run inside it, before the request's own, and nothing once it is left."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from interp import steer
from interp.edits import Ablate, Add, Edit, Scale
from interp.engines.base import Request
from interp.engines.cache import run_with_cache
from interp.errors import PointRefused, UserError
from tests.families.loaded import F32, engine, hook_count

TOKENS = [11, 64, 2, 130]
AT = "resid_post.1"
V = torch.linspace(-3, 3, 48)


def logits(*edits: Edit, family: str = "llama", new: int = 0) -> Tensor:
    (result,) = engine(family, F32).run([Request(TOKENS, edits=edits, return_logits=True, max_new_tokens=new)])
    assert result.logits is not None
    return result.logits


def test_a_context_is_its_edits_before_the_request_s_own() -> None:
    model, add, scale = engine("llama", F32), Add(AT, V, 2.0), Scale(AT, -0.5)
    clean, hooks = logits(), hook_count(model.module)
    with steer(model, [add]):
        assert hook_count(model.module) == hooks
        assert torch.equal(logits(), logits_of(add)) and not torch.equal(logits(), clean)
        assert torch.equal(logits(scale), logits_of(add, scale))
        with steer(model, scale):
            assert torch.equal(logits(), logits_of(add, scale))
            assert torch.equal(logits(Ablate(AT)), logits_of(add, scale, Ablate(AT)))
        assert torch.equal(logits(), logits_of(add))
        cache = run_with_cache(model, torch.tensor([TOKENS]), [AT])
        (alone,) = model.run([Request(TOKENS, capture=[AT])])
        assert torch.equal(cache[AT][0], alone.capture[AT])
        steered = logits(new=4)
    assert torch.equal(steered, logits(add, new=4))
    assert torch.equal(logits(), clean) and hook_count(model.module) == hooks
    assert torch.equal(logits_of(add, scale), logits(add, scale))


def logits_of(*edits: Edit) -> Tensor:
    """The same edits in the request, from a thread of its own, which is not steered."""
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(logits(*edits)))
    thread.start()
    thread.join()
    return found[0]


def test_other_engines_are_not_steered() -> None:
    clean, other = logits(), logits(family="gpt2")
    with steer(engine("llama", F32), [Add(AT, V)]):
        assert torch.equal(logits(family="gpt2"), other) and not torch.equal(logits(), clean)


def test_an_exception_leaves_nothing_behind() -> None:
    model = engine("llama", F32)
    clean, hooks = logits(), hook_count(model.module)
    with pytest.raises(RuntimeError, match="in between"), steer(model, [Add(AT, V)]), steer(model, [Scale(AT, 2.0)]):
        logits()
        raise RuntimeError("in between")
    assert torch.equal(logits(), clean) and hook_count(model.module) == hooks
    with steer(model, [Add(AT, V, positions=9)]):
        with pytest.raises(UserError, match=r"Position 9 of the edit at resid_post\.1 is outside"):
            logits()
        assert logits(new=8).shape[0] == 11
    assert torch.equal(logits(), clean)


@pytest.mark.parametrize(
    ("edits", "kind", "sentence"),
    [
        ([Add(AT, V[:47])], UserError, "47 wide, but the point is 48 wide"),
        ([Ablate("mlp_norm_scale.1")], PointRefused, "not written"),
        ([Ablate("resid_post.9")], PointRefused, "layers 0 to 2"),
        (["resid_post.1"], UserError, "steer takes edits, not a str"),
    ],
)
@pytest.mark.usefixtures("unchecked_signatures")
def test_a_mistake_is_found_on_entry(edits: Any, kind: type[Exception], sentence: str) -> None:
    clean = logits()
    with pytest.raises(kind, match=sentence), steer(engine("llama", F32), edits):
        raise AssertionError("entered")
    assert torch.equal(logits(), clean)
