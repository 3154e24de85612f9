"""The equations that make names claims, computed on captured tensors and judged by rounding.

Each equation gives a left side, a right side and the magnitude of what was summed; the difference is stated in units of
the dtype's epsilon times that magnitude. A sum of n rounded terms errs by at most lambda·sqrt(n) units with
overwhelming probability (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019); lambda is 4.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from interp.models.anatomy import Anatomy, Block, Mixer, Neurons, Refusal, Sublayer
from interp.models.norms import Norm
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


class Sides(NamedTuple):
    """An equation with numbers in it."""

    left: Tensor
    right: Tensor
    magnitude: Tensor
    terms: int
    """How many rounded terms make up one entry."""


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
    for captured in (_joined(prompts), *map(_mixing, prompts)):
        for claim in _claims(anatomy, captured):
            key = (claim.proof, claim.equation, claim.layer)
            if key not in worst or not claim.difference <= worst[key].difference:
                worst[key] = claim
    return list(worst.values())


def _joined(prompts: Sequence[Captured]) -> Captured:
    """What holds position by position, all prompts' positions in one tensor: each weight is then read once."""
    return {a: torch.cat([p[a] for p in prompts]) for a in prompts[0] if "query" not in POINTS[a.name].shape}


def _mixing(captured: Captured) -> Captured:
    """What mixes the positions of one prompt."""
    return {a: captured[a] for a in captured if a.name in ("attn_scores", "attn_probs", "value", "z")}


def _claims(anatomy: Anatomy, captured: Captured) -> Iterator[Claim]:
    def get(name: str, layer: int | None = None) -> Tensor | None:
        tensor = captured.get(Address(name, layer))
        return None if tensor is None else tensor.double() if tensor.dtype != torch.float64 else tensor

    def claim(proof: str, equation: str, layer: int | None, points: str, sides: Sides | None) -> Iterator[Claim]:
        if sides is not None:
            epsilon = torch.finfo(_dtype(anatomy)).eps
            yield Claim(proof, equation, layer, tuple(points.split()), _difference(sides, epsilon), _tolerance(sides))

    for layer, block in enumerate(anatomy.blocks):

        def at(name: str, layer: int = layer) -> Tensor | None:
            return get(name, layer)

        for proof, equation, points, sides in _block_equations(block, at):
            yield from claim(proof, equation, layer, points, sides)
        if layer + 1 < len(anatomy.blocks):
            sides = _same(at("resid_post"), get("resid_pre", layer + 1))
            yield from claim("P2", "resid_post.l = resid_pre.(l+1)", layer, "resid_post", sides)
            yield from claim("P2", "resid_pre.l = resid_post.(l-1)", layer + 1, "resid_pre", sides)
    yield from claim("P2", "embedding terms sum to resid_pre.0", None, "embeddings", _embedding(anatomy, get))
    for equation, points, sides in _head(anatomy, get):
        yield from claim("P4", equation, None, points, sides)
    if isinstance(anatomy.final_norm, Norm):
        last = get("resid_post", len(anatomy.blocks) - 1)
        sides = _norm(anatomy.final_norm, last, get("final_normalized"), get("final_norm_scale"), get("final_norm"))
        yield from claim(
            "P8",
            "final_normalized · gain + bias = final_norm",
            None,
            "final_norm final_normalized final_norm_scale",
            sides,
        )


def _block_equations(block: Block, at: Callable[[str], Tensor | None]) -> Iterator[tuple[str, str, str, Sides | None]]:
    """(proof, equation, points vouched for, sides) of one block."""
    if block.parallel:
        sides = _sum(at("resid_post"), at("resid_pre"), at("attn_out_post"), at("mlp_out_post"))
        yield (
            "P1",
            "resid_pre + attn_out_post + mlp_out_post = resid_post",
            "attn_out_post mlp_out_post resid_post",
            sides,
        )
    elif isinstance(block.mid, Refusal):
        for name in ("attn_out_post", "mlp_out_post"):
            yield (
                "P1",
                f"resid_pre + {name} = resid_post",
                f"{name} resid_post",
                _sum(at("resid_post"), at("resid_pre"), at(name)),
            )
    else:
        sides = _sum(at("resid_mid"), at("resid_pre"), at("attn_out_post"))
        yield "P1", "resid_pre + attn_out_post = resid_mid", "attn_out_post resid_mid", sides
        sides = _sum(at("resid_post"), at("resid_mid"), at("mlp_out_post"))
        yield "P1", "resid_mid + mlp_out_post = resid_post", "mlp_out_post resid_post", sides
    for name, sublayer in (("attn", block.attn), ("mlp", block.mlp)):
        if isinstance(sublayer, Sublayer):
            yield from _sublayer_equations(name, block, sublayer, at)
    if isinstance(block.mixer, Mixer):
        yield from _attention_equations(block.mixer, at)
    if isinstance(block.neurons, Neurons):
        yield from _mlp_equations(block.neurons, at)


