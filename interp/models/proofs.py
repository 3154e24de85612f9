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

from interp.models.anatomy import Anatomy, Head, Linear, Network, Piece, Refusal, Routing
from interp.models.equations import Equation, Sides, block_equations, normed, same, through
from interp.models.float64 import numerics
from interp.models.linear import products
from interp.models.norms import Norm
from interp.models.parameters import dtype_of
from interp.models.routing_equations import routing_equations
from interp.models.transforms import Scale
from interp.points import POINTS, STREAM_POINTS, Address

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
Get = Callable[..., Tensor | None]


def needed(anatomy: Anatomy) -> list[Address]:
    """Every address that exists, which the proofs read."""
    layers = range(len(anatomy.blocks))
    every = [Address(p.name, i) for p in POINTS.values() if p.per_layer for i in layers]
    every += [Address(p.name) for p in POINTS.values() if not p.per_layer]
    if anatomy.n_streams > 1:
        both = ("resid_pre", "resid_mid")  # resid_post of all streams is resid_streams
        every += [Address(p, i, stream=s) for p in both for i in layers for s in range(anatomy.n_streams)]
    return [address for address in every if not isinstance(anatomy.tap(address), Refusal)]


def check(anatomy: Anatomy, prompts: Sequence[Captured]) -> list[Claim]:
    """All claims, each at its worst over `prompts` (captures of `needed`, one mapping per prompt)."""
    worst: dict[tuple[str, str, int | None], Claim] = {}
    passes = [_claims(anatomy, captured) for captured in (_joined(prompts), *map(_mixing, prompts))]
    for claim in chain(*passes, _start(anatomy, prompts)):
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
    get = reader(anatomy, captured)
    for layer in range(len(anatomy.blocks)):
        for equation in block_equations_at(anatomy, get, layer):
            yield from judged(anatomy, layer, equation)
        for proof, text, points, sides in boundary_equations(anatomy, get, layer):
            yield from judged(anatomy, layer, (proof, text, points, sides))
            from_below = text.replace("resid_pre.(l+1)", "resid_pre.l").replace("resid_post.l", "resid_post.(l-1)")
            yield from judged(anatomy, layer + 1, (proof, from_below, "resid_pre", sides))
            if layer in anatomy.bridges:
                yield from judged(anatomy, None, (proof, f"{text}, at layer {layer}", "adapter_out", sides))
    for equation in chain(_head(anatomy, get), final_norm_equations(anatomy, get)):
        yield from judged(anatomy, None, equation)


def reader(anatomy: Anatomy, captured: Captured) -> Get:
    """The captured value of a point in float64, by name and layer; None where it was not captured.

    The stream of a trunk of several comes with all of them, [pos, streams, d_model].
    """

    def get(name: str, layer: int | None = None) -> Tensor | None:
        if anatomy.n_streams > 1 and name == "resid_post":
            name = "resid_streams"
        elif anatomy.n_streams > 1 and name in STREAM_POINTS:
            streams = [captured.get(Address(name, layer, stream=i)) for i in range(anatomy.n_streams)]
            found = [stream.double() for stream in streams if stream is not None]
            return torch.stack(found, -2) if len(found) == anatomy.n_streams else None
        tensor = captured.get(Address(name, layer))
        return None if tensor is None else tensor.double()

    return get


def judged(anatomy: Anatomy, layer: int | None, equation: Equation) -> Iterator[Claim]:
    """The claim that an equation makes; none where a part of it was not captured."""
    proof, text, points, sides = equation
    if sides is not None:
        epsilon = torch.finfo(_dtype(anatomy)).eps
        yield Claim(proof, text, layer, tuple(points.split()), _difference(sides, epsilon), _tolerance(sides))


def block_equations_at(anatomy: Anatomy, get: Get, layer: int) -> Iterator[Equation]:
    """Every equation inside one block."""
    block = anatomy.blocks[layer]

    def at(name: str) -> Tensor | None:
        return get(name, layer)

    yield from block_equations(block, at)
    if isinstance(block.routing, Routing):
        yield from routing_equations(block.routing, at)


