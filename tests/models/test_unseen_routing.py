"""Experts in an architecture that nobody has seen: a list of modules, looped over, selected in one function."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interp.edits import Scale
from interp.engines.base import Request
from interp.engines.doctor import prove
from interp.engines.eager import EagerEngine
from interp.engines.load import wrap
from interp.models.anatomy import Routing
from tests.models.test_streams import Bend, D, Unseen

E, K = 5, 2


class Crowd(nn.Module):
    """sigmoid scores, the best K over their sum, times 1.7, and one expert that always speaks."""

    def __init__(self) -> None:
        super().__init__()
        self.look, self.folk, self.always = nn.Linear(D, E), nn.ModuleList([Bend() for _ in range(E)]), Bend()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, D)
        share, who = self.look(flat).sigmoid().topk(K)
        share /= share.sum(-1, keepdim=True)
        share = 1.7 * share
        out = torch.zeros_like(flat)
        for e, member in enumerate(self.folk):
            row, slot = torch.where(who == e)
            out.index_add_(0, row, member(flat[row]) * share[row, slot, None])
        return out.view(x.shape) + self.always(x)


def crowd() -> EagerEngine:
    torch.manual_seed(0)
    model = Unseen("sandwich")
    for slab in model.slabs:
        slab.bend = Crowd()
    for parameter in model.double().parameters():
        nn.init.normal_(parameter, std=0.5) if parameter.ndim > 1 else nn.init.uniform_(parameter, 0.5, 1.5)
    return wrap(model.requires_grad_(False))


@pytest.fixture(scope="module")
def engine() -> EagerEngine:
    return crowd()


def test_it_is_understood_without_registration(engine: EagerEngine) -> None:
    assert all(claim.holds for claim in prove(engine)) and not engine.anatomy.refused
    routing = engine.anatomy.blocks[1].routing
    assert isinstance(routing, Routing) and routing.n_selected == K
    assert str(routing.weighting) == "sigmoid(router_logits)[expert_indices] over their sum, times 1.7"


def test_each_share_is_the_members_own_output_times_its_weight(engine: EagerEngine) -> None:
    names = ["mlp_in.1", "router_logits.1", "expert_weights.1", "expert_indices.1", "expert_out.1", "mlp_out.1"]
    got = engine.run([Request([7, 3, 50, 12], capture=names)])[0].capture
    x, logits, weights, who, shares, out = (got[name] for name in names)
    block: Any = engine.module.get_submodule("slabs.1.bend")
    assert torch.equal(who, logits.sigmoid().topk(K).indices)
    assert torch.allclose(weights.sum(-1), torch.full((4,), 1.7, dtype=torch.float64), rtol=1e-14)
    for p in range(4):
        for s in range(K):
            right = weights[p, s] * block.folk[int(who[p, s])](x[p])
            assert torch.allclose(shares[p, s], right, rtol=0, atol=1e-12)
    assert torch.allclose(shares.sum(-2) + block.always(x), out, rtol=0, atol=1e-12)


def test_an_edit_at_the_router_is_no_function_call_of_the_mlp(engine: EagerEngine) -> None:
    """Where the weights are known by the number of the multiplication that makes them, an edit's own must not count."""
    names = ["router_logits.1", "expert_weights.1", "expert_indices.1", "expert_out.1", "mlp_out.1", "mlp_in.1"]
    got = engine.run([Request([7, 3, 50], capture=names, edits=[Scale("router_logits.1", -0.5)])])[0].capture
    best = got["router_logits.1"].sigmoid().topk(K)
    assert torch.equal(got["expert_indices.1"], best.indices)
    right = 1.7 * best.values / best.values.sum(-1, keepdim=True)
    assert torch.allclose(got["expert_weights.1"], right, rtol=1e-13, atol=0)
    block: Any = engine.module.get_submodule("slabs.1.bend")
    rest = block.always(got["mlp_in.1"])
    assert torch.allclose(got["expert_out.1"].sum(-2) + rest, got["mlp_out.1"], rtol=0, atol=1e-12)


def test_a_write_where_no_module_passes_the_weights_on_takes_effect(engine: EagerEngine) -> None:
    names = ["expert_weights.1", "expert_out.1", "mlp_out.1"]
    plain, edited = engine.run(
        [Request([7, 3, 50], capture=names), Request([7, 3, 50], capture=names, edits=[Scale("expert_weights.1", 3.0)])]
    )
    tripled = 3.0 * plain.capture["expert_weights.1"]
    assert torch.allclose(edited.capture["expert_weights.1"], tripled, rtol=1e-14, atol=0)
    assert torch.allclose(edited.capture["expert_out.1"], 3.0 * plain.capture["expert_out.1"], rtol=0, atol=1e-12)
    moved = edited.capture["mlp_out.1"] - plain.capture["mlp_out.1"]
    assert torch.allclose(moved, 2.0 * plain.capture["expert_out.1"].sum(-2), rtol=0, atol=1e-12)
