"""Through which chains of nodes does the input reach the top logit most strongly?

A path starts at a node without inputs of its own (token, position, bias, error, or a feature that was not expanded)
and ends at the most probable logit. Its share is the product of Âᵢⱼ along it, Â being the row-normalised |weights|
(`interp.circuits.influence`); on an unpruned graph the shares of all paths sum to one. Its sign is the product of the
weights' signs.

The search is best-first from the logit backwards. A partial path is ranked by its share times the best completion
from its last node, which one sweep computes exactly; so paths leave the queue in order of share.
"""

import heapq
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from interp.circuits.graph import Edges, NodeKind, describe_node
from interp.circuits.influence import normalise_rows
from interp.errors import UserError


@dataclass(frozen=True)
class CircuitPath:
    """One chain of nodes from an input to the top logit."""

    node_ids: tuple[str, ...]
    """From the input to the logit."""
    share: float
    """Product of the row-normalised |weights| along the path, 0…1."""
    sign: int
    """+1 or −1: whether the chain raises or lowers the logit."""
    words: str
    """The path for a reader: `token " France"@4 → L3 #1021@4 → logit " Paris" (share 3.1 %, sign +)`."""

    def __str__(self) -> str:
        return self.words


def strongest_paths(
    edges: Edges,
    k: int,
    labels: Mapping[str, str] | None = None,
    without_excluded_positions: bool = False,
    through_features: bool = False,
) -> list[CircuitPath]:
    """At most `k` paths, strongest first, all or those that pass a feature. Raises `UserError` for k < 1."""
    if k < 1:
        raise UserError(f"At least one path must be asked for, but k is {k}.")
    if without_excluded_positions and edges.at_excluded_positions.any():
        edges = edges.take(~edges.at_excluded_positions)
    normalised = normalise_rows(edges.matrix)
    if through_features:
        normalised = _entered_by_features(edges, normalised)
    completion = _best_completion(normalised, edges.nodes.layer)
    logit = edges.top_logit
    # Entries: (−share · best completion, order of arrival, share, nodes from the logit backwards)
    queue: list[tuple[float, int, float, tuple[int, ...]]] = [(-completion[logit], 0, 1.0, (logit,))]
    arrival, found = 1, []
    while queue and len(found) < k:
        _, _, share, backwards = heapq.heappop(queue)
        sources, parts = _inputs(normalised, backwards[-1])
        if not len(sources):
            if len(backwards) > 1:
                found.append(_path(edges, backwards[::-1], share, labels))
            continue
        for source, part in zip(sources.tolist(), parts.tolist(), strict=True):
            heapq.heappush(queue, (-share * part * completion[source], arrival, share * part, (*backwards, source)))
            arrival += 1
    return found


def _entered_by_features(edges: Edges, normalised: sp.csr_array) -> sp.csr_array:
    """Without what reaches the top logit directly from anything but a feature; shares stay those of the whole graph."""
    coo = normalised.tocoo()
    kept = (coo.row != edges.top_logit) | edges.nodes.is_kind(NodeKind.FEATURE)[coo.col]
    return sp.csr_array((coo.data[kept], (coo.row[kept], coo.col[kept])), shape=coo.shape)


def _best_completion(normalised: sp.csr_array, layer: np.ndarray) -> np.ndarray:
    """[N]: the largest product of shares from a node back to any source; 1 for a source itself."""
    best = np.ones(len(layer))
    for node in np.argsort(layer, kind="stable"):
        sources, parts = _inputs(normalised, int(node))
        if len(sources):
            best[node] = (parts * best[sources]).max()
    return best


def _inputs(matrix: sp.csr_array, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Columns and values of one row."""
    start, stop = matrix.indptr[row], matrix.indptr[row + 1]
    return matrix.indices[start:stop], matrix.data[start:stop]


def _path(edges: Edges, rows: tuple[int, ...], share: float, labels: Mapping[str, str] | None) -> CircuitPath:
    weights = [edges.matrix[target, source] for source, target in itertools.pairwise(rows)]
    sign = int(np.prod(np.sign(weights)))
    chain = " → ".join(describe_node(edges, row, labels) for row in rows)
    percent = f"{100 * share:.1f}" if share >= 0.01 else f"{100 * share:.2g}"
    words = f"{chain} (share {percent} %, sign {'+' if sign > 0 else '−'})"
    return CircuitPath(tuple(edges.node_ids[row] for row in rows), share, sign, words)
