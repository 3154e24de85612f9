"""Direct effects once more, by autograd through the real module with everything nonlinear held at recorded values.

Nothing of the package is used but its float64 lift: modules are found by a hand-written table, a norm is frozen as the
elementwise quotient of what it returned and received, attention multiplies recorded probabilities with the live
values, an MLP returns latents · W_dec + b_dec + W_skip x + error, a ReLU between two lists of layers is its mask. Every
source is a leaf that autograd sees; an edge is gradient times value. Frozen at the recorded values the model is affine,
so the sources can be changed at will.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

from interp.circuits.graph import NodeKind, Nodes
from interp.dictionaries import Transcoder
from interp.models.float64 import true_float64

ATTENTION = "frozen_oracle"


@dataclass(frozen=True)
class Layout:
    """Where a family keeps its modules, and how it treats the unembedding's output."""

    layers: tuple[str, ...] = ("model.layers",)
    """Lists in the order in which they run."""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    final_norm: str = "model.norm"
    embedding: str = "model.embed_tokens"
    head: str = "lm_head"
    positions: str | None = None
    centred: bool = False
    logit_scale: float = 1.0
    adapter: str | None = None
    """Between two lists of layers; its biases count as the last early layer's."""


_FOUR = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_NEOX = Layout(
    ("gpt_neox.layers",),
    final_norm="gpt_neox.final_layer_norm",
    embedding="gpt_neox.embed_in",
    centred=True,
)
_SPLIT = Layout(("layers_first", "layers_last"), final_norm="norm", embedding="embed_tokens", adapter="adapter")
LAYOUTS = {
    "llama": Layout(),
    "qwen2": Layout(),
    "qwen3": Layout(),
    "gemma": Layout(),
    "gemma2": Layout(norms=_FOUR),
    "gemma3": Layout(norms=_FOUR),
    "olmo2": Layout(norms=("post_attention_layernorm", "post_feedforward_layernorm")),
    "glm4": Layout(
        norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    ),
    "granite": Layout(logit_scale=1 / 8.0),
    "cohere": Layout(norms=("input_layernorm",), centred=True, logit_scale=0.0625),
    "phi": Layout(norms=("input_layernorm",), final_norm="model.final_layernorm", centred=True),
    "stablelm": Layout(centred=True),
    "gpt2": Layout(
        ("transformer.h",),
        ("ln_1", "ln_2"),
        "transformer.ln_f",
        "transformer.wte",
        positions="transformer.wpe",
        centred=True,
    ),
    "gpt_neox_parallel": _NEOX,
    "gpt_neox_sequential": _NEOX,
    "split_llama": _SPLIT,
    "split_llama_mlp": _SPLIT,
}


@dataclass
class Sources:
    """One tensor per kind of source. Values: [pos, d_model], features [pos, n_latents]; as factors: [pos], [pos, n]."""

    features: list[Tensor]
    errors: list[Tensor]
    tokens: Tensor
    positions: Tensor | None
    biases: dict[tuple[int, str], Tensor]
    """(layer, module path) → [pos, width]"""

    def leaves(self) -> list[Tensor]:
        positions = [] if self.positions is None else [self.positions]
        return [*self.features, *self.errors, self.tokens, *positions, *self.biases.values()]


