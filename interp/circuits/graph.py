"""What is an attribution graph? Its nodes, its edges, and the graph object with everything that is asked of it."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from interp.errors import InterpError, UserError

if TYPE_CHECKING:
    from interp.circuits.certificate import Certificate
    from interp.circuits.influence import Scores
    from interp.circuits.paths import CircuitPath


class NodeKind(enum.IntEnum):
    """What a node stands for."""

    FEATURE = 0
    """An active dictionary latent at one position."""
    ERROR = 1
    """What a layer's dictionary did not reconstruct at one position."""
    TOKEN = 2
    """The token embedding at one position."""
    POSITION = 3
    """A learned position embedding."""
    BIAS = 4
    """All constant terms that a layer adds at one position."""
    LOGIT = 5
    """One output token that the graph explains."""


@dataclass(frozen=True, eq=False)
class Nodes:
    """A columnar node table; all arrays have one length N."""

    kind: np.ndarray
    """int8 [N], values of `NodeKind`."""
    layer: np.ndarray
    """int32 [N]; −1 for tokens and positions, n_layers for logits. The head's own biases sit at n_layers − 1."""
    pos: np.ndarray
    """int32 [N], index into the prompt's tokens."""
    index: np.ndarray
    """int32 [N]: latent of a feature, vocabulary id of a token or logit, else −1."""
    value: np.ndarray
    """float32 [N]: activation of a feature, probability of a logit, else 1."""

    def __post_init__(self) -> None:
        types = {"kind": np.int8, "layer": np.int32, "pos": np.int32, "index": np.int32, "value": np.float32}
        for name, dtype in types.items():
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), dtype=dtype))
        lengths = {name: len(getattr(self, name)) for name in types}
        if len(set(lengths.values())) > 1:
            raise InterpError(f"A node table needs columns of one length, but got {lengths}.")

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, rows: np.ndarray) -> Nodes:
        """The nodes at `rows` (indices or a boolean mask [N]), in that order."""
        return Nodes(self.kind[rows], self.layer[rows], self.pos[rows], self.index[rows], self.value[rows])

    def is_kind(self, *kinds: NodeKind) -> np.ndarray:
        """bool [N]: which nodes are of one of `kinds`."""
        return np.isin(self.kind, np.array(kinds, dtype=np.int8))


