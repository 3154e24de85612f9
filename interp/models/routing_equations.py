"""The equations of a sparse MLP: router logits, the selection, its weights, and what the experts add up to.

With x what the MLP receives, W and b the router's linear map, i the selected experts and w their weights:
W x + b = router_logits; w = g(router_logits)[i] for a known g; no expert that was left out scores above one that was
selected; MLP(x; i, w) = mlp_out; the experts' shares and MLP(x; i, 0) sum to mlp_out, and each share is what its expert
adds alone.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from interp.models.anatomy import Refusal, Routing, Tap
from interp.models.equations import Equation, Sides
from interp.models.linear import products
from interp.models.rerun import Rerun
from interp.models.weighting import Weighting

At = Callable[[str], Tensor | None]


def routing_equations(routing: Routing, at: At) -> Iterator[Equation]:
    """Every equation of a router and its experts; `at(point)` gives the point's captured value at this layer."""
    logits, indices, weights = at("router_logits"), at("expert_indices"), at("expert_weights")
    yield "P6", "W mlp_in + b = router_logits", "router_logits", _linear(routing, at("mlp_in"), logits)
    if logits is not None and indices is not None:
        chosen = indices.long()
        if isinstance(routing.weighting, Weighting) and weights is not None:
            sides = _weighed(routing.weighting, logits, chosen, weights)
            yield "P6", f"{routing.weighting} = expert_weights", "router_logits expert_weights expert_indices", sides
        if routing.ranking is not None:
            sides = _ranked(routing.ranking(logits), routing.n_groups, logits, chosen)
            yield "P6", "no expert left out scores above a selected one", "expert_indices", sides
    if isinstance(routing.sublayer, Rerun):
        yield from _used(routing, routing.sublayer, at)


def _linear(routing: Routing, x: Tensor | None, logits: Tensor | None) -> Sides | None:
    if x is None or logits is None or not routing.of_input:
        return None
    left, magnitude = products(x, routing.matrix.to(x.device), routing.bias)
    return Sides(left, logits, magnitude, routing.matrix.shape[1])


def _weighed(rule: Weighting, logits: Tensor, chosen: Tensor, weights: Tensor) -> Sides:
    """An error of one logit by rounding changes an exponential by that times the logit's size."""
    magnitude = weights.abs() * (1 + logits.abs().amax(-1, keepdim=True))
    return Sides(rule.weights(logits, chosen), weights, magnitude, logits.shape[-1])


def _ranked(scores: Tensor, n_groups: int, logits: Tensor, chosen: Tensor) -> Sides:
    """How far the best expert that was left out is above the worst selected one; in a group with selected experts."""
    selected = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)
    groups = selected.unflatten(-1, (n_groups, -1))
    reachable = groups.any(-1, keepdim=True).expand_as(groups).flatten(-2)
    worst = scores.masked_fill(~selected, float("inf")).amin(-1)
    best = scores.masked_fill(selected | ~reachable, float("-inf")).amax(-1)
    repeated = selected.sum(-1) != chosen.shape[-1]
    above = (best - worst).clamp(min=0).masked_fill(repeated, float("inf"))
    magnitude = (1 + logits.abs().amax(-1)) * (1 + scores.abs().amax(-1))
    return Sides(above, torch.zeros_like(above), magnitude, logits.shape[-1])


def _used(routing: Routing, sublayer: Rerun, at: At) -> Iterator[Equation]:
    """The MLP by itself, with the selection handed to it: as captured, none, one expert (another at each position)."""
    x, out = at("mlp_in"), at("mlp_out")
    indices, weights, shares = at("expert_indices"), at("expert_weights"), at("expert_out")
    told, given = routing.indices, routing.weights
    if x is None or out is None or indices is None or weights is None:
        return
    if isinstance(told, Refusal) or isinstance(given, Refusal):
        return

    def run(selected: Tensor) -> Tensor:
        return _run(sublayer, x, (told, indices), (given, selected))

    magnitude = _norm(out) + (0.0 if shares is None else _norm(shares).sum(-2))
    terms = 8 * (routing.n_selected + 1)
    whole = run(weights)
    sides = Sides(whole, out, magnitude.expand_as(out), terms)
    yield "P6", "MLP(mlp_in; expert_indices, expert_weights) = mlp_out", "expert_weights expert_indices", sides
    if shares is None:
        return
    none = run(torch.zeros_like(weights))
    magnitude = (magnitude + _norm(none)).expand_as(out)
    sides = Sides(shares.sum(-2) + none, out, magnitude, terms)
    yield "P6", "sum of expert_out + MLP(mlp_in; no expert) = mlp_out", "expert_out", sides
    turn = (torch.arange(len(weights), device=weights.device) % weights.shape[-1])[:, None]
    alone = run(torch.zeros_like(weights).scatter(-1, turn, weights.gather(-1, turn))) - none
    chosen = shares.gather(-2, turn[..., None].expand(-1, 1, shares.shape[-1])).squeeze(-2)
    sides = Sides(alone, chosen, magnitude, terms)
    yield "P6", "MLP(mlp_in; one expert) - MLP(mlp_in; no expert) = expert_out", "expert_out", sides


def _norm(x: Tensor) -> Tensor:
    """Each entry's share of rounding is that of the products behind it: bounded by the vector's length."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def _run(sublayer: Rerun, x: Tensor, indices: tuple[Tap, Tensor], weights: tuple[Tap, Tensor]) -> Tensor:
    def to(value: Tensor):
        return lambda old: value.reshape(old.shape).to(old)

    changes = [(tap, to(value)) for tap, value in (indices, weights)]
    return sublayer(x, *changes).double().to(x.device)
