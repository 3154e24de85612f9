"""Sparse MLPs: the router's points and each expert's share against formulas by hand, and claims that can fail."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, sigmoid, silu, softmax

from interp.engines.base import Request
from interp.engines.doctor import prove, refuse_unproven
from interp.engines.eager import EagerEngine
from interp.engines.load import wrap
from interp.errors import PointRefused
from interp.models.anatomy import Refusal, Routing
from interp.models.proofs import check, needed
from interp.models.tiny import tiny_model
from interp.models.transforms import Channels
from interp.models.weighting import Ranking
from interp.points import Address
from tests.families.loaded import engine

POINTS = ("router_logits", "expert_weights", "expert_indices", "expert_out")
TOKENS = [7, 3, 99, 64, 5]
LAYER = 1


@cache
def sparse(family: str) -> EagerEngine:
    return wrap(tiny_model(family), name=family)


def routing(family: str, layer: int = LAYER) -> Routing:
    found = sparse(family).anatomy.blocks[layer].routing
    assert isinstance(found, Routing)
    return found


@cache
def everything(family: str) -> dict[Address, Tensor]:
    return dict(sparse(family).run([Request(TOKENS, capture=needed(sparse(family).anatomy))])[0].capture)


def captured(family: str, layer: int = LAYER) -> dict[str, Tensor]:
    names = (*POINTS, "mlp_in", "mlp_out")
    capture = sparse(family).run([Request(TOKENS, capture=[f"{name}.{layer}" for name in names])])[0].capture
    return {name: capture[f"{name}.{layer}"] for name in names}


def close(found: Tensor, right: Tensor) -> bool:
    return found.shape == right.shape and bool((found - right).abs().max() <= 1e-12 * right.abs().max())


def fused(experts: Any, e: int, x: Tensor) -> Tensor:
    """One expert whose gate and up projection are one matrix, stored [out, in]."""
    gate, up = linear(x, experts.gate_up_proj[e]).chunk(2, -1)
    return linear(silu(gate) * up, experts.down_proj[e])


def mixtral(mlp: Any, x: Tensor, logits: Tensor) -> tuple[Tensor, Callable[[int, Tensor, Tensor], Tensor]]:
    return softmax(logits, -1), lambda e, x, w: w * fused(mlp.experts, e, x)


def llama4_text(mlp: Any, x: Tensor, logits: Tensor) -> tuple[Tensor, Callable[[int, Tensor, Tensor], Tensor]]:
    """The weight multiplies what the expert reads; matrices are stored [in, out]."""

    def expert(e: int, x: Tensor, w: Tensor) -> Tensor:
        gate, up = ((w * x) @ mlp.experts.gate_up_proj[e]).chunk(2, -1)
        return (up * silu(gate)) @ mlp.experts.down_proj[e]

    return sigmoid(logits), expert


def jetmoe(mlp: Any, x: Tensor, logits: Tensor) -> tuple[Tensor, Callable[[int, Tensor, Tensor], Tensor]]:
    """Tokens sorted by expert, between two banks of matrices."""

    def expert(e: int, x: Tensor, w: Tensor) -> Tensor:
        gate, up = linear(x, mlp.input_linear.weight[e]).chunk(2, -1)
        return w * linear(mlp.activation(gate) * up, mlp.output_linear.weight[e])

    return softmax(logits, -1), expert


def nemotron_h(mlp: Any, x: Tensor, logits: Tensor) -> tuple[Tensor, Callable[[int, Tensor, Tensor], Tensor]]:
    """Experts without a gate, squared ReLU."""

    def expert(e: int, x: Tensor, w: Tensor) -> Tensor:
        inner = linear(mlp.fc1_latent_proj(x), mlp.experts.up_proj[e]).relu().square()
        return mlp.fc2_latent_proj(linear(inner, mlp.experts.down_proj[e]) * w)

    return sigmoid(logits), expert


BY_HAND = {
    # family: (formula, whether the selected scores are divided by their sum, constant, path of the router's matrix)
    "mixtral": (mixtral, True, 1.0, "gate.weight"),
    "qwen2_moe": (mixtral, False, 1.0, "gate.weight"),
    "llama4_text": (llama4_text, False, 1.0, "router.weight"),
    "jetmoe": (jetmoe, True, 1.0, "router.layer.weight"),
    "deepseek_v3": (lambda m, x, logits: (sigmoid(logits), mixtral(m, x, logits)[1]), True, 2.5, "gate.weight"),
    "nemotron_h": (nemotron_h, True, 1.0, "gate.weight"),
}


@pytest.mark.parametrize("family", BY_HAND)
def test_the_four_points_are_those_of_the_formula(family: str) -> None:
    formula, renormalized, factor, matrix = BY_HAND[family]
    got = captured(family)
    mlp = sparse(family).module.get_submodule(sparse(family).anatomy.blocks[LAYER].mlp.path)  # type: ignore[union-attr]
    x, logits, chosen, weights = (got[n] for n in ("mlp_in", "router_logits", "expert_indices", "expert_weights"))
    assert close(logits, linear(x, mlp.get_parameter(matrix)))
    scores, expert = formula(mlp, x, logits)
    assert chosen.dtype == torch.int64 and chosen.shape == weights.shape
    right = scores.gather(-1, chosen)
    assert close(weights, (right / right.sum(-1, keepdim=True) if renormalized else right) * factor)
    shares = [
        torch.stack([expert(int(e), x[p], weights[p, s]) for s, e in enumerate(chosen[p])]) for p in range(len(x))
    ]
    assert close(got["expert_out"], torch.stack(shares))


def test_shares_are_the_whole_output_but_for_the_shared_expert() -> None:
    got = captured("mixtral")
    assert close(got["expert_out"].sum(-2), got["mlp_out"])
    mlp: Any = sparse("qwen2_moe").module.get_submodule(f"model.layers.{LAYER}.mlp")
    got = captured("qwen2_moe")
    shared = sigmoid(mlp.shared_expert_gate(got["mlp_in"])) * mlp.shared_expert(got["mlp_in"])
    assert shared.abs().max() > 1e-3 and close(got["expert_out"].sum(-2) + shared, got["mlp_out"])


@pytest.mark.parametrize("family", [*BY_HAND, "phimoe", "gpt_oss", "afmoe", "granitemoeshared", "lfm2_moe"])
def test_every_claim_about_experts_holds_in_float64(family: str) -> None:
    layer = 2 if family == "lfm2_moe" else LAYER
    claims = [c for c in prove(sparse(family)) if set(POINTS) & set(c.points) and c.layer == layer]
    assert len(claims) >= 5 and all(claim.holds for claim in claims)
    assert {point for claim in claims for point in claim.points} >= set(POINTS)
    assert all(sparse(family).support(f"{point}.{layer}").readable for point in POINTS)


BIASED = {"deepseek_v3": "sigmoid", "minimax_m2": "sigmoid", "ernie4_5_moe": "softmax", "kolibri1": None}
"""Families that rank experts by their scores plus a bias of the choice alone; the last adds it to the logits."""


@pytest.mark.parametrize("family", BIASED)
def test_a_bias_of_the_choice_alone_is_part_of_the_ranking_and_not_of_the_weights(family: str) -> None:
    model = tiny_model(family)
    generator = torch.Generator().manual_seed(1)
    for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
        if "correction_bias" in name:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    biased = wrap(model, name=family)
    found = biased.anatomy.blocks[LAYER].routing
    assert isinstance(found, Routing) and found.ranking is not None and found.ranking.kind == BIASED[family]
    assert all(biased.support(f"{point}.{LAYER}").readable for point in POINTS)
    blocks = list(biased.anatomy.blocks)
    blocks[LAYER] = replace(blocks[LAYER], routing=replace(found, ranking=Ranking(found.ranking.kind, None)))
    faulty = EagerEngine(biased.module, None, replace(biased.anatomy, blocks=tuple(blocks), refused={}), biased.model)
    assert any("left out" in c.equation and not c.holds for c in refuse_unproven(faulty))


def test_the_epsilon_of_a_renormalisation_is_seen() -> None:
    assert str(routing("lfm2_moe", 2).weighting) == "sigmoid(router_logits)[expert_indices] over their sum + 1e-06"


def test_weights_of_no_known_function_are_proven_by_what_they_do() -> None:
    """phimoe weighs each expert by a softmax over those that come close to it: in none of the forms that are tried."""
    assert isinstance(routing("phimoe").weighting, Refusal)
    assert sparse("phimoe").support(f"expert_weights.{LAYER}").writable


def test_groups_of_experts_that_take_no_part_are_left_out_of_the_ranking() -> None:
    from interp.models import tiny

    fields = tiny.OWN["deepseek_v3"]
    tiny.OWN["deepseek_v3"] = fields | {
        "num_local_experts": 6,
        "num_experts": 6,
        "n_routed_experts": 6,
        "n_group": 3,
        "topk_group": 1,
    }
    try:
        grouped = wrap(tiny_model("deepseek_v3"))
    finally:
        tiny.OWN["deepseek_v3"] = fields
    found = grouped.anatomy.blocks[LAYER].routing
    assert isinstance(found, Routing) and found.n_groups == 3
    assert grouped.support(f"expert_indices.{LAYER}").readable
    blocks = list(grouped.anatomy.blocks)
    blocks[LAYER] = replace(blocks[LAYER], routing=replace(found, n_groups=1))
    refused = EagerEngine(
        grouped.module, None, replace(grouped.anatomy, blocks=tuple(blocks), refused={}), grouped.model
    )
    assert any("left out" in c.equation and not c.holds for c in refuse_unproven(refused))


def test_an_mlp_that_norms_the_experts_sum_has_no_shares() -> None:
    assert isinstance(routing("axk1").shares, Refusal)
    with pytest.raises(PointRefused, match=r"expert_out\.1 does not exist here: .*no sum over experts.* mlp_out\.1"):
        sparse("axk1").run([Request(TOKENS, capture=["expert_out.1"])])
    assert sparse("axk1").support("expert_weights.1").readable


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "llama4_text", "jetmoe"])
@pytest.mark.parametrize("point", POINTS)
def test_a_wrong_number_fails_a_claim_that_vouches_for_the_point(family: str, point: str) -> None:
    anatomy = sparse(family).anatomy
    good = everything(family)
    address = Address(point, LAYER)
    n_experts = routing(family).matrix.shape[0]
    new = (good[address] + 1) % n_experts if point == "expert_indices" else good[address] * 1.0001 + 1e-6
    failed = [c for c in check(anatomy, [good | {address: new}]) if not c.holds and c.layer == LAYER]
    assert any(point in c.points for c in failed)
    assert all(claim.holds for claim in check(anatomy, [good]) if set(POINTS) & set(claim.points))


def slots_exchanged(r: Routing) -> Routing:
    """Weights of one expert beside the number of the other."""
    order = torch.arange(r.n_selected).flip(0)
    return replace(r, weights=r.weights.then(Channels(order)))  # type: ignore[union-attr]


def one_layer_off(r: Routing) -> Routing:
    return replace(r, logits=routing("mixtral", LAYER + 1).logits)


def other_matrix(r: Routing) -> Routing:
    return replace(r, matrix=routing("mixtral", LAYER + 1).matrix)


def not_renormalized(r: Routing) -> Routing:
    return replace(r, weighting=replace(r.weighting, renormalized=False))  # type: ignore[type-var]


def factor_forgotten(r: Routing) -> Routing:
    return replace(r, weighting=replace(r.weighting, factor=1.01))  # type: ignore[type-var]


def sigmoid_for_softmax(r: Routing) -> Routing:
    return replace(r, weighting=replace(r.weighting, kind="sigmoid"))  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("fault", "point"),
    [
        (slots_exchanged, "expert_weights"),
        (one_layer_off, "router_logits"),
        (other_matrix, "router_logits"),
        (not_renormalized, "expert_weights"),
        (factor_forgotten, "expert_weights"),
        (sigmoid_for_softmax, "expert_weights"),
    ],
)
def test_a_wrong_role_is_refused(fault: Callable[[Routing], Routing], point: str) -> None:
    sound = sparse("mixtral")
    blocks = list(sound.anatomy.blocks)
    blocks[LAYER] = replace(blocks[LAYER], routing=fault(routing("mixtral")))
    faulty = EagerEngine(sound.module, None, replace(sound.anatomy, blocks=tuple(blocks), refused={}), sound.model)
    failed = [claim for claim in refuse_unproven(faulty) if not claim.holds]
    assert failed and all(claim.difference > 1e6 * claim.tolerance for claim in failed)
    assert not faulty.support(f"{point}.{LAYER}").readable and faulty.support(f"{point}.0").readable


@pytest.mark.parametrize("point", POINTS)
def test_a_dense_layer_says_that_it_is_dense(point: str) -> None:
    with pytest.raises(PointRefused, match=rf"{point}\.0 does not exist here: .*MLP is dense.* mlp_act\.0"):
        engine("qwen3_moe").run([Request([7], capture=[f"{point}.0"])])  # layer 1 has experts
    assert engine("qwen3_moe").support(f"{point}.1").readable
