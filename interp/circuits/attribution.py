"""Direct effects between features, errors, tokens and logits, by one downward sweep through the frozen model.

1. Every target is a direction in the stream: a logit's row of the unembedding (less the mean row) behind the final
   norm, a feature's encoder row behind its layer's MLP norm. Its gradient G starts there.
2. Layer by layer from the top, G times what a layer writes is the direct effect: decoder rows times activations,
   reconstruction errors, and each constant (decoder, projection and norm biases) into one bias node per position.
3. G then passes to the stream below: unchanged along the skip path, through W_skip and the MLP norm, and through
   W_O, the frozen attention pattern, W_V and the attention norm. Between groups of blocks it passes the adapter, an
   activation there as the frozen factor f(u) / u. No autograd: each step is a matrix product.
4. At the bottom G times the embeddings closes each row; it sums to its target's pre-activation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.circuits.graph import Edges, NodeKind, Nodes
from interp.circuits.replacement_model import LayerState, ReplacementModel, ReplacementState
from interp.errors import UserError
from interp.models.anatomy import Head
from interp.models.weights import BlockWeights, SublayerWeights


@dataclass(frozen=True)
class AttributionConfig:
    """Which targets a graph explains, and how many features get rows of their own."""

    target_tokens: tuple[int, ...] = ()
    """Vocabulary ids to explain; empty for the smallest top set that reaches `logit_mass`."""
    logit_mass: float = 0.95
    """Probability that the chosen logits must reach together."""
    max_logits: int = 10
    """At most this many logits."""
    max_feature_nodes: int = 8192
    """Features whose own inputs are computed: those with the largest direct effect on the logits."""

    def __post_init__(self) -> None:
        if self.max_logits < 1:
            raise UserError(f"A graph explains at least one logit; max_logits is {self.max_logits}.")
        if self.max_feature_nodes < 0:
            raise UserError(f"max_feature_nodes counts features; {self.max_feature_nodes} is below 0.")
        if not 0 < self.logit_mass <= 1:
            raise UserError(f"logit_mass is a probability above 0 and up to 1; got {self.logit_mass}.")


class _Layout:
    """Where each node stands in the table."""

    def __init__(self, state: ReplacementState, logits: list[int]) -> None:
        n_pos, n_layers = len(state.tokens), len(state.layers)
        counts = [len(layer.latents) for layer in state.layers]
        self.features = np.concatenate([[0], np.cumsum(counts)]).astype(int)
        start = int(self.features[-1])
        self.errors = start
        self.tokens = self.errors + n_layers * n_pos
        self.has_positions = any(kind == "position" for kind, _ in state.terms)
        self.positions = self.tokens + n_pos
        self.biases = self.positions + (n_pos if self.has_positions else 0)
        self.logits = self.biases + n_layers * n_pos
        self.size = self.logits + len(logits)
        self.n_pos = n_pos

    def error(self, layer: int) -> np.ndarray:
        return self.errors + layer * self.n_pos + np.arange(self.n_pos)

    def bias(self, layer: int) -> np.ndarray:
        return self.biases + layer * self.n_pos + np.arange(self.n_pos)


class _Rows:
    """Edges as they are found: blocks of [targets, sources]."""

    def __init__(self) -> None:
        self.parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def add(self, targets: np.ndarray, sources: np.ndarray, block: Tensor) -> None:
        """`block` [targets, sources], zeros dropped."""
        dense = block.cpu().numpy()
        row, column = dense.nonzero()
        self.parts.append((targets[row], sources[column], dense[row, column]))

    def matrix(self, size: int) -> sp.csr_array:
        rows, columns, values = (np.concatenate(column) for column in zip(*self.parts, strict=True))
        return sp.coo_array((values, (rows, columns)), shape=(size, size)).tocsr()


ProgressCallback = Callable[[str, int, int, str], None]


class AttributionComputer:
    """Computes graphs on a ReplacementModel. `progress` hears (stage, done, total, unit) after each layer."""

    def __init__(
        self,
        rm: ReplacementModel,
        config: AttributionConfig | None = None,
        progress: ProgressCallback = lambda *_: None,
    ) -> None:
        self.rm, self.config, self.progress = rm, config or AttributionConfig(), progress

    def compute_full_graph(self, state: ReplacementState, input_ids: Int[Tensor, "..."] | list[int]) -> Edges:
        """All direct effects on the chosen logits and features of `state`, which `rm.build(input_ids)` gave.

        Raises `UserError` if `input_ids` are not those of `state` or a target is no token of the vocabulary.
        """
        if torch.as_tensor(input_ids).flatten().tolist() != state.tokens:
            raise UserError(
                "These input_ids are not the prompt that the state was built on; call rm.build on them first."
            )
        with torch.no_grad():
            logits, probabilities = self._targets(state.logits)
            layout = _Layout(state, logits)
            directions, constants = self._logit_directions(state, logits)
            values = self._logit_values(state, logits)
            sweep = _Sweep(self.rm, state, layout, directions, constants, self.progress)
            selected = self._select(sweep, probabilities, layout)
            matrix = sweep.run(selected).matrix(layout.size)
        return self._edges(state, layout, matrix, selected, logits, probabilities, values)

    def _targets(self, logits: Tensor) -> tuple[list[int], Tensor]:
        probabilities = logits.float().softmax(-1)
        if self.config.target_tokens:
            bad = [t for t in self.config.target_tokens if not 0 <= t < len(logits)]
            if bad:
                raise UserError(f"Target token {bad[0]} is outside the vocabulary of {len(logits)} tokens.")
            chosen = list(dict.fromkeys(self.config.target_tokens))
        else:
            top = probabilities.topk(min(self.config.max_logits, len(logits)))
            enough = int((top.values.cumsum(0) < self.config.logit_mass).sum()) + 1
            chosen = top.indices[:enough].tolist()
        return chosen, probabilities[chosen]

    def _logit_directions(self, state: ReplacementState, logits: list[int]) -> tuple[Tensor, Tensor]:
        """Gradient at the last block's output, [targets, d_model], and the constants behind it, [targets]."""
        direction, constant = _centred(self.rm.head, logits)
        norm = self.rm.final_norm
        if norm is None:
            return direction, constant
        assert state.final_scale is not None
        if norm.bias is not None:
            constant = constant + direction @ norm.bias
        return norm.adjoint(direction, state.final_scale[-1]), constant

    def _logit_values(self, state: ReplacementState, logits: list[int]) -> Tensor:
        """What each logit row must sum to: the model's own number before the softcap, less the vocabulary's mean."""
        own = state.lm_head.double()
        return (own[logits] - own.mean()) * self.rm.head.scale

    def _select(self, sweep: "_Sweep", probabilities: Tensor, layout: _Layout) -> np.ndarray:
        """Features that get rows: all of them, or those with the largest direct effect on the logits."""
        n_features = int(layout.features[-1])
        if n_features <= self.config.max_feature_nodes:
            return np.arange(n_features)
        direct = sweep.run(np.arange(0)).matrix(layout.size)[layout.logits :, :n_features]
        weight = probabilities.double().cpu().numpy() @ abs(direct)
        return np.sort(np.argsort(-weight)[: self.config.max_feature_nodes])

    def _edges(
        self,
        state: ReplacementState,
        layout: _Layout,
        matrix: sp.csr_array,
        selected: np.ndarray,
        logits: list[int],
        probabilities: Tensor,
        values: Tensor,
    ) -> Edges:
        engine = self.rm.engine
        pre = np.full(layout.size, np.nan)
        every = torch.cat([layer.pre_activations for layer in state.layers]).double().cpu().numpy()
        pre[selected] = every[selected]
        pre[layout.logits :] = values.cpu().numpy()
        names = _token_strings(engine.tokenizer, state.tokens)
        return Edges(
            nodes=_nodes(state, layout, logits, probabilities),
            matrix=matrix,
            pre_activation=pre,
            prompt=_text(engine.tokenizer, state.tokens),
            prompt_tokens=names,
            token_ids=state.tokens,
            n_layers=len(state.layers),
            scan=engine.model.name,
            excluded_positions=state.excluded_positions,
            logit_strings=dict(zip(logits, _token_strings(engine.tokenizer, logits), strict=True)),
            settings={
                "max_n_logits": self.config.max_logits,
                "desired_logit_prob": self.config.logit_mass,
                "max_feature_nodes": self.config.max_feature_nodes,
                "active_features": state.n_active,
                "logit_target": "before the softcap, less the mean over the vocabulary",
            },
        )


