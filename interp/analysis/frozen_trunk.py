"""The way from every contribution to a logit before its cap, once the norms' denominators of one run are held fixed.

Everything that happens to the stream is then linear: it is added to, multiplied by constants, normed with a fixed
denominator, mapped by the head. The gradient of the logit is carried from the head down through the blocks; what is
added to the stream on the way contributes its dot product with the gradient there, and what a norm or a linear map adds
by itself is a bias.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from interp.engines.base import refused
from interp.engines.local import LocalEngine
from interp.errors import PointRefused, UserError
from interp.models.anatomy import Add, Block, Head, Linear, Mixer, Refusal, Renorm, Sublayer, Weigh
from interp.models.frozen_bridge import frozen, not_linear
from interp.models.norms import Norm
from interp.models.start import start_terms
from interp.models.transforms import Scale
from interp.models.weights import NormWeights, norm_weights
from interp.points import Address

Values = Mapping[Address, Tensor]
"""What was captured, at one position, in float64 on the CPU."""


class Contribution(NamedTuple):
    """One addend of a logit."""

    source: str
    """An address (`mlp_out_post.3`, `head_out.3.head-2`), or an embedding or a bias in words."""
    value: float
    layer: int | None = None
    head: int | None = None


class FrozenTrunk:
    """A model's stream and head as linear maps; `points` is what a run must capture.

    With `heads`, attention is split into heads where they are addends; `unsplit` says why in the other layers.
    Raises `PointRefused` where the stream or the head is not linear with its denominators fixed.
    """

    def __init__(self, model: LocalEngine, heads: bool) -> None:
        self.model, self.anatomy = model, model.anatomy
        self.head = self._linear_head()
        if model.model.n_streams > 1:
            raise PointRefused(
                f"{model.model.name} carries {model.model.n_streams} streams, which each layer mixes anew: what one "
                "contribution adds to a logit is not defined by the last norm alone."
            )
        self.unsplit: dict[int, str] = {}
        self.points = [Address("resid_pre", 0), Address("lm_head"), Address("logits")]
        if isinstance(self.anatomy.final_norm, Norm):
            self.points.append(Address("final_norm_scale"))
        if self._has_positions:
            self.points.append(Address("embeddings"))
        for layer, bridge in self.anatomy.bridges.items():
            if (why := not_linear(bridge)) is not None:
                raise PointRefused(
                    f"The adapter behind layer {layer} of {model.model.name} is not linear: {why.reason}."
                )
            self.points += [Address("resid_post", layer), Address("resid_pre", layer + 1)]
        for layer, block in enumerate(self.anatomy.blocks):
            self.points += [Address(name, layer) for name in self._added(layer, block)]
            if heads and (reason := self._not_addends(layer, block)):
                self.unsplit[layer] = reason
            elif heads:
                post = isinstance(block.attn, Sublayer) and block.attn.post_norm is not None
                self.points += [Address(name, layer) for name in ("z", *(["attn_post_norm_scale"] if post else []))]

    def rows(self, choose: Callable[[Tensor], Tensor], values: Values) -> list[Contribution]:
        """Every addend of `choose(z)`, in the order in which they are written; z = [d_vocab] before the cap.

        `choose` picks a logit, or the difference of two, from what has the vocabulary as its first axis.
        """
        found, g = self._head(choose, values)
        scales = self._denominators(values)
        for layer, block in reversed(list(enumerate(self.anatomy.blocks))):
            if (bridge := self.anatomy.bridges.get(layer)) is not None:
                g, bias = frozen(bridge, values[Address("resid_post", layer)]).adjoint(g)
                found += [Contribution(f"adapter's biases behind layer {layer}", float(bias))] if bias else []
            for number, step in reversed(list(enumerate(block.steps))):
                if isinstance(step, Weigh):
                    g = g * (wide(step.factor) if isinstance(step.factor, Tensor) else step.factor)
                elif isinstance(step, Renorm):
                    norm = _weights(step.norm)
                    found += _bias(f"norm bias in layer {layer}", g, norm.bias, layer)
                    g = norm.adjoint(g, scales[layer, number])
                elif isinstance(step, Add):
                    for name in reversed(step.points):
                        found += self._contribution(name, layer, g, values)
        return [*self._start(g, values), *reversed(found)]

    def _head(self, choose: Callable[[Tensor], Tensor], values: Values) -> tuple[list[Contribution], Tensor]:
        """The biases between the last block and the logit, last first, and the gradient at the last stream."""
        linear, k = self.head.linear, self.head.scale
        g = wide(choose(linear.weight)) * k
        bias = None if linear.bias is None else wide(choose(linear.bias)) * k
        found = [] if bias is None else [Contribution("unembedding bias", float(bias))]
        for step in reversed(self.head.before):
            if isinstance(step, Linear):
                found += _bias("bias before the unembedding", g, step.bias)
                g = g @ wide(step.weight)
            elif isinstance(step, Scale):
                g = g * step.factor
        if isinstance(self.anatomy.final_norm, Norm):
            norm = _weights(self.anatomy.final_norm)
            found += _bias("final norm bias", g, norm.bias)
            g = norm.adjoint(g, values[Address("final_norm_scale")])
        return found, g

    def _contribution(self, name: str, layer: int, g: Tensor, values: Values) -> Iterator[Contribution]:
        """One addition to the stream, or its heads and biases, last first."""
        attn, mixer = self.anatomy.blocks[layer].attn, self.anatomy.blocks[layer].mixer
        if name != "attn_out_post" or Address("z", layer) not in values:
            yield Contribution(f"{name}.{layer}", float(g @ values[Address(name, layer)]), layer)
            return
        assert isinstance(attn, Sublayer) and isinstance(mixer, Mixer) and isinstance(mixer.output, Linear)
        g = g * attn.multiplier
        if attn.post_norm is not None:
            post = _weights(attn.post_norm)
            yield from _bias(f"attention's post-norm bias in layer {layer}", g, post.bias, layer)
            g = post.adjoint(g, values[Address("attn_post_norm_scale", layer)])
        yield from _bias(f"attention's output bias in layer {layer}", g, mixer.output.bias, layer)
        shares = (values[Address("z", layer)] * (g @ wide(mixer.output.weight)).view(mixer.n_heads, mixer.d_head)).sum(
            -1
        )
        for head, value in reversed(list(enumerate(shares.tolist()))):
            yield Contribution(f"head_out.{layer}.head-{head}", value, layer, head)

    def _start(self, g: Tensor, values: Values) -> list[Contribution]:
        first, start = values[Address("resid_pre", 0)], self.anatomy.start
        if isinstance(start, Refusal) or start.norm is not None:
            return [Contribution("resid_pre.0", float(g @ first))]
        terms = start_terms(start, values.get(Address("embeddings"), first), first)
        return [Contribution(f"{kind} embedding", float(g @ value)) for kind, value in terms]

    def _denominators(self, values: Values) -> dict[tuple[int, int], Tensor]:
        """Of the norms that the stream itself goes through inside blocks, by layer and step: those of this run."""
        found: dict[tuple[int, int], Tensor] = {}
        x = values[Address("resid_pre", 0)]
        for layer, block in enumerate(self.anatomy.blocks):
            x = values[Address("resid_pre", layer)] if layer - 1 in self.anatomy.bridges else x
            for number, step in enumerate(block.steps):
                if isinstance(step, Add):
                    x = x + sum(values[Address(name, layer)] for name in step.points)
                elif isinstance(step, Weigh):
                    x = x * (wide(step.factor) if isinstance(step.factor, Tensor) else step.factor)
                elif isinstance(step, Renorm):
                    norm, found[layer, number] = _weights(step.norm), step.norm.scale(x)
                    x = norm.forward(x, found[layer, number]) + (0.0 if norm.bias is None else norm.bias)
        return found

    @property
    def _has_positions(self) -> bool:
        start = self.anatomy.start
        if isinstance(start, Refusal) or start.norm is not None:
            return False
        return any(term.kind == "position" for term in start.terms)

    def _linear_head(self) -> Head:
        head, name = self.anatomy.head, self.model.model.name
        if isinstance(head, Refusal):
            raise refused(Address("logits"), head)
        if not all(isinstance(step, (Linear, Scale)) for step in head.before):
            raise PointRefused(
                f"{name} has a network between its final norm and its unembedding: its head is not linear."
            )
        if head.linear.weight.is_meta:
            raise UserError(f"The unembedding of {name} is offloaded; load the model with its head in memory.")
        return head

    def _added(self, layer: int, block: Block) -> list[str]:
        """The points that the block adds to the stream."""
        adds = [step for step in block.steps if isinstance(step, Add)]
        if not block.steps or not all(step.points for step in adds):
            reason = f": {block.attn.reason}" if isinstance(block.attn, Refusal) else ""
            raise PointRefused(
                f"Layer {layer} of {self.model.model.name} changes the stream in a way that no point names{reason}."
            )
        return [name for step in adds for name in step.points]

    def _not_addends(self, layer: int, block: Block) -> str:
        """Why the layer's heads are no addends of its contribution; empty where they are."""
        support = self.model.support(Address("head_out", layer))
        if not support.readable:
            return support.reason
        assert isinstance(block.attn, Sublayer)
        if block.attn.post_norm is not None:
            support = self.model.support(Address("attn_post_norm_scale", layer))
        return support.reason if not support.readable else ""


def wide(x: Tensor) -> Tensor:
    """On the CPU, in float64: sums that explain a logit add no rounding of their own."""
    return x.detach().to("cpu", torch.float64)


def _weights(norm: Norm) -> NormWeights:
    return norm_weights(norm, like=torch.empty(0, dtype=torch.float64))


def _bias(source: str, g: Tensor, bias: Tensor | None, layer: int | None = None) -> list[Contribution]:
    return [] if bias is None else [Contribution(source, float(g @ wide(bias)), layer)]
