"""The equations of one block, each as two sides with numbers in them: P1 and P3 on the stream, P5, P6 and P8 inside."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from interp.models.anatomy import Add, Block, Mixer, Neurons, Projection, Refusal, Remix, Sublayer, Weigh
from interp.models.linear import Linear
from interp.models.norms import Norm

Equation = tuple[str, str, str, "Sides | None"]
"""Proof, equation, points vouched for, sides."""


class Sides(NamedTuple):
    """An equation with numbers in it."""

    left: Tensor
    right: Tensor
    magnitude: Tensor
    terms: int
    """How many rounded terms make up one entry."""
    fitted: bool = False
    """Whether the left side was made with something of the right one."""


def block_equations(block: Block, at: Callable[[str], Tensor | None]) -> Iterator[Equation]:
    """Every equation of a block; `at(point)` gives the point's captured value at this layer, or None."""
    yield from _stream_equations(block, at)
    for name, sublayer in (("attn", block.attn), ("mlp", block.mlp)):
        if isinstance(sublayer, Sublayer):
            yield from _sublayer_equations(name, block, sublayer, at)
    if isinstance(block.mixer, Mixer):
        yield from _attention_equations(block.mixer, at)
    if isinstance(block.neurons, Neurons):
        yield from _mlp_equations(block.neurons, at)


def _stream_equations(block: Block, at: Callable[[str], Tensor | None]) -> Iterator[Equation]:
    """P1, in the form that the family declares: its factors, its norms on the stream, its further terms."""
    n = len(block.steps)
    spans = [("resid_pre", "resid_mid", 0, block.steps_to_mid), ("resid_mid", "resid_post", block.steps_to_mid, n)]
    for start, end, first, last in spans if block.steps_to_mid else [("resid_pre", "resid_post", 0, n)]:
        points, text = _added(block, first, last), _in_words(block, start, first, last)
        walked = _walk(block, at, start, first, last)
        sides = None if walked is None or (result := at(end)) is None else walked._replace(right=result)
        ends = (end, "resid_streams") if end == "resid_post" and at("resid_streams") is not None else (end,)
        yield "P1", f"{text} = {end}", " ".join((*points, *ends)), sides


def _walk(block: Block, at: Callable[[str], Tensor | None], start: str, first: int, last: int) -> Sides | None:
    """The stream after steps `first` to `last` from the point `start`; `right` holds the same tensor."""
    total = at(start)
    if total is None or not block.steps:
        return None
    magnitude, terms = total.abs(), 1
    for step in block.steps[first:last]:
        if isinstance(step, Add):
            for point in step.points:
                added, write = at(point), None if step.write is None else at(step.write)
                if added is None or (step.write is not None and write is None):
                    return None
                if write is not None:
                    added = write[..., :, None] * added[..., None, :]
                total, magnitude, terms = total + added, magnitude + added.abs(), terms + 1
        elif isinstance(step, Remix):
            mix = at(step.point)
            if mix is None:
                return None
            total = torch.einsum("pjk,pjd->pkd", mix, total)
            magnitude, terms = torch.einsum("pjk,pjd->pkd", mix.abs(), magnitude), terms + mix.shape[-1]
        elif isinstance(step, Weigh):
            factor = step.factor.double() if isinstance(step.factor, Tensor) else step.factor
            total, magnitude = total * factor, magnitude * abs(factor)
        else:
            total, magnitude = through(step.norm, total, magnitude)
            terms += 8
    return Sides(total, total, magnitude, terms)


def _added(block: Block, first: int, last: int) -> tuple[str, ...]:
    points: list[str] = []
    for step in block.steps[first:last]:
        if isinstance(step, Add):
            points += [*step.points, *([step.write] if step.write else [])]
        elif isinstance(step, Remix):
            points.append(step.point)
    return tuple(points)


def _in_words(block: Block, start: str, first: int, last: int) -> str:
    text = start
    for step in block.steps[first:last]:
        if isinstance(step, Add):
            text = " + ".join((text, *(f"{step.write} ⊗ {p}" if step.write else p for p in step.points)))
        elif isinstance(step, Remix):
            text = f"{step.point}ᵀ {text}"
        else:
            factor = "w" if isinstance(step, Weigh) and isinstance(step.factor, Tensor) else None
            text = f"{factor or f'{step.factor:g}'} · ({text})" if isinstance(step, Weigh) else f"norm({text})"
    return text