class _Sweep:
    """One downward pass for all targets at once."""

    def __init__(
        self,
        rm: ReplacementModel,
        state: ReplacementState,
        layout: _Layout,
        directions: Tensor,
        constants: Tensor,
        progress: ProgressCallback,
    ) -> None:
        self.rm, self.state, self.layout, self.progress = rm, state, layout, progress
        self.directions, self.constants = directions, constants

    def run(self, selected: np.ndarray) -> _Rows:
        """Rows of the logits and of the `selected` features (numbers in the node table, ascending)."""
        state, layout = self.state, self.layout
        n_layers, n_pos = len(state.layers), layout.n_pos
        rows = _Rows()
        targets = layout.logits + np.arange(len(self.directions))
        gradient = self.directions.new_zeros(len(self.directions), n_pos, self.directions.shape[-1])
        gradient[:, -1] = self.directions
        rows.add(targets, layout.bias(n_layers - 1)[-1:], self.constants[:, None])
        for layer in range(n_layers - 1, -1, -1):
            if layer in state.bridges:
                gradient, constant = state.bridges[layer].adjoint(gradient)
                rows.add(targets, layout.bias(layer), constant)
            block, frozen = self.rm.blocks[layer], state.layers[layer]
            first, last = layout.features[layer], layout.features[layer + 1]
            mine = selected[(selected >= first) & (selected < last)]
            bias = gradient.new_zeros(len(targets), n_pos)
            through_mlp = self._mlp(rows, layer, targets, gradient, bias)
            born, born_bias = self._features(block, frozen, layer, mine - first)
            middle = gradient + through_mlp
            targets = np.concatenate([targets, mine])
            bias = torch.cat([bias, born_bias])
            if block.parallel:
                outgoing = torch.cat([gradient, torch.zeros_like(born)])
                total = torch.cat([middle, born]) + self._attention(block, frozen, outgoing, bias)
            else:
                total = torch.cat([middle, born])
                total = total + self._attention(block, frozen, total, bias)
            rows.add(targets, layout.bias(layer), bias)
            gradient = total
            self.progress("attribution", n_layers - layer, n_layers, "layers")
        for kind, value in state.terms:
            start = layout.tokens if kind == "token" else layout.positions
            rows.add(targets, start + np.arange(n_pos), (gradient * value).sum(-1))
        return rows

    def _mlp(self, rows: _Rows, layer: int, targets: np.ndarray, gradient: Tensor, bias: Tensor) -> Tensor:
        """Effects of what the layer's transcoder writes; the gradient that passes through its skip path."""
        block, frozen, transcoder = self.rm.blocks[layer], self.state.layers[layer], self.rm.transcoders[layer]
        raw = _post_adjoint(block.mlp, gradient, frozen.mlp_post_scale, bias)
        decoders = transcoder.W_dec[frozen.latents] * frozen.activations[:, None]
        effects = torch.cat(
            [raw[:, pos] @ decoders[frozen.positions == pos].T for pos in range(self.layout.n_pos)], dim=-1
        )
        rows.add(targets, np.arange(self.layout.features[layer], self.layout.features[layer + 1]), effects)
        rows.add(targets, self.layout.error(layer), (raw * frozen.error).sum(-1))
        bias += (raw @ transcoder.b_dec) * frozen.trained
        if transcoder.W_skip is None:
            return torch.zeros_like(gradient)
        return _pre_adjoint(block.mlp, (raw @ transcoder.W_skip) * frozen.trained[:, None], frozen.mlp_scale, bias)

    def _features(
        self, block: BlockWeights, frozen: LayerState, layer: int, which: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Gradients of this layer's selected features at the stream that its MLP reads, and their constants."""
        transcoder = self.rm.transcoders[layer]
        index = torch.as_tensor(which, device=frozen.latents.device)
        latents, positions = frozen.latents[index], frozen.positions[index]
        rows = torch.arange(len(index), device=index.device)
        encoders = transcoder.W_enc[latents]
        gradient = encoders.new_zeros(len(index), self.layout.n_pos, encoders.shape[-1])
        gradient[rows, positions] = encoders
        bias = encoders.new_zeros(len(index), self.layout.n_pos)
        bias[rows, positions] = transcoder.b_enc[latents]
        return _pre_adjoint(block.mlp, gradient, frozen.mlp_scale, bias), bias

    def _attention(self, block: BlockWeights, frozen: LayerState, gradient: Tensor, bias: Tensor) -> Tensor:
        """The gradient that passes through W_O, the frozen pattern and W_V; biases on the way are added to `bias`."""
        raw = _post_adjoint(block.attn, gradient, frozen.attn_post_scale, bias)
        if block.b_O is not None:
            bias += raw @ block.b_O
        n_targets, n_pos, d_model = raw.shape
        _, n_heads, d_head = block.W_O.shape
        n_kv = block.W_V.shape[0]
        z = (raw @ block.W_O.reshape(d_model, -1)).view(n_targets, n_pos, n_kv, n_heads // n_kv, d_head)
        probs = frozen.probs.view(n_kv, n_heads // n_kv, n_pos, n_pos)
        value = torch.einsum("kgts,ntkgd->nskd", probs, z)
        if block.b_V is not None:
            bias += torch.einsum("nskd,kd->ns", value, block.b_V)
        read = value.flatten(-2) @ block.W_V.flatten(0, 1)
        return _pre_adjoint(block.attn, read, frozen.attn_scale, bias)


def _post_adjoint(sublayer: SublayerWeights, gradient: Tensor, scale: Tensor | None, bias: Tensor) -> Tensor:
    """From the gradient at a contribution to that at the sublayer's raw output."""
    gradient = gradient * sublayer.multiplier if sublayer.multiplier != 1.0 else gradient
    if sublayer.post is None:
        return gradient
    assert scale is not None
    if sublayer.post.bias is not None:
        bias += gradient @ sublayer.post.bias
    return sublayer.post.adjoint(gradient, scale)


def _pre_adjoint(sublayer: SublayerWeights, gradient: Tensor, scale: Tensor | None, bias: Tensor) -> Tensor:
    """From the gradient at what a sublayer reads to that at the stream."""
    if sublayer.pre is None:
        return gradient
    assert scale is not None
    if sublayer.pre.bias is not None:
        bias += gradient @ sublayer.pre.bias
    return sublayer.pre.adjoint(gradient, scale)


def _centred(head: Head, logits: list[int]) -> tuple[Float[Tensor, "targets d_model"], Float[Tensor, " targets"]]:
    """Rows of the unembedding less their mean over the vocabulary, and the same of its bias, times the head's scale."""
    weight, bias = head.linear.weight, head.linear.bias
    # In parts: a float64 copy of a large vocabulary's unembedding would take more than a gigabyte.
    mean = torch.stack([part.sum(0, dtype=torch.float64) for part in weight.split(16384)]).sum(0) / len(weight)
    direction = weight[logits] - mean.to(weight.dtype)
    constant = direction.new_zeros(len(logits)) if bias is None else bias[logits] - bias.mean()
    return direction * head.scale, constant * head.scale


def _nodes(state: ReplacementState, layout: _Layout, logits: list[int], probabilities: Tensor) -> Nodes:
    n_pos, n_layers = layout.n_pos, len(state.layers)
    grid_layer, grid_pos = np.repeat(np.arange(n_layers), n_pos), np.tile(np.arange(n_pos), n_layers)
    every = np.arange(n_pos)
    parts: list[tuple[NodeKind, np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = [
        (
            NodeKind.FEATURE,
            np.repeat(np.arange(n_layers), np.diff(layout.features)),
            torch.cat([layer.positions for layer in state.layers]).cpu().numpy(),
            torch.cat([layer.latents for layer in state.layers]).cpu().numpy(),
            torch.cat([layer.activations for layer in state.layers]).float().cpu().numpy(),
        ),
        (NodeKind.ERROR, grid_layer, grid_pos, np.full(n_layers * n_pos, -1), np.ones(n_layers * n_pos)),
        (NodeKind.TOKEN, np.full(n_pos, -1), every, np.array(state.tokens), np.ones(n_pos)),
    ]
    if layout.has_positions:
        parts.append((NodeKind.POSITION, np.full(n_pos, -1), every, np.full(n_pos, -1), np.ones(n_pos)))
    parts.append((NodeKind.BIAS, grid_layer, grid_pos, np.full(n_layers * n_pos, -1), np.ones(n_layers * n_pos)))
    n = len(logits)
    parts.append(
        (NodeKind.LOGIT, np.full(n, n_layers), np.full(n, n_pos - 1), np.array(logits), probabilities.cpu().numpy())
    )
    kinds = np.concatenate([np.full(len(part[1]), part[0]) for part in parts])
    layer, pos, index, value = (np.concatenate([part[i] for part in parts]) for i in (1, 2, 3, 4))
    return Nodes(kinds, layer, pos, index, value)


def _text(tokenizer: Any, tokens: list[int]) -> str:
    """The prompt as a person wrote it, without BOS."""
    if tokenizer is None:
        return " ".join(map(str, tokens))
    return tokenizer.decode(tokens, skip_special_tokens=True)


def _token_strings(tokenizer: Any, tokens: list[int]) -> list[str]:
    if tokenizer is None:
        return [str(token) for token in tokens]
    return [tokenizer.decode([token]) for token in tokens]