def boundary_equations(anatomy: Anatomy, get: Get, layer: int) -> Iterator[Equation]:
    """From one block to the next, through the adapter where one stands between; nothing after the last."""
    if layer + 1 == len(anatomy.blocks):
        return
    left, enters = get("resid_post", layer), get("resid_pre", layer + 1)
    bridge = anatomy.bridges.get(layer)
    if bridge is None or isinstance(bridge.pieces, Refusal):
        yield "P2", "resid_post.l = resid_pre.(l+1)", "resid_post", same(enters, left)
        return
    made, name = (get("adapter_out"), "adapter_out") if len(anatomy.bridges) == 1 else (enters, "resid_pre.(l+1)")
    sides = None
    if left is not None and made is not None:
        own, magnitude, widest = sums_through(bridge.pieces, left)
        sides = Sides(own, made, magnitude, widest)
    yield "P2", f"adapter(resid_post.l) = {name}", "resid_post", sides
    if made is not enters:
        yield "P2", "adapter_out = resid_pre.(l+1)", "resid_post", same(enters, made)


def final_norm_equations(anatomy: Anatomy, get: Get) -> Iterator[Equation]:
    """The norm between the last block and the head."""
    if isinstance(anatomy.final_norm, Norm):
        last = _last(anatomy, get)
        sides = normed(anatomy.final_norm, last, get("final_normalized"), get("final_norm_scale"), get("final_norm"))
        points = "final_norm final_normalized final_norm_scale"
        yield "P8", "final_normalized · gain + bias = final_norm", points, sides


def _start(anatomy: Anatomy, prompts: Sequence[Captured]) -> Iterator[Claim]:
    for proof, text, points, sides in embedding_equations(anatomy, prompts):
        yield from judged(anatomy, None, (proof, text, points, sides))
        yield from judged(anatomy, 0, (proof, f"{text}, at the first block", "resid_pre", sides))


def embedding_equations(anatomy: Anatomy, prompts: Sequence[Captured]) -> Iterator[Equation]:
    """The stream starts as the token embedding times a constant, and what else it has depends on the position alone."""
    start = anatomy.start
    first = [reader(anatomy, captured)("resid_pre", 0) for captured in prompts]
    embedded = [reader(anatomy, captured)("embeddings") for captured in prompts]
    firsts, embeddings = [f for f in first if f is not None], [e for e in embedded if e is not None]
    term = None if isinstance(start, Refusal) else next((t for t in start.terms if t.kind == "token"), None)
    if isinstance(start, Refusal) or term is None or len(firsts) < len(prompts) or len(embeddings) < len(prompts):
        return
    tokens, magnitudes, terms = [], [], 1
    for value in embeddings:
        magnitude = value.abs()
        if term.via is not None:
            value, magnitude = term.via.sums(value)
            terms = term.via.shape[1]
        for step in term.tap.steps if term.via is not None else term.tap.steps[len(anatomy.embeddings.steps) :]:
            value, magnitude = step.read(value), step.read(magnitude).abs()
        tokens.append(value if anatomy.n_streams == 1 else value[:, None].expand(-1, anatomy.n_streams, -1))
        magnitudes.append(magnitude if anatomy.n_streams == 1 else magnitude[:, None].expand_as(tokens[-1]))
    if len(start.terms) == 1 and start.norm is not None:
        token, first_values = torch.cat(tokens), torch.cat(firsts)
        sides = normed(start.norm, token, start.norm.normalized(token), start.norm.scale(token), first_values)
        equation = "norm(embedding term) = resid_pre.0"
    elif len(start.terms) == 1:
        sides = Sides(torch.cat(tokens), torch.cat(firsts), torch.cat(magnitudes), terms)
        equation = "the embedding term is resid_pre.0"
    elif len(prompts) == 1 or start.norm is not None:
        return
    else:
        n = min(map(len, firsts))
        (first, other), (token, its) = ([one[:n] for one in some[:2]] for some in (firsts, tokens))
        magnitude = first.abs() + other.abs() + magnitudes[0][:n] + magnitudes[1][:n]
        sides = Sides(token + (other - its), first, magnitude, 3 + terms)
        equation = "resid_pre.0 less the token term depends on the position alone"
    yield "P2", equation, "embeddings", sides