class FrozenModel:
    """`model` with `transcoders` in place of its MLPs, frozen on `tokens`. Latents are found by brute force."""

    def __init__(self, model: nn.Module, family: str, transcoders: Mapping[int, Transcoder], tokens: list[int]) -> None:
        self.model, self.layout, self.transcoders, self.tokens = model, LAYOUTS[family], transcoders, tokens
        self.lists: list[list[Any]] = [list(self._module(path)) for path in self.layout.layers]  # type: ignore[call-overload]
        self.blocks = [block for blocks in self.lists for block in blocks]
        self.block_norms = [[getattr(block, name) for name in self.layout.norms] for block in self.blocks]
        self.gain: dict[nn.Module, Tensor] = {}
        self.mask: dict[nn.Module, Tensor] = {}
        self.probs: dict[nn.Module, Tensor] = {}
        self.mlp_in: list[Tensor] = []
        self.mlp_out: list[Tensor] = []
        self.values: Sources | None = None
        self._seen: dict[str, Tensor] = {}
        with self._attached(None), true_float64(), torch.no_grad():
            self.model(input_ids=torch.tensor([tokens]), use_cache=False)
        self.values = self._record()
        self.live: Sources | None = None

    def run(self, factors: Sources | None = None, grad: bool = False) -> None:
        """One pass through the frozen model, the sources multiplied by `factors`; then ask `logit` and `feature`."""
        assert self.values is not None
        values = self.values

        def leaf(value: Tensor, factor: Tensor | None) -> Tensor:
            value = value if factor is None else value * (factor if factor.ndim == value.ndim else factor[:, None])
            return value.detach().clone().requires_grad_(grad)

        def each(name: str) -> list[Tensor]:
            scales = getattr(factors, name) if factors is not None else [None] * len(self.blocks)
            return [leaf(v, s) for v, s in zip(getattr(values, name), scales, strict=True)]

        self.live = Sources(
            each("features"),
            each("errors"),
            leaf(values.tokens, None if factors is None else factors.tokens),
            None
            if values.positions is None
            else leaf(values.positions, None if factors is None else factors.positions),
            {key: leaf(value, None) for key, value in values.biases.items()},
        )
        self.mlp_in, self.mlp_out = [], []
        with self._attached(self.live), true_float64(), torch.set_grad_enabled(grad):
            self.model(input_ids=torch.tensor([self.tokens]), use_cache=False)

    def logit(self, token: int) -> Tensor:
        """The number before any softcap, less its mean over the vocabulary, at the last position of the last run."""
        last = self._seen["head"][0, -1]
        return (last[token] - last.mean()) * self.layout.logit_scale

    def feature(self, layer: int, pos: int, latent: int) -> Tensor:
        """A latent's pre-activation in the last run."""
        transcoder = self.transcoders[layer]
        return self.mlp_in[layer][pos] @ transcoder.W_enc[latent] + transcoder.b_enc[latent]

    def trained(self, layer: int) -> Tensor:
        excluded = self.transcoders[layer].config.excluded_token_ids
        return torch.tensor([float(t not in excluded) for t in self.tokens], dtype=torch.float64)[:, None]

    def row(self, target: Tensor, nodes: Nodes, own: tuple[int, int, int] | None = None) -> np.ndarray:
        """Gradient times value of `target` for every node of the table; `own` is the feature whose row it is.

        Logits, which are nobody's source, read 1.
        """
        assert self.live is not None
        leaves = self.live.leaves()
        grads = torch.autograd.grad(target, leaves, retain_graph=True, allow_unused=True)
        effect = {
            id(leaf): torch.zeros_like(leaf) if g is None else g * leaf.detach()
            for leaf, g in zip(leaves, grads, strict=True)
        }

        def at(leaf: Tensor) -> Tensor:
            return effect[id(leaf)].sum(-1)

        bias = torch.zeros(len(self.blocks), len(self.tokens), dtype=torch.float64)
        for (layer, _), leaf in self.live.biases.items():
            bias[layer] += at(leaf)
        if own is not None:
            layer, pos, latent = own
            bias[layer, pos] += self.transcoders[layer].b_enc[latent].detach()
        found = Sources(
            [effect[id(leaf)] for leaf in self.live.features],
            [at(leaf) for leaf in self.live.errors],
            at(self.live.tokens),
            None if self.live.positions is None else at(self.live.positions),
            {},
        )
        return by_node(nodes, found, bias)

    def target(self, nodes: Nodes, row: int) -> Tensor:
        """The value of a logit or feature node in the last run."""
        layer, pos, index = int(nodes.layer[row]), int(nodes.pos[row]), int(nodes.index[row])
        return self.logit(index) if nodes.kind[row] == NodeKind.LOGIT else self.feature(layer, pos, index)

    def _module(self, path: str) -> nn.Module:
        return self.model.get_submodule(path)

    def _record(self) -> Sources:
        features, errors = [], []
        for layer in range(len(self.blocks)):
            transcoder, trained, x = self.transcoders[layer], self.trained(layer), self.mlp_in[layer]
            pre = x @ transcoder.W_enc.T + transcoder.b_enc
            k = transcoder.config.activation.k
            assert k is not None
            kept = pre >= pre.sort(-1, descending=True).values[:, k - 1 : k]
            latents = (pre * kept * (pre > 0) * trained).detach()
            predicted = latents @ transcoder.W_dec + transcoder.b_dec
            if transcoder.W_skip is not None:
                predicted = predicted + x @ transcoder.W_skip.T
            features.append(latents)
            errors.append((self.mlp_out[layer] - predicted * trained).detach())
        return Sources(features, errors, self._seen["token"], self._seen.get("position"), self._bias_values())

    def _bias_values(self) -> dict[tuple[int, str], Tensor]:
        """Every constant that a block adds, at every position; the MLPs' own are gone, b_dec is there instead."""
        ones = torch.ones(len(self.tokens), 1, dtype=torch.float64)
        last = len(self.blocks) - 1
        found = {
            (layer, path): bias.detach() * ones
            for layer, block in enumerate(self.blocks)
            for path, bias in self._biased(block).items()
        }
        found |= {
            (layer, "b_dec"): self.transcoders[layer].b_dec.detach() * self.trained(layer)
            for layer in range(len(self.blocks))
        }
        found |= {
            (len(self.lists[0]) - 1, path): module.bias.detach() * ones
            for path, module in self._adapter()
            if getattr(module, "bias", None) is not None
        }
        for path in (self.layout.final_norm, self.layout.head):
            bias = getattr(self._module(path), "bias", None)
            if bias is not None:
                found[last, path] = bias.detach() * ones
        return found

    def _biased(self, block: nn.Module) -> dict[str, Tensor]:
        return {
            path: module.bias  # type: ignore[misc]
            for path, module in block.named_modules()
            if not path.startswith("mlp") and isinstance(getattr(module, "bias", None), Tensor)
        }

    def _adapter(self) -> list[tuple[str, Any]]:
        """The adapter's modules by their paths."""
        if self.layout.adapter is None:
            return []
        return list(self._module(self.layout.adapter).named_modules(prefix=self.layout.adapter))

    @contextmanager
    def _attached(self, live: Sources | None) -> Iterator[None]:
        """Hooks that record (`live` None) or freeze, taken off afterwards."""
        handles = []

        def hook(module: nn.Module, function: Any) -> None:
            handles.append(module.register_forward_hook(lambda m, args, output: function(m, args[0], output)))

        def embedding(name: str, leaf: Tensor | None) -> Any:
            def visit(module: nn.Module, ids: Tensor, output: Tensor) -> Tensor | None:
                if leaf is None:
                    self._seen[name] = output.reshape(-1, output.shape[-1]).detach().clone()
                    return None
                return leaf.reshape(output.shape)

            return visit

        hook(self._module(self.layout.embedding), embedding("token", None if live is None else live.tokens))
        if self.layout.positions is not None:
            leaf = None if live is None else live.positions
            hook(self._module(self.layout.positions), embedding("position", leaf))
        for layer, block in enumerate(self.blocks):
            hook(block.mlp, self._mlp(layer, live))
            for norm in self.block_norms[layer]:
                path = next(path for path, module in block.named_modules() if module is norm)
                hook(norm, self._norm(live, (layer, path)))
            for path in self._biased(block):
                if block.get_submodule(path) not in self.block_norms[layer] and live is not None:
                    hook(block.get_submodule(path), self._constant(live.biases[layer, path]))
        for path, module in self._adapter():
            if isinstance(module, nn.ReLU):
                hook(module, self._relu(live))
            elif live is not None and (len(self.lists[0]) - 1, path) in live.biases:
                hook(module, self._constant(live.biases[len(self.lists[0]) - 1, path]))
        last = len(self.blocks) - 1
        hook(self._module(self.layout.final_norm), self._norm(live, (last, self.layout.final_norm)))
        head = self._module(self.layout.head)
        if live is not None and (last, self.layout.head) in live.biases:
            hook(head, self._constant(live.biases[last, self.layout.head]))
        hook(head, lambda module, x, output: self._seen.__setitem__("head", output))
        configs: dict[int, Any] = {id(m.config): m.config for m in self.model.modules() if hasattr(m, "config")}
        before = [(config, config._attn_implementation) for config in configs.values()]
        AttentionInterface.register(ATTENTION, self._attention(live))
        AttentionMaskInterface.register(ATTENTION, eager_mask)
        try:
            for config, _ in before:
                config._attn_implementation = ATTENTION
            yield
        finally:
            for handle in handles:
                handle.remove()
            for config, name in before:
                config._attn_implementation = name

    def _norm(self, live: Sources | None, key: tuple[int, str]) -> Any:
        def visit(module: nn.Module, x: Tensor, y: Tensor) -> Tensor | None:
            bias = getattr(module, "bias", None)
            moved = x - x.mean(-1, keepdim=True) if self.layout.centred else x
            if live is None:
                self.gain[module] = ((y if bias is None else y - bias) / moved).detach()
                return None
            return moved * self.gain[module] + (0.0 if bias is None else live.biases[key])

        return visit

    def _relu(self, live: Sources | None) -> Any:
        def visit(module: nn.Module, x: Tensor, y: Tensor) -> Tensor | None:
            if live is None:
                self.mask[module] = (x > 0).to(x)
                return None
            return x * self.mask[module]

        return visit

    def _constant(self, leaf: Tensor) -> Any:
        return lambda module, x, output: output + (leaf - leaf.detach()).view(output.shape)

    def _mlp(self, layer: int, live: Sources | None) -> Any:
        def visit(module: nn.Module, x: Tensor, y: Tensor) -> Tensor | None:
            self.mlp_in.append(x[0] if live is not None else x[0].detach().clone())
            self.mlp_out.append(y[0].detach().clone())
            if live is None:
                return None
            transcoder = self.transcoders[layer]
            out = live.features[layer] @ transcoder.W_dec + live.errors[layer] + live.biases[layer, "b_dec"]
            if transcoder.W_skip is not None:
                out = out + (x[0] @ transcoder.W_skip.T) * self.trained(layer)
            return out[None]

        return visit

    def _attention(self, live: Sources | None) -> Any:
        def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any):
            if live is None:
                eager = sys.modules[type(module).__module__].eager_attention_forward
                output, probs = eager(module, query, key, value, mask, **kwargs)
                self.probs[module] = probs.detach()
                return output, probs
            probs = self.probs[module]
            heads = value.repeat_interleave(probs.shape[1] // value.shape[1], dim=1)
            return (probs @ heads).transpose(1, 2), probs

        return attend


def random_factors(frozen: FrozenModel, generator: torch.Generator, size: float) -> Sources:
    """Factors for every source but the biases, up to ±`size`."""
    assert frozen.values is not None
    n_pos = len(frozen.tokens)

    def draw(*shape: int) -> Tensor:
        return size * (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1)

    return Sources(
        [draw(*value.shape) for value in frozen.values.features],
        [draw(n_pos) for _ in frozen.values.errors],
        draw(n_pos),
        None if frozen.values.positions is None else draw(n_pos),
        {},
    )


def by_node(nodes: Nodes, given: Sources, bias: Tensor) -> np.ndarray:
    """One number per node, from features [pos, n_latents] and the rest [pos]; `bias` [layers, pos]; logits get 1."""
    found = np.ones(len(nodes))
    for kind in NodeKind:
        mine = np.flatnonzero(nodes.kind == kind)
        layer, pos, index = nodes.layer[mine].astype(int), nodes.pos[mine].astype(int), nodes.index[mine].astype(int)
        match kind:
            case NodeKind.FEATURE:
                found[mine] = torch.stack(given.features).detach().numpy()[layer, pos, index]
            case NodeKind.ERROR:
                found[mine] = torch.stack(given.errors).detach().numpy()[layer, pos]
            case NodeKind.TOKEN:
                found[mine] = given.tokens.detach().numpy()[pos]
            case NodeKind.POSITION if given.positions is not None:
                found[mine] = given.positions.detach().numpy()[pos]
            case NodeKind.BIAS:
                found[mine] = bias.detach().numpy()[layer, pos]
    return found