def _sublayer_equations(
    name: str, block: Block, sublayer: Sublayer, at: Callable[[str], Tensor | None]
) -> Iterator[tuple[str, str, str, Sides | None]]:
    raw, contribution = at(f"{name}_out"), at(f"{name}_out_post")
    points = f"{name}_out {name}_out_post"
    if sublayer.post_norm is None:
        yield "P3", f"multiplier · {name}_out = {name}_out_post", points, _same(contribution, raw, sublayer.multiplier)
    else:
        normalized, scale = at(f"{name}_post_normalized"), at(f"{name}_post_norm_scale")
        sides = _norm(sublayer.post_norm, raw, normalized, scale, contribution, sublayer.multiplier)
        equation = f"post_norm({name}_out) · multiplier = {name}_out_post"
        yield "P3", equation, f"{points} {name}_post_normalized {name}_post_norm_scale", sides
    stream = at("resid_pre" if name == "attn" or block.parallel or isinstance(block.mid, Refusal) else "resid_mid")
    if sublayer.pre_norm is None:
        yield "P8", f"{name}_in is the stream", f"{name}_in", _same(at(f"{name}_in"), stream)
    else:
        normalized, scale = at(f"{name}_normalized"), at(f"{name}_norm_scale")
        sides = _norm(sublayer.pre_norm, stream, normalized, scale, at(f"{name}_in"))
        equation = f"{name}_normalized · gain + bias = {name}_in"
        yield "P8", equation, f"{name}_in {name}_normalized {name}_norm_scale", sides