def _head(anatomy: Anatomy, get: Get) -> Iterator[Equation]:
    """The unembedding's own output, then what scale and cap make of it."""
    head, norm, last = anatomy.head, anatomy.final_norm, _last(anatomy, get)
    logits = get("logits")
    if isinstance(head, Refusal) or last is None or logits is None:
        return
    x = through(norm, last, last.abs())[0] if isinstance(norm, Norm) else last
    own, magnitude, widest = unembedded(head, x)
    stated = get("lm_head")
    sides = None if stated is None else Sides(own, stated, magnitude, widest)
    inside = "final_norm(resid_post.last)" if not head.before else "before(final_norm(resid_post.last))"
    yield "P4", f"W {inside} + b = lm_head", "final_norm lm_head", sides
    sides = Sides(head.logits(own), logits, magnitude * abs(head.scale), widest)
    yield "P4", "lm_head(final_norm(resid_post.last)) = logits", "final_norm lm_head logits", sides


def unembedded(head: Head, x: Tensor) -> tuple[Tensor, Tensor, int]:
    """The unembedding's own output from the final norm's, the summands' magnitude, and the widest sum on the way."""
    return sums_through((*head.before, head.linear), x)


def sums_through(pieces: Sequence[Piece], x: Tensor) -> tuple[Tensor, Tensor, int]:
    """What the pieces make of x in float64, the summands' magnitude, and the widest sum on the way."""
    own, magnitude, widest = x, x.abs(), 1
    for piece in pieces:
        if isinstance(piece, Linear):
            shown = len(pieces) > 1 and piece.packed is None
            spread = products(magnitude, piece.weight.abs(), None)[0] if shown else magnitude.new_zeros(())
            own, magnitude = piece.sums(own)
            magnitude, widest = torch.maximum(spread, magnitude), max(widest, piece.shape[1])
        elif isinstance(piece, Norm):
            own, magnitude = through(piece, own, magnitude)
        elif isinstance(piece, Network):
            with torch.no_grad(), numerics(dtype_of(piece.module)):
                own = piece.module(own[None].to(dtype_of(piece.module)))[0].double()
            magnitude, widest = own.abs().amax(-1, keepdim=True).expand_as(own), max(widest, x.shape[-1])
        elif isinstance(piece, Scale):
            own, magnitude = piece.read(own), piece.read(magnitude).abs()
        else:
            own = piece(own)
    return own, magnitude, widest


def _last(anatomy: Anatomy, get: Get) -> Tensor | None:
    """What the final norm reads, float64: the last stream, or what the model's own module makes of several."""
    last = get("resid_post", len(anatomy.blocks) - 1)
    if last is None or anatomy.collapse is None:
        return last
    tap = anatomy.collapse
    with torch.no_grad(), numerics(_dtype(anatomy)):
        return tap.module(last[None].to(_dtype(anatomy)))[0].double()


def _difference(sides: Sides, epsilon: float) -> float:
    if sides.left.shape != sides.right.shape:
        return float("inf")
    unit = epsilon * sides.magnitude.clamp(min=torch.finfo(torch.float32).tiny)
    gap = (sides.left - sides.right).abs().masked_fill(sides.left == sides.right, 0.0)  # a mask's infinity is one
    ratio = torch.where(gap == 0, torch.zeros_like(gap), gap / unit)
    return float(ratio.detach().amax()) if bool(ratio.isfinite().all()) else float("inf")


def _tolerance(sides: Sides) -> float:
    return LAMBDA * sqrt(sides.terms)


def _dtype(anatomy: Anatomy) -> torch.dtype:
    return dtype_of(anatomy.model)
