"""Router and expert points while the model runs: writes against a forward pass by hand, padding, generation, dtypes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from interp import run_with_cache
from interp.edits import Ablate, Replace, Scale
from interp.engines.base import Request
from interp.engines.eager import EagerEngine
from interp.engines.load import wrap
from interp.errors import PointRefused, UserError
from interp.models.tiny import tiny_model

TOKENS = [7, 3, 99, 64, 5]
POINTS = ["router_logits.1", "expert_weights.1", "expert_indices.1", "expert_out.1"]


@pytest.fixture(scope="module")
def mixtral() -> EagerEngine:
    return wrap(tiny_model("mixtral"), name="mixtral")


@contextmanager
def by_hand(module: Any, forward: Any) -> Iterator[None]:
    """The module computes `forward` in place of its own."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def logits_of(engine: EagerEngine) -> Tensor:
    with torch.no_grad(), engine.numerics():
        return engine.module(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]


def test_a_write_at_the_router_changes_what_is_selected(mixtral: EagerEngine) -> None:
    new = torch.tensor([0.3, -1.0, 2.5, 2.0], dtype=torch.float64)
    edit = Replace("router_logits.1", new, positions=(1, 3))
    result = mixtral.run([Request(TOKENS, capture=POINTS, edits=[edit], return_logits=True)])[0]
    gate = mixtral.module.get_submodule("model.layers.1.mlp.gate")

    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x @ gate.weight.T  # type: ignore[operator]
        logits[[1, 3]] = new
        weights, chosen = logits.softmax(-1).topk(2)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    with by_hand(gate, forward):
        right = logits_of(mixtral)
    assert result.logits is not None and torch.equal(result.logits, right)
    assert (right - logits_of(mixtral)).abs().max() > 1e-3
    assert result.capture["expert_indices.1"][[1, 3]].tolist() == [[2, 3], [2, 3]]
    assert torch.equal(result.capture["router_logits.1"][1], new)


@pytest.mark.parametrize("family", ["mixtral", "jetmoe"])
def test_a_write_at_the_weights_moves_the_output_by_the_shares(family: str) -> None:
    engine = wrap(tiny_model(family), name=family)
    capture = [*POINTS, "mlp_out.1", "mlp_in.1"]
    edit = Ablate("expert_weights.1", positions=(2,))
    plain, edited = (engine.run([Request(TOKENS, capture=capture, edits=e)])[0].capture for e in ([], [edit]))
    moved = plain["mlp_out.1"] - edited["mlp_out.1"]
    share = plain["expert_out.1"].sum(-2)
    assert share[2].abs().max() > 1e-3 and torch.allclose(moved[2], share[2], rtol=0, atol=1e-12)
    assert torch.equal(moved[[0, 1, 3, 4]], torch.zeros_like(moved[[0, 1, 3, 4]]))
    assert not edited["expert_out.1"][2].any() and not edited["expert_weights.1"][2].any()


def test_a_write_at_the_weights_is_that_of_a_forward_pass_by_hand(mixtral: EagerEngine) -> None:
    result = mixtral.run([Request(TOKENS, edits=[Scale("expert_weights.1", 0.5)], return_logits=True)])[0]
    experts = mixtral.module.get_submodule("model.layers.1.mlp.experts")
    own = experts.forward
    with by_hand(experts, lambda x, chosen, weights: own(x, chosen, weights * 0.5)):
        right = logits_of(mixtral)
    assert result.logits is not None and torch.equal(result.logits, right)
    assert (right - logits_of(mixtral)).abs().max() > 1e-3


def test_shares_follow_every_edit_inside_and_before_the_mlp(mixtral: EagerEngine) -> None:
    edits = [
        Scale("mlp_in.1", 1.3),
        Replace("router_logits.1", torch.tensor([0.3, -1.0, 2.5, 2.0]).double(), positions=(0, 4)),
        Scale("expert_weights.1", -2.0, positions=(1, 4)),
        Scale("mlp_out.1", 5.0),
    ]
    got = mixtral.run([Request(TOKENS, capture=[*POINTS, "mlp_out.1"], edits=edits)])[0].capture
    assert torch.allclose(5.0 * got["expert_out.1"].sum(-2), got["mlp_out.1"], rtol=0, atol=1e-12)
    with_all = mixtral.run([Request(TOKENS, capture=["expert_out.1"], edits=edits)])[0].capture["expert_out.1"]
    assert torch.equal(with_all, got["expert_out.1"])


def test_reading_changes_nothing_and_leaves_no_hook(mixtral: EagerEngine) -> None:
    plain = logits_of(mixtral)
    result = mixtral.run([Request(TOKENS, capture=POINTS, return_logits=True)])[0]
    assert result.logits is not None and torch.equal(result.logits, plain) and torch.equal(logits_of(mixtral), plain)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in mixtral.module.modules())


def test_a_padded_prompt_routes_as_if_alone_and_indices_stay_integers(mixtral: EagerEngine) -> None:
    prompts = [TOKENS, [11, 64], [40, 3, 3]]
    together = mixtral.run([Request(tokens, capture=POINTS) for tokens in prompts])
    for tokens, result in zip(prompts, together, strict=True):
        alone = mixtral.run([Request(tokens, capture=POINTS)])[0].capture
        for point in POINTS:
            found = result.capture[point]
            assert found.dtype == alone[point].dtype and found.shape == alone[point].shape
            assert torch.allclose(found.double(), alone[point].double(), rtol=0, atol=1e-12)
        assert result.capture["expert_indices.1"].dtype == torch.int64
    tokens, mask = torch.tensor([TOKENS, [11, 64, 0, 0, 0]]), torch.tensor([[1] * 5, [1, 1, 0, 0, 0]])
    cache = run_with_cache(mixtral, tokens, ["expert_indices.1", "expert_out.1"], attention_mask=mask)
    assert cache["expert_indices.1"][1, 2:].eq(-1).all() and cache["expert_out.1"][1, 2:].isnan().all()


def test_routing_is_captured_while_generating(mixtral: EagerEngine) -> None:
    result = mixtral.run([Request(TOKENS, capture=POINTS, max_new_tokens=4)])[0]
    again = mixtral.run([Request(result.tokens[:-1], capture=POINTS)])[0].capture
    for point in POINTS:
        assert result.capture[point].shape == again[point].shape
        assert torch.allclose(result.capture[point].double(), again[point].double(), rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "llama4_text", "jetmoe", "gpt_oss", "deepseek_v3"])
def test_the_points_are_proven_in_lower_precision_too(family: str, dtype: torch.dtype) -> None:
    engine = wrap(tiny_model(family, dtype), name=family)
    assert [point for point in POINTS if not engine.support(point).readable] == []


def test_what_cannot_be_written_says_so_and_a_wrong_width_is_caught(mixtral: EagerEngine) -> None:
    llama4 = wrap(tiny_model("llama4_text"), name="llama4")  # weights are entries of one row of scores per token
    for engine, point in ((mixtral, "expert_indices.1"), (mixtral, "expert_out.1"), (llama4, "expert_weights.1")):
        with pytest.raises(PointRefused, match="can be read but not written"):
            engine.run([Request(TOKENS, edits=[Scale(point, 2.0)])])
    with pytest.raises(UserError, match="the point is 4 wide"):
        mixtral.run([Request(TOKENS, edits=[Replace("router_logits.1", torch.zeros(3))])])
    with pytest.raises(UserError, match="the point is 2 wide"):
        mixtral.run([Request(TOKENS, edits=[Replace("expert_weights.1", torch.zeros(3))])])
