"""A model whose MLPs are replaced by transcoders, frozen on one prompt so that everything left is linear.

Frozen are the attention patterns, every norm's denominator, and what the activations of an adapter between groups of
blocks multiply by. Each MLP output becomes

    mlp_out = sum_f a_f W_dec,f + b_dec + W_skip mlp_in + error

with the active latents f, and with the error that makes the equation exact, so the logits are those of the model
(Dunefsky et al. 2024, arXiv:2406.11944; Ameisen et al., "Circuit Tracing", 2025). At positions whose token the
transcoders were not trained on no latent fires and the whole MLP output is the error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.dictionaries import Transcoder
from interp.engines.base import Capture, Request
from interp.engines.local import LocalEngine
from interp.errors import PointRefused, UserError
from interp.models.anatomy import Head, Refusal
from interp.models.frozen_bridge import FrozenBridge, frozen, not_linear
from interp.models.norms import Norm
from interp.models.start import start_terms
from interp.models.weights import BlockWeights, NormWeights, norm_weights
from interp.names import hooks
from interp.points import Address

LayerKey = TypeVar("LayerKey", bound=int | str | Address)

EXACT = ("float32", "float64")
"""Dtypes in which edges sum to what they explain."""


@dataclass(frozen=True, eq=False)
class LayerState:
    """One layer on one prompt."""

    probs: Float[Tensor, "heads pos pos"]
    attn_scale: Tensor | None
    """Denominators of the norms, [pos, 1]; None where there is no norm."""
    attn_post_scale: Tensor | None
    mlp_scale: Tensor | None
    mlp_post_scale: Tensor | None
    positions: Int[Tensor, " active"]
    """Position of each active latent; latents are ordered by position, then by activation, largest first."""
    latents: Int[Tensor, " active"]
    activations: Float[Tensor, " active"]
    pre_activations: Float[Tensor, " active"]
    error: Float[Tensor, "pos d_model"]
    trained: Tensor
    """[pos], whether the transcoder was trained on this position's token."""


@dataclass(frozen=True, eq=False)
class ReplacementState:
    """The frozen model on one prompt."""

    tokens: list[int]
    layers: tuple[LayerState, ...]
    terms: tuple[tuple[str, Tensor], ...]
    """Addends of the first residual stream: kind (`token`, `position`) and [pos, d_model]."""
    final_scale: Tensor | None
    """[pos, 1]"""
    bridges: Mapping[int, FrozenBridge]
    """The adapters between groups of blocks, by the layer before each."""
    lm_head: Float[Tensor, " d_vocab"]
    """The unembedding module's output at the last position."""
    logits: Float[Tensor, " d_vocab"]
    """The model's own, at the last position."""

    @property
    def n_active(self) -> int:
        return sum(len(layer.latents) for layer in self.layers)

    @property
    def excluded_positions(self) -> list[int]:
        """Positions at which no transcoder was trained."""
        return (~torch.stack([layer.trained for layer in self.layers]).any(0)).nonzero().flatten().tolist()