def _sublayer_equations(
    name: str, block: Block, sublayer: Sublayer, at: Callable[[str], Tensor | None]
) -> Iterator[Equation]:
    raw, contribution = at(f"{name}_out"), at(f"{name}_out_post")
    points = f"{name}_out {name}_out_post"
    if sublayer.post_norm is None:
        yield "P3", f"multiplier · {name}_out = {name}_out_post", points, same(contribution, raw, sublayer.multiplier)
    else:
        normalized, scale = at(f"{name}_post_normalized"), at(f"{name}_post_norm_scale")
        sides = normed(sublayer.post_norm, raw, normalized, scale, contribution, sublayer.multiplier)
        equation = f"post_norm({name}_out) · multiplier = {name}_out_post"
        yield "P3", equation, f"{points} {name}_post_normalized {name}_post_norm_scale", sides
    after_mid = bool(block.steps_to_mid) and sublayer.reads >= block.steps_to_mid
    start, first = ("resid_mid", block.steps_to_mid) if after_mid else ("resid_pre", 0)
    read = _walk(block, at, start, first, sublayer.reads)
    stream = None if read is None else read.left
    if sublayer.stack is not None:
        yield from _stack_equations(name, stream, at)
        stream = at(f"{name}_stream_collapse")
    if sublayer.unknown:
        return
    if sublayer.pre_norm is None:
        yield "P8", f"{name}_in is the stream", f"{name}_in", same(at(f"{name}_in"), stream)
    else:
        normalized, scale = at(f"{name}_normalized"), at(f"{name}_norm_scale")
        sides = normed(sublayer.pre_norm, stream, normalized, scale, at(f"{name}_in"))
        equation = f"{name}_normalized · gain + bias = {name}_in"
        yield "P8", equation, f"{name}_in {name}_normalized {name}_norm_scale", sides


def _stack_equations(name: str, streams: Tensor | None, at: Callable[[str], Tensor | None]) -> Iterator[Equation]:
    """The vector that a sublayer reads lies in the span of the streams: the weights are solved for, token by token."""
    collapse = at(f"{name}_stream_collapse")
    if streams is None or collapse is None:
        return
    columns, goal = streams.transpose(-1, -2).cpu(), collapse.unsqueeze(-1).cpu()
    weights = torch.linalg.lstsq(columns, goal, driver="gelsd").solution
    weights += torch.linalg.lstsq(columns, goal - columns @ weights, driver="gelsd").solution  # refined once
    magnitude = columns.abs() @ weights.abs().clamp(min=1.0)
    sides = Sides(columns @ weights, goal, magnitude, 2 * streams.shape[-2], fitted=True)
    point = f"{name}_stream_collapse"
    yield "P1", f"sum of w_j stream_j = {point}, w solved for", point, sides


def _attention_equations(mixer: Mixer, at: Callable[[str], Tensor | None]) -> Iterator[Equation]:
    z, value, probs, scores, out = at("z"), at("value"), at("attn_probs"), at("attn_scores"), at("attn_out")
    if z is not None and not isinstance(mixer.output, Refusal):
        sides = _affine(z.flatten(-2), mixer.output, out)
        yield "P5", "o_proj(z) = attn_out", "z attn_out", sides
        sides = _head_sum(at("head_out"), sides, mixer.output.bias)
        yield "P5", "sum of head_out + bias = attn_out", "head_out", sides
    for name, projection in (("query", mixer.query), ("key", mixer.key), ("value", mixer.value)):
        if isinstance(projection, Projection) and projection.of_input:
            held = at(name)
            held = None if held is None else held.flatten(-2)
            sides = _affine(at("attn_in"), projection, held)
            equation = f"W attn_in + b = {name}"
            if sides is not None and projection.clip is not None:
                sides = sides._replace(left=projection.clip.read(sides.left))
                equation = f"clip(W attn_in + b) = {name}"
            if sides is not None and projection.norm is not None:
                sides = _normed_heads(projection.norm, sides, projection.index.shape)
                equation = f"norm(W attn_in + b) = {name}"
            yield "P5", equation, f"attn_in {name}", sides
    equation = "scaling · query_rot key_rot = attn_scores less what depends on head and key alone"
    equation = equation if mixer.biased else "cap(scaling · query_rot key_rot) = attn_scores"
    yield "P5", equation, "query_rot key_rot attn_scores", _scores(mixer, at)
    yield from _mixing(mixer, z, value, probs, at("attn_gate"))
    if probs is not None and not mixer.sink:
        total = probs.sum(-1)
        yield (
            "P5",
            "rows of attn_probs sum to 1",
            "attn_probs",
            Sides(torch.ones_like(total), total, torch.ones_like(total), probs.shape[-1]),
        )
    if probs is not None and scores is not None:
        soft = scores.softmax(-1) * (probs.sum(-1, keepdim=True) if mixer.sink else 1.0)
        spread = 1 + scores.abs().masked_fill(soft == 0, 0).amax(-1, keepdim=True)
        yield (
            "P5",
            "softmax(attn_scores) less the sink's share = attn_probs"
            if mixer.sink
            else "softmax(attn_scores) = attn_probs",
            "attn_scores attn_probs",
            Sides(soft, probs, spread.expand_as(soft), probs.shape[-1], fitted=mixer.sink),
        )
    yield from _head_norm_equations(mixer, at)


def _normed_heads(norm: Norm, sides: Sides, heads: torch.Size) -> Sides:
    """A projection's sides with its heads normed, whatever else it has rounded: [pos, heads · d_head]."""
    left, magnitude = sides.left.unflatten(-1, heads), sides.magnitude.unflatten(-1, heads)
    left, magnitude = through(norm, left, magnitude)
    return Sides(left.flatten(-2), sides.right, magnitude.flatten(-2), sides.terms + 8)