def _attention_equations(
    mixer: Mixer, at: Callable[[str], Tensor | None]
) -> Iterator[tuple[str, str, str, Sides | None]]:
    z, value, probs, scores, out = at("z"), at("value"), at("attn_probs"), at("attn_scores"), at("attn_out")
    if z is not None and not isinstance(mixer.output, Refusal):
        sides = _affine(z.flatten(-2), mixer.output.weight, mixer.output.bias, out)
        yield "P5", "o_proj(z) = attn_out", "z attn_out", sides
        sides = _head_sum(at("head_out"), sides, mixer.output.bias)
        yield "P5", "sum of head_out + bias = attn_out", "head_out", sides
    if value is not None and not isinstance(mixer.value_weight, Refusal):
        weight, bias = mixer.value_weight()
        sides = _affine(
            at("attn_in"), weight.flatten(0, 1), None if bias is None else bias.flatten(), value.flatten(-2)
        )
        yield "P5", "W_V attn_in + b_V = value", "value", sides
    if z is not None and value is not None and probs is not None:
        each = value.repeat_interleave(mixer.n_heads // mixer.n_kv_heads, dim=1)
        mixed = torch.einsum("hqk,khd->qhd", probs, each)
        magnitude = torch.einsum("hqk,khd->qhd", probs, each.abs())
        yield "P5", "attn_probs @ value = z", "attn_probs value z", Sides(mixed, z, magnitude, probs.shape[-1])
    if probs is not None:
        total = probs.sum(-1)
        yield (
            "P5",
            "rows of attn_probs sum to 1",
            "attn_probs",
            Sides(total, torch.ones_like(total), torch.ones_like(total), probs.shape[-1]),
        )
    if probs is not None and scores is not None:
        soft = scores.softmax(-1)
        spread = 1 + scores.abs().masked_fill(soft == 0, 0).amax(-1, keepdim=True)
        yield (
            "P5",
            "softmax(attn_scores) = attn_probs",
            "attn_scores attn_probs",
            Sides(soft, probs, spread.expand_as(soft), probs.shape[-1]),
        )
    yield from _head_norm_equations(mixer, at)


def _head_norm_equations(
    mixer: Mixer, at: Callable[[str], Tensor | None]
) -> Iterator[tuple[str, str, str, Sides | None]]:
    for which, norm in (("q", mixer.q_norm), ("k", mixer.k_norm)):
        before, after = at(f"{which}_norm_in"), at(f"{which}_norm_out")
        if isinstance(norm, Norm) and before is not None and after is not None:
            if norm.gain.ndim and norm.gain.shape[-1] != before.shape[-1]:
                before, after = before.flatten(-2), after.flatten(-2)
            normalized = norm.normalized(before)
            sides = _norm(norm, before, normalized, norm.scale(before), after)
            yield "P8", f"norm({which}_norm_in) = {which}_norm_out", f"{which}_norm_in {which}_norm_out", sides


def _mlp_equations(
    neurons: Neurons, at: Callable[[str], Tensor | None]
) -> Iterator[tuple[str, str, str, Sides | None]]:
    act, pre, linear, out = at("mlp_act"), at("mlp_pre"), at("mlp_pre_linear"), at("mlp_out")
    if act is None:
        return
    sides = _affine(act, neurons.down.weight, neurons.down.bias, out, neurons.multiplier)
    yield "P6", "multiplier · down_proj(mlp_act) = mlp_out", "mlp_act mlp_out", sides
    if pre is None:
        return
    if neurons.activation is None:
        bad = torch.full_like(act, float("inf"))
        yield (
            "P6",
            "act(mlp_pre) is a known function",
            "mlp_pre mlp_pre_linear",
            Sides(bad, act, torch.ones_like(act), 1),
        )
        return
    with torch.no_grad():
        active = neurons.activation(pre)
    gated = active if linear is None else active * linear
    magnitude = pre.abs() if linear is None else (pre.abs() * linear.abs())
    equation = "act(mlp_pre) = mlp_act" if linear is None else "act(mlp_pre) · mlp_pre_linear = mlp_act"
    yield (
        "P6",
        equation,
        "mlp_pre" if linear is None else "mlp_pre mlp_pre_linear",
        Sides(gated, act, magnitude + act.abs(), 8),
    )


def _embedding(anatomy: Anatomy, get: Callable[..., Tensor | None]) -> Sides | None:
    """Where the stream starts as the token embedding times a constant and nothing else, the two must agree."""
    terms, first = anatomy.terms, get("resid_pre", 0)
    if isinstance(terms, Refusal) or len(terms) != 1:
        return None
    extra = terms[0].tap.steps[len(anatomy.embeddings.steps) :]
    value = get("embeddings")
    for step in extra:
        value = None if value is None else step.read(value)
    return _same(first, value)


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
    own, magnitude = _products(x, weight, bias)
    stated = get("lm_head")
    sides = None if stated is None else Sides(own, stated, magnitude, weight.shape[1])
    yield "W final_norm(resid_post.last) + b = lm_head", "final_norm lm_head", sides
    sides = Sides(head.logits(own), logits, magnitude * abs(head.scale), weight.shape[1])
    yield "lm_head(final_norm(resid_post.last)) = logits", "final_norm lm_head logits", sides


def _products(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """x W^T + b in float64, some rows of W at a time, and |x| |w| + |b| by Euclidean norms, a bound of the summands."""
    own = [x @ part.double().T for part in weight.split(16384)]
    magnitude = torch.linalg.vector_norm(x, dim=-1)[..., None] * torch.linalg.vector_norm(weight, dim=-1).double()
    offset = torch.zeros((), dtype=x.dtype) if bias is None else bias.double()
    return torch.cat(own, -1) + offset, magnitude + offset.abs()


def _sum(result: Tensor | None, *terms: Tensor | None) -> Sides | None:
    if result is None or any(term is None for term in terms):
        return None
    present = [term for term in terms if term is not None]
    total = torch.stack(present)
    return Sides(total.sum(0), result, total.abs().sum(0), len(present))


def _same(result: Tensor | None, value: Tensor | None, factor: float = 1.0) -> Sides | None:
    if result is None or value is None:
        return None
    return Sides(value * factor, result, value.abs() * abs(factor), 1)


def _affine(
    x: Tensor | None, weight: Tensor, bias: Tensor | None, y: Tensor | None, factor: float = 1.0
) -> Sides | None:
    if x is None or y is None:
        return None
    left, magnitude = _products(x, weight, bias)
    return Sides(left * factor, y, magnitude * abs(factor), weight.shape[1])


def _head_sum(shares: Tensor | None, whole: Sides | None, bias: Tensor | None) -> Sides | None:
    """The heads' shares against the output that `whole` computes at once: the same summands, so the same magnitude."""
    if shares is None or whole is None:
        return None
    offset = torch.zeros(()) if bias is None else bias.double()
    return Sides(shares.sum(-2) + offset, whole.right, whole.magnitude, whole.terms)


def _norm(
    norm: Norm, x: Tensor | None, normalized: Tensor | None, scale: Tensor | None, y: Tensor | None, factor: float = 1.0
) -> Sides | None:
    if x is None or normalized is None or scale is None or y is None:
        return None
    centre = x.mean(-1, keepdim=True) if norm.centred else torch.zeros(())
    summed = x.abs() + (x.abs().mean(-1, keepdim=True) if norm.centred else 0.0)
    gain, bias = norm.gain.double(), torch.zeros(()) if norm.bias is None else norm.bias.double()
    left = (torch.stack([(x - centre) / scale, normalized]) * gain + bias) * factor
    magnitude = (summed / scale * gain.abs() + bias.abs()) * abs(factor)
    return Sides(left, y.expand_as(left), magnitude.expand_as(left), 8)


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