class ReplacementModel:
    """A loaded model and one transcoder per layer, `mlp_in` to raw `mlp_out`.

    `transcoders` are keyed by layer number, by the block's path (`layers_first.0`), by Address, by its text
    (`mlp_in.3`) or by the hook name (`layers_first.0.mlp_in`). Raises `UserError` for transcoders of another model, of
    other points or widths, or missing layers, and for a model in less than float32, whose own sums are too coarse to be
    explained; `PointRefused` where a block's value path is not linear once its attention pattern
    is frozen. The transcoders are moved to the model's device and dtype and put into evaluation mode.
    """

    def __init__(self, engine: LocalEngine, transcoders: Mapping[LayerKey, Transcoder]) -> None:
        self.engine = engine = engine.by_hooks()  # attention matrices lie inside modules
        n_layers = engine.model.n_layers
        if engine.model.dtype not in EXACT:
            raise UserError(
                f"{engine.model.name} runs in {engine.model.dtype}, too coarse for exact attribution; load it with "
                "dtype float32."
            )
        self._check_trunk()
        self.transcoders = {_layer(key, engine.model.blocks): transcoder for key, transcoder in transcoders.items()}
        if len(self.transcoders) < len(transcoders):
            raise UserError("Two keys name one layer; give each layer one transcoder.")
        missing = sorted(set(range(n_layers)) - set(self.transcoders))
        if missing:
            raise UserError(f"{engine.model.name} has {n_layers} layers; layer {missing[0]} has no transcoder.")
        beyond = sorted(set(self.transcoders) - set(range(n_layers)))
        if beyond:
            raise UserError(
                f"There is a transcoder for layer {beyond[0]}, but {engine.model.name} has {n_layers} layers."
            )
        for layer, transcoder in self.transcoders.items():
            self._check(layer, transcoder)
            transcoder.eval().requires_grad_(False)
            transcoder.to(device=engine.device, dtype=getattr(torch, engine.model.dtype))
        self.blocks = [self._weights(layer) for layer in range(n_layers)]

    def _check_trunk(self) -> None:
        anatomy = self.engine.anatomy
        if isinstance(anatomy.start, Refusal):
            raise PointRefused(f"{self.engine.model.name} has no linear start: {anatomy.start.reason}.")
        if anatomy.start.norm is not None:
            raise PointRefused(f"{self.engine.model.name} has no linear start: a norm stands behind its embeddings.")
        if any(term.via is not None for term in anatomy.start.terms):
            raise PointRefused(f"{self.engine.model.name} has no plain start: a projection widens its embeddings.")
        for layer, bridge in anatomy.bridges.items():
            if (why := not_linear(bridge)) is not None:
                raise PointRefused(
                    f"The adapter behind layer {layer} of {self.engine.model.name} is not linear: {why.reason}."
                )
        needed = [Address("embeddings"), Address("resid_pre", 0), Address("lm_head"), Address("logits")]
        needed += [Address("resid_post", layer) for layer in anatomy.bridges]
        if isinstance(anatomy.final_norm, Norm):
            needed.append(Address("final_norm_scale"))
        for address in needed:
            tap = anatomy.tap(address)
            if isinstance(tap, Refusal):
                raise PointRefused(
                    f"{self.engine.model.name} has no frozen linear form: {address} is not there: {tap.reason}."
                )

    def _check(self, layer: int, transcoder: Transcoder) -> None:
        config, model = transcoder.config, self.engine.model
        if config.model is not None and config.model.fingerprint and config.model.fingerprint != model.fingerprint:
            raise UserError(
                f"The transcoder of layer {layer} was trained on {config.model.id} (fingerprint "
                f"{config.model.fingerprint}), not on {model.name} ({model.fingerprint}); use this model's own."
            )
        width = model.width(layer)
        if (config.d_in, config.d_out) != (width, width):
            raise UserError(
                f"The transcoder of layer {layer} maps {config.d_in} to {config.d_out} channels, but {model.name} is "
                f"{width} wide there."
            )
        if config.input_points and (config.input_points, config.output_points) != (
            [f"mlp_in.{layer}"],
            [f"mlp_out.{layer}"],
        ):
            raise UserError(
                f"The transcoder of layer {layer} maps {', '.join(config.input_points)} to "
                f"{', '.join(config.output_points)}; the replacement model needs mlp_in.{layer} to mlp_out.{layer}."
            )

    def _weights(self, layer: int) -> BlockWeights:
        weights = self.engine.weights(layer)
        if isinstance(weights, Refusal):
            raise PointRefused(
                f"Layer {layer} of {self.engine.model.name} has no frozen linear form: {weights.reason}."
            )
        return weights

    @property
    def head(self) -> Head:
        """The unembedding; raises `PointRefused` where the logits are not a linear map of the final norm's output."""
        head = self.engine.anatomy.head
        if isinstance(head, Refusal):
            raise PointRefused(f"{self.engine.model.name} has no linear head: {head.reason}.")
        if head.before:
            raise PointRefused(
                f"{self.engine.model.name} has no plain head: more than the final norm stands before its unembedding."
            )
        return head

    @property
    def final_norm(self) -> NormWeights | None:
        norm = self.engine.anatomy.final_norm
        return norm_weights(norm) if isinstance(norm, Norm) else None

    def build(self, input_ids: Int[Tensor, "..."] | list[int]) -> ReplacementState:
        """Run the model once on one prompt ([pos] or [1, pos]) and freeze what the linear model needs."""
        tokens = torch.as_tensor(input_ids).flatten().tolist()
        (result,) = self.engine.run([Request(tokens, capture=self._points())])
        captured, start = result.capture, self.engine.anatomy.start
        assert not isinstance(start, Refusal)
        with torch.no_grad():
            return ReplacementState(
                tokens=tokens,
                layers=tuple(self._layer_state(layer, tokens, captured) for layer in range(len(self.blocks))),
                terms=start_terms(start, captured["embeddings"], captured["resid_pre.0"]),
                final_scale=captured["final_norm_scale"] if self.final_norm is not None else None,
                bridges={
                    layer: frozen(bridge, captured[Address("resid_post", layer)])
                    for layer, bridge in self.engine.anatomy.bridges.items()
                },
                lm_head=captured["lm_head"][-1],
                logits=captured["logits"][-1],
            )

    def _points(self) -> list[Address]:
        names = [
            "attn_probs",
            "mlp_in",
            "mlp_out",
            "attn_norm_scale",
            "attn_post_norm_scale",
            "mlp_norm_scale",
            "mlp_post_norm_scale",
        ]
        wanted = [Address(name, layer) for layer in range(len(self.blocks)) for name in names]
        wanted += [Address("resid_pre", 0), *(Address("resid_post", layer) for layer in self.engine.anatomy.bridges)]
        wanted += [Address(name) for name in ("embeddings", "final_norm_scale", "lm_head", "logits")]
        return [address for address in wanted if not isinstance(self.engine.anatomy.tap(address), Refusal)]

    def _layer_state(self, layer: int, tokens: list[int], captured: Capture) -> LayerState:
        def get(name: str) -> Tensor | None:
            address = Address(name, layer)
            return captured.get(address)

        transcoder = self.transcoders[layer]
        excluded = set(transcoder.config.excluded_token_ids)
        mlp_in, mlp_out = captured[Address("mlp_in", layer)], captured[Address("mlp_out", layer)]
        trained = torch.tensor([t not in excluded for t in tokens], device=mlp_in.device)
        pre = transcoder.pre_activation(mlp_in)
        values, latents = transcoder.activation.sparse(pre)
        values = values * trained[:, None]
        row, column = (values > 0).nonzero(as_tuple=True)
        predicted = transcoder.decode_sparse(values, latents, mlp_in)
        return LayerState(
            probs=captured[Address("attn_probs", layer)],
            attn_scale=get("attn_norm_scale"),
            attn_post_scale=get("attn_post_norm_scale"),
            mlp_scale=get("mlp_norm_scale"),
            mlp_post_scale=get("mlp_post_norm_scale"),
            positions=row,
            latents=latents[row, column],
            activations=values[row, column],
            pre_activations=pre[row, latents[row, column]],
            error=mlp_out - predicted * trained[:, None],
            trained=trained,
        )


def _layer(key: int | str | Address, blocks: Sequence[str]) -> int:
    if isinstance(key, int):
        return key
    if key in blocks:
        return blocks.index(str(key))
    address = hooks.address(key, blocks)
    if address.name != "mlp_in" or address.layer is None:
        raise UserError(f"Transcoders are keyed by their input: {address} is no mlp_in.")
    return address.layer