@dataclass(frozen=True, eq=False)
class Edges:
    """Direct effects between nodes for one prompt: what attribution computes and everything below reads."""

    nodes: Nodes
    matrix: sp.csr_array
    """float32 or float64 [N, N]; row = target, column = source. Only logits and selected features have rows."""
    pre_activation: np.ndarray
    """float64 [N]: the value that a row must sum to; NaN where a node has no row."""
    prompt: str
    prompt_tokens: list[str]
    """The prompt's tokens as text, one per position."""
    token_ids: list[int]
    n_layers: int
    scan: str
    """The model's name."""
    excluded_positions: list[int] = field(default_factory=list)
    """Positions whose token the dictionaries were not trained on (BOS): no feature fires there."""
    logit_strings: dict[int, str] = field(default_factory=dict)
    """Vocabulary id of each logit node → its token as text."""
    settings: dict[str, Any] = field(default_factory=dict)
    """How the graph was computed; plain JSON values."""

    def __post_init__(self) -> None:
        dtype = np.float32 if self.matrix.dtype == np.float32 else np.float64
        matrix = sp.csr_array(self.matrix, dtype=dtype, copy=True)
        matrix.sum_duplicates()
        matrix.eliminate_zeros()
        object.__setattr__(self, "matrix", matrix)
        object.__setattr__(self, "pre_activation", np.asarray(self.pre_activation, dtype=np.float64))
        self._check()

    @cached_property
    def node_ids(self) -> list[str]:
        """One name per node, as in the graph JSON: `3_1021_4`, `3_-1_4`, `E_818_2`, `P_2`, `3_bias_4`, `19_7001_4`."""
        formats = {
            NodeKind.FEATURE: "{layer}_{index}_{pos}",
            NodeKind.ERROR: "{layer}_-1_{pos}",
            NodeKind.TOKEN: "E_{index}_{pos}",
            NodeKind.POSITION: "P_{pos}",
            NodeKind.BIAS: "{layer}_bias_{pos}",
            NodeKind.LOGIT: "{logit_layer}_{index}_{pos}",
        }
        table = (self.nodes.kind, self.nodes.layer, self.nodes.index, self.nodes.pos)
        return [
            formats[NodeKind(kind)].format(layer=layer, index=index, pos=pos, logit_layer=self.n_layers + 1)
            for kind, layer, index, pos in zip(*(column.tolist() for column in table), strict=True)
        ]

    @cached_property
    def logit_weights(self) -> np.ndarray:
        """float64 [N]: w of the influence equations, the probability of each logit node and 0 elsewhere."""
        return np.where(self.nodes.is_kind(NodeKind.LOGIT), self.nodes.value.astype(np.float64), 0.0)

    @cached_property
    def top_logit(self) -> int:
        """Row of the most probable logit node."""
        return int(np.argmax(np.where(self.nodes.is_kind(NodeKind.LOGIT), self.nodes.value, -1)))

    @cached_property
    def at_excluded_positions(self) -> np.ndarray:
        """bool [N]: nodes at a position whose token the dictionaries were not trained on, logits aside."""
        return np.isin(self.nodes.pos, self.excluded_positions) & ~self.nodes.is_kind(NodeKind.LOGIT)

    def take(self, rows: np.ndarray, matrix: sp.csr_array | None = None) -> Edges:
        """The subgraph on the nodes `rows` (indices or mask); `matrix` [N, N] replaces the edges before the cut."""
        matrix = self.matrix if matrix is None else matrix
        kept = np.flatnonzero(rows) if np.asarray(rows).dtype == bool else np.asarray(rows)
        return replace(
            self,
            nodes=self.nodes.take(kept),
            matrix=sp.csr_array(matrix[kept][:, kept]),
            pre_activation=self.pre_activation[kept],
        )

    def _check(self) -> None:
        nodes, n = self.nodes, len(self.nodes)
        if self.matrix.shape != (n, n) or self.pre_activation.shape != (n,):
            raise InterpError(
                f"{n} nodes need a matrix of [{n}, {n}] and {n} pre-activations, "
                f"but got {self.matrix.shape} and {self.pre_activation.shape}."
            )
        if not nodes.is_kind(NodeKind.LOGIT).any():
            raise InterpError("An attribution graph needs at least one logit node to explain, but has none.")
        if len(self.prompt_tokens) != len(self.token_ids):
            raise InterpError(f"{len(self.prompt_tokens)} prompt tokens do not match {len(self.token_ids)} token ids.")
        if nodes.pos.min() < 0 or nodes.pos.max() >= len(self.prompt_tokens):
            raise InterpError(f"A node lies outside the prompt's {len(self.prompt_tokens)} positions.")
        if len(set(self.node_ids)) < len(self.node_ids):
            twice = next(node for node in self.node_ids if self.node_ids.count(node) > 1)
            raise InterpError(f"Node {twice} occurs twice; merge its columns into one node.")
        if not np.isfinite(self.matrix.data).all():
            raise InterpError("An edge weight is not a finite number; the attribution overflowed or read a NaN.")
        coo = self.matrix.tocoo()
        target, source = coo.row, coo.col
        may_receive = nodes.is_kind(NodeKind.LOGIT, NodeKind.FEATURE)
        # An encoder's own bias acts within its layer; everything else is written after that layer has read.
        reach = nodes.layer[target] - nodes.layer[source] + nodes.is_kind(NodeKind.BIAS)[source]
        for wrong, reason in (
            (~may_receive[target], "only features and logits have inputs"),
            (reach < 1, "it does not lead to a higher layer"),
        ):
            if wrong.any():
                ends = (self.node_ids[end[np.flatnonzero(wrong)[0]]] for end in (source, target))
                raise InterpError(f"The edge {' → '.join(ends)} cannot be: {reason}.")