def _mixing(
    mixer: Mixer, z: Tensor | None, value: Tensor | None, probs: Tensor | None, gate: Tensor | None
) -> Iterator[Equation]:
    """The values that are mixed, times the gate's function where there is a gate."""
    if z is None or value is None or probs is None:
        return
    each = value.repeat_interleave(mixer.n_heads // mixer.n_kv_heads, dim=1)
    mixed = torch.einsum("hqk,khd->qhd", probs, each)
    magnitude = torch.einsum("hqk,khd->qhd", probs, each.abs())
    if isinstance(mixer.gate, Refusal):
        yield "P5", "attn_probs @ value = z", "attn_probs value z", Sides(mixed, z, magnitude, probs.shape[-1])
    elif gate is not None and mixer.gate_activation is not None:
        with torch.no_grad():
            opened = mixer.gate_activation(gate)
        sides = Sides(mixed * opened, z, magnitude * opened.abs() + z.abs(), probs.shape[-1] + 8)
        yield "P5", "(attn_probs @ value) · act(attn_gate) = z", "attn_probs value attn_gate z", sides


def _scores(mixer: Mixer, at: Callable[[str], Tensor | None]) -> Sides | None:
    """Scores where nothing is masked: those that the softmax did not send to zero."""
    query, key, scores, probs = at("query_rot"), at("key_rot"), at("attn_scores"), at("attn_probs")
    if query is None or key is None or scores is None or probs is None or mixer.scaling is None:
        return None
    each = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    product = torch.einsum("qhd,khd->hqk", query, each) * mixer.scaling
    magnitude = torch.einsum("qhd,khd->hqk", query.abs(), each.abs()) * abs(mixer.scaling)
    if mixer.softcap is not None:
        product = (product / mixer.softcap).tanh() * mixer.softcap
    seen = probs > 0
    if mixer.biased:
        gap, most = scores - product, (magnitude + scores.abs()).masked_fill(~seen, 0).amax(1)
        highest, lowest = gap.masked_fill(~seen, -torch.inf).amax(1), gap.masked_fill(~seen, torch.inf).amin(1)
        any_sees = seen.any(1)
        return Sides(highest[any_sees], lowest[any_sees], most[any_sees], query.shape[-1], fitted=True)
    return Sides(product[seen], scores[seen], magnitude[seen], query.shape[-1])


def _head_norm_equations(mixer: Mixer, at: Callable[[str], Tensor | None]) -> Iterator[Equation]:
    for which, norm in (("q", mixer.q_norm), ("k", mixer.k_norm)):
        before, after = at(f"{which}_norm_in"), at(f"{which}_norm_out")
        if isinstance(norm, Norm) and before is not None and after is not None:
            if norm.gain.ndim and norm.gain.shape[-1] != before.shape[-1]:
                before, after = before.flatten(-2), after.flatten(-2)
            normalized = norm.normalized(before)
            sides = normed(norm, before, normalized, norm.scale(before), after)
            yield "P8", f"norm({which}_norm_in) = {which}_norm_out", f"{which}_norm_in {which}_norm_out", sides


def _mlp_equations(neurons: Neurons, at: Callable[[str], Tensor | None]) -> Iterator[Equation]:
    act, pre, linear, out = at("mlp_act"), at("mlp_pre"), at("mlp_pre_linear"), at("mlp_out")
    if act is None:
        return
    sides = _affine(act, neurons.down, out, neurons.multiplier)
    yield "P6", "multiplier · down_proj(mlp_act) = mlp_out", "mlp_act mlp_out", sides
    if pre is None:
        return
    projection = neurons.projection
    if projection is not None and projection.of_input:
        sides = _affine(at("mlp_in"), projection, pre)
        yield "P6", "W mlp_in + b = mlp_pre", "mlp_in mlp_pre", sides
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


def same(result: Tensor | None, value: Tensor | None, factor: float = 1.0) -> Sides | None:
    if result is None or value is None:
        return None
    return Sides(value * factor, result, value.abs() * abs(factor), 1)


def _affine(x: Tensor | None, linear: Linear | Projection, y: Tensor | None, factor: float = 1.0) -> Sides | None:
    if x is None or y is None:
        return None
    left, magnitude = linear.sums(x)
    return Sides(left * factor, y, magnitude * abs(factor), x.shape[-1])


def _head_sum(shares: Tensor | None, whole: Sides | None, bias: Tensor | None) -> Sides | None:
    """The heads' shares against the output that `whole` computes at once: the same summands, so the same magnitude."""
    if shares is None or whole is None:
        return None
    offset = torch.zeros(()) if bias is None else bias.double()
    return Sides(shares.sum(-2) + offset, whole.right, whole.magnitude, whole.terms)


def through(norm: Norm, x: Tensor, magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """norm(x) in float64, and the magnitude of what it sums, from that of what made up `x`."""
    gain, bias = norm.gain.double(), torch.zeros(()) if norm.bias is None else norm.bias.double()
    magnitude = (magnitude + magnitude.mean(-1, keepdim=True)) / norm.scale(x) * gain.abs() + bias.abs()
    return norm.normalized(x) * gain + bias, magnitude


def normed(
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
