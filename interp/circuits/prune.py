"""Which nodes and edges carry the influence on the output, and which can be left out?

1. Keep the most influential nodes whose cumulative share of influence reaches `node_threshold`; tokens, positions,
   biases and logits always.
2. Cut the matrix to them, renormalise to Â′ and recompute influence′.
3. Score edges Â′ᵢⱼ (inf′ᵢ + wᵢ) and keep the strongest until their share reaches `edge_threshold`.
4. Until nothing changes, drop features and errors without outgoing edges and features without incoming ones.

Equations of influence: `interp.circuits.influence`. Source: Ameisen et al. 2025, "Circuit Tracing", appendix
"Graph Pruning", https://transformer-circuits.pub/2025/attribution-graphs/methods.html
"""

import numpy as np

from interp.circuits.graph import Edges, NodeKind
from interp.circuits.influence import node_influence, normalise_rows, propagate

ALWAYS_KEPT = (NodeKind.TOKEN, NodeKind.POSITION, NodeKind.BIAS, NodeKind.LOGIT)


def prune_masks(edges: Edges, node_threshold: float, edge_threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """What to keep: bool [N] over nodes, and bool [nnz] over the matrix's stored entries in CSR order."""
    weights, nodes = edges.logit_weights, edges.nodes
    keep_node = strongest(node_influence(edges.matrix, weights), node_threshold) | nodes.is_kind(*ALWAYS_KEPT)

    target = np.repeat(np.arange(len(nodes)), np.diff(edges.matrix.indptr))
    source = edges.matrix.indices
    matrix = edges.matrix.copy()
    matrix.data = np.where(keep_node[target] & keep_node[source], matrix.data, 0)
    normalised = normalise_rows(matrix)
    score = normalised.data * (propagate(normalised, weights) + weights)[target]
    keep_edge = strongest(score, edge_threshold)

    is_feature, needs_output = nodes.is_kind(NodeKind.FEATURE), nodes.is_kind(NodeKind.FEATURE, NodeKind.ERROR)
    while True:
        has_output = np.bincount(source[keep_edge], minlength=len(nodes)) > 0
        has_input = np.bincount(target[keep_edge], minlength=len(nodes)) > 0
        dropped = keep_node & ((needs_output & ~has_output) | (is_feature & ~has_input))
        if not dropped.any():
            return keep_node, keep_edge
        keep_node &= ~dropped
        keep_edge &= keep_node[target] & keep_node[source]


def strongest(score: np.ndarray, threshold: float) -> np.ndarray:
    """bool mask of the largest scores whose cumulative share first reaches `threshold`, ties kept, zeros never."""
    positive = np.sort(score[score > 0])[::-1]
    if not len(positive):
        return np.zeros(len(score), dtype=bool)
    cumulative = np.cumsum(positive)
    # The last sum may round to either side of the total, so a threshold of 1 keeps every positive score.
    reached = np.searchsorted(cumulative, threshold * cumulative[-1]) if threshold < 1 else len(positive) - 1
    cutoff = positive[min(reached, len(positive) - 1)]
    # A node and its only input have one influence, up to the order of summation: neither goes without the other.
    return (score > 0) & (score >= cutoff * (1 - 1e-12))
