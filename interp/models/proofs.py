"""The equations that make names claims, computed on captured tensors and judged by rounding.

Each equation gives a left side, a right side and the magnitude of what was summed; the difference is stated in units of
the dtype's epsilon times that magnitude. A sum of n rounded terms errs by at most lambda·sqrt(n) units with
overwhelming probability (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019); lambda is 4.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import sqrt

import torch
from torch import Tensor

from interp.models.anatomy import Anatomy, Refusal, Routing
from interp.models.equations import Sides, block_equations, normed, products, same
from interp.models.norms import Norm
from interp.models.routing_equations import routing_equations
from interp.points import POINTS, Address

LAMBDA = 4.0


@dataclass(frozen=True, slots=True)
class Claim:
    """One equation at one place, and how far its two sides were apart."""

    proof: str
    """P1 to P8."""
    equation: str
    layer: int | None
    points: tuple[str, ...]
    """Points that this equation vouches for: refused where it fails."""
    difference: float
    """Largest difference in units of epsilon times the summands' magnitude."""
    tolerance: float
    """What rounding explains, in the same unit."""

    @property
    def holds(self) -> bool:
        return self.difference <= self.tolerance


Captured = Mapping[Address, Tensor]


def needed(anatomy: Anatomy) -> list[Address]:
    """Every address that exists, which the proofs read."""
    layers = range(len(anatomy.blocks))
    every = [Address(p.name, i) for p in POINTS.values() if p.per_layer for i in layers]
    every += [Address(p.name) for p in POINTS.values() if not p.per_layer]
    return [address for address in every if not isinstance(anatomy.tap(address), Refusal)]


def check(anatomy: Anatomy, prompts: Sequence[Captured]) -> list[Claim]:
    """All claims, each at its worst over `prompts` (captures of `needed`, one mapping per prompt)."""
    worst: dict[tuple[str, str, int | None], Claim] = {}
    passes = [_claims(anatomy, captured) for captured in (_joined(prompts), *map(_mixing, prompts))]
    for claim in chain(*passes, _embedding(anatomy, prompts)):
        key = (claim.proof, claim.equation, claim.layer)
        if key not in worst or not claim.difference <= worst[key].difference:
            worst[key] = claim
    return list(worst.values())


def _joined(prompts: Sequence[Captured]) -> Captured:
    """What holds position by position, all prompts' positions in one tensor: each weight is then read once."""
    return {a: torch.cat([p[a] for p in prompts]) for a in prompts[0] if "query" not in POINTS[a.name].shape}


def _mixing(captured: Captured) -> Captured:
    """What mixes the positions of one prompt."""
    return {
        a: captured[a]
        for a in captured
        if a.name in ("attn_scores", "attn_probs", "query_rot", "key_rot", "value", "attn_gate", "z")
    }


def _claims(anatomy: Anatomy, captured: Captured) -> Iterator[Claim]:
    def get(name: str, layer: int | None = None) -> Tensor | None:
        tensor = captured.get(Address(name, layer))
        return None if tensor is None else tensor.double()

    def claim(proof: str, equation: str, layer: int | None, points: str, sides: Sides | None) -> Iterator[Claim]:
        if sides is not None:
            yield _claim(anatomy, proof, equation, layer, points, sides)

    for layer, block in enumerate(anatomy.blocks):

        def at(name: str, layer: int = layer) -> Tensor | None:
            return get(name, layer)

        routed = routing_equations(block.routing, at) if isinstance(block.routing, Routing) else ()
        for proof, equation, points, sides in chain(block_equations(block, at), routed):
            yield from claim(proof, equation, layer, points, sides)
        if layer + 1 < len(anatomy.blocks):
            sides = same(at("resid_post"), get("resid_pre", layer + 1))
            yield from claim("P2", "resid_post.l = resid_pre.(l+1)", layer, "resid_post", sides)
            yield from claim("P2", "resid_pre.l = resid_post.(l-1)", layer + 1, "resid_pre", sides)
    for equation, points, sides in _head(anatomy, get):
        yield from claim("P4", equation, None, points, sides)
    if isinstance(anatomy.final_norm, Norm):
        last = get("resid_post", len(anatomy.blocks) - 1)
        sides = normed(anatomy.final_norm, last, get("final_normalized"), get("final_norm_scale"), get("final_norm"))
        yield from claim(
            "P8",
            "final_normalized · gain + bias = final_norm",
            None,
            "final_norm final_normalized final_norm_scale",
            sides,
        )