@dataclass(frozen=True, eq=False)
class AttributionGraph:
    """Edges of one prompt with their certificate, influence and scores; prune it, read its paths, save it."""

    edges: Edges
    influence: np.ndarray
    """float64 [N]: cumulative share of influence at the node's rank in the unpruned graph; NaN for logits.

    Small is important: nodes with influence ≤ t are the smallest set that carries the share t."""
    certificate: Certificate | None
    """Of the unpruned graph; None for a file from a tool that writes none."""
    scores: Scores | None
    """Of the unpruned graph; None for a file from a tool that writes none."""
    pruning: dict[str, float] | None = None
    """node_threshold and edge_threshold, if the graph was pruned."""
    labels: dict[str, str] = field(default_factory=dict)
    """Node id → a person's name for it, shown instead of `L3 #1021`."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Further metadata of the graph JSON: slug, transcoder_list, info, feature_details."""
    q_params: dict[str, Any] = field(default_factory=dict)
    """Saved state of the frontend: pinnedIds, supernodes, clickedId."""

    @classmethod
    def from_edges(cls, edges: Edges, metadata: Mapping[str, Any] | None = None) -> AttributionGraph:
        """The unpruned graph, certified: computes certificate, influence and scores.

        `metadata` holds further entries of the JSON's metadata, such as `slug` or `transcoder_list`. Raises
        `InterpError` where a row has no incoming edge although its pre-activation is not zero.
        """
        from interp.circuits.certificate import certify
        from interp.circuits.influence import cumulative_share, graph_scores, node_influence

        influence = cumulative_share(node_influence(edges.matrix, edges.logit_weights))
        influence[edges.nodes.is_kind(NodeKind.LOGIT)] = np.nan
        return cls(edges, influence, certify(edges), graph_scores(edges), metadata=dict(metadata or {}))

    @classmethod
    def load(cls, path: str | Path) -> AttributionGraph:
        """Read a graph JSON, ours or another tool's. Raises `UserError` with what is wrong with the file."""
        from interp.circuits.graph_json import read_graph

        return read_graph(path)

    @property
    def nodes(self) -> Nodes:
        return self.edges.nodes

    @property
    def matrix(self) -> sp.csr_array:
        """[N, N] edge weights; row = target, column = source."""
        return self.edges.matrix

    @property
    def node_ids(self) -> list[str]:
        return self.edges.node_ids

    def prune(self, node_threshold: float = 0.8, edge_threshold: float = 0.98) -> AttributionGraph:
        """The smallest graph that keeps these shares of influence; see `interp.circuits.prune`.

        Certificate, influence and scores stay those of the unpruned graph. Raises `UserError` for a threshold
        outside 0…1.
        """
        from interp.circuits.prune import prune_masks

        for name, threshold in (("node_threshold", node_threshold), ("edge_threshold", edge_threshold)):
            if not 0 <= threshold <= 1:
                raise UserError(f"{name} is a share of influence between 0 and 1, but {threshold} was given.")
        keep_node, keep_edge = prune_masks(self.edges, node_threshold, edge_threshold)
        matrix = self.matrix.copy()
        matrix.data = np.where(keep_edge, matrix.data, 0)
        matrix.eliminate_zeros()
        edges = self.edges.take(keep_node, matrix)
        return replace(
            self,
            edges=edges,
            influence=self.influence[keep_node],
            pruning={"node_threshold": float(node_threshold), "edge_threshold": float(edge_threshold)},
            labels={node: self.labels[node] for node in edges.node_ids if node in self.labels},
        )

    def replacement_score(self, without_excluded_positions: bool = False) -> float:
        """Share of token and error influence that comes from tokens, on this graph's own edges (0…1, or NaN)."""
        from interp.circuits.influence import replacement_score

        return replacement_score(self.edges, without_excluded_positions)

    def completeness_score(self, without_excluded_positions: bool = False) -> float:
        """Share of inputs that are not errors, weighted by influence, on this graph's own edges (0…1, or NaN)."""
        from interp.circuits.influence import completeness_score

        return completeness_score(self.edges, without_excluded_positions)

    def paths(
        self, k: int = 10, without_excluded_positions: bool = False, through_features: bool = False
    ) -> list[CircuitPath]:
        """The k strongest paths from an input to the top logit, or of those that pass a feature on their way.

        See `interp.circuits.paths`.
        """
        from interp.circuits.paths import strongest_paths

        return strongest_paths(self.edges, k, self.labels, without_excluded_positions, through_features)

    def with_labels(self, labels: Mapping[str, str]) -> AttributionGraph:
        """The same graph with names for features, keyed by node id. Raises `UserError` for an unknown node."""
        unknown = sorted(set(labels) - set(self.node_ids))
        if unknown:
            raise UserError(f"The graph has no node {unknown[0]}; labels name nodes of this graph.")
        return replace(self, labels={**self.labels, **labels})

    def save(self, path: str | Path) -> None:
        """Write the graph JSON that Neuronpedia and circuit-tracer's frontend read; whole or not at all."""
        from interp.circuits.graph_json import write_graph

        write_graph(self, path)


def file_name_part(text: str, longest: int = 60) -> str:
    """`text` with all but letters, digits, `_`, `.` and `-` replaced by `-`: what slug and scan may contain."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-")[:longest].strip("-") or "graph"


def describe_node(edges: Edges, row: int, labels: Mapping[str, str] | None = None) -> str:
    """A node in words: `token " France"@4`, `L3 #1021@4`, `error L3@4`, `bias L3@4`, `logit " Paris"`."""
    nodes = edges.nodes
    kind, layer, pos, index = NodeKind(nodes.kind[row]), nodes.layer[row], nodes.pos[row], int(nodes.index[row])
    match kind:
        case NodeKind.FEATURE:
            label = (labels or {}).get(edges.node_ids[row])
            return f"L{layer} #{index}{f' {_quoted(label)}' if label else ''}@{pos}"
        case NodeKind.TOKEN:
            return f"token {_quoted(edges.prompt_tokens[pos])}@{pos}"
        case NodeKind.LOGIT:
            return f"logit {_quoted(edges.logit_strings.get(index, str(index)))}"
        case NodeKind.POSITION:
            return f"position@{pos}"
        case _:
            return f"{kind.name.lower()} L{layer}@{pos}"


def _quoted(text: str) -> str:
    escaped = text.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    return f'"{escaped}"'