def _embedding(anatomy: Anatomy, prompts: Sequence[Captured]) -> Iterator[Claim]:
    """The stream starts as the token embedding times a constant, and what else it has depends on the position alone."""
    needs = (Address("embeddings"), Address("resid_pre", 0))
    start = anatomy.start
    if isinstance(start, Refusal) or any(address not in prompts[0] for address in needs):
        return
    steps = next((term.tap.steps for term in start.terms if term.kind == "token"), ())
    firsts, tokens = [], []
    for captured in prompts:
        value = captured[Address("embeddings")]
        for step in steps[len(anatomy.embeddings.steps) :]:
            value = step.read(value)
        firsts.append(captured[Address("resid_pre", 0)].double())
        tokens.append(value.double())
    if len(start.terms) == 1 and start.norm is not None:
        token, first = torch.cat(tokens), torch.cat(firsts)
        sides = normed(start.norm, token, start.norm.normalized(token), start.norm.scale(token), first)
        equation = "norm(embedding term) = resid_pre.0"
    elif len(start.terms) == 1:
        sides = same(torch.cat(firsts), torch.cat(tokens))
        equation = "the embedding term is resid_pre.0"
    elif len(prompts) == 1 or start.norm is not None:
        return
    else:
        n = min(map(len, firsts))
        left, right = (first[:n] - token[:n] for first, token in zip(firsts[:2], tokens[:2], strict=True))
        magnitude = firsts[0][:n].abs() + tokens[0][:n].abs() + firsts[1][:n].abs() + tokens[1][:n].abs()
        sides = Sides(left, right, magnitude, 4)
        equation = "resid_pre.0 less the token term depends on the position alone"
    if sides is not None:
        yield _claim(anatomy, "P2", equation, None, "embeddings", sides)
        yield _claim(anatomy, "P2", f"{equation}, at the first block", 0, "resid_pre", sides)


def _claim(anatomy: Anatomy, proof: str, equation: str, layer: int | None, points: str, sides: Sides) -> Claim:
    epsilon = torch.finfo(_dtype(anatomy)).eps
    return Claim(proof, equation, layer, tuple(points.split()), _difference(sides, epsilon), _tolerance(sides))


def _head(anatomy: Anatomy, get: Callable[..., Tensor | None]) -> Iterator[tuple[str, str, Sides | None]]:
    """(equation, points vouched for, sides): the unembedding's own output, then what scale and cap make of it."""
    head, norm, last = anatomy.head, anatomy.final_norm, get("resid_post", len(anatomy.blocks) - 1)
    logits = get("logits")
    if isinstance(head, Refusal) or last is None or logits is None:
        return
    x = last
    if isinstance(norm, Norm):
        x = norm.normalized(last) * norm.gain.double() + (0.0 if norm.bias is None else norm.bias.double())
    weight, bias = head.linear.weight, head.linear.bias
    own, magnitude = products(x, weight, bias)
    stated = get("lm_head")
    sides = None if stated is None else Sides(own, stated, magnitude, weight.shape[1])
    yield "W final_norm(resid_post.last) + b = lm_head", "final_norm lm_head", sides
    sides = Sides(head.logits(own), logits, magnitude * abs(head.scale), weight.shape[1])
    yield "lm_head(final_norm(resid_post.last)) = logits", "final_norm lm_head logits", sides


def _difference(sides: Sides, epsilon: float) -> float:
    if sides.left.shape != sides.right.shape:
        return float("inf")
    unit = epsilon * sides.magnitude.clamp(min=torch.finfo(torch.float32).tiny)
    gap = (sides.left - sides.right).abs()
    ratio = torch.where(gap == 0, torch.zeros_like(gap), gap / unit)
    return float(ratio.detach().amax()) if bool(ratio.isfinite().all()) else float("inf")


def _tolerance(sides: Sides) -> float:
    return LAMBDA * sqrt(sides.terms)


def _dtype(anatomy: Anatomy) -> torch.dtype:
    return next(anatomy.model.parameters()).dtype
