"""Influence, pruning and scores once more, on dense matrices and by their closed forms, to compare with."""

import numpy as np

from interp.circuits.graph import Edges, NodeKind


def dense_parts(edges: Edges) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A [N, N], w [N] and the kinds [N]."""
    weights = np.zeros(len(edges.nodes))
    for row, kind in enumerate(edges.nodes.kind):
        if kind == NodeKind.LOGIT:
            weights[row] = edges.nodes.value[row]
    return edges.matrix.toarray().astype(np.float64), weights, edges.nodes.kind


def hat(matrix: np.ndarray) -> np.ndarray:
    size = np.abs(matrix)
    total = size.sum(axis=1, keepdims=True)
    return np.divide(size, total, out=np.zeros_like(size), where=total > 0)


def influence(matrix: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """w((1 − Â)⁻¹ − 1), the sum of the whole series."""
    identity = np.eye(len(matrix))
    return weights @ (np.linalg.inv(identity - hat(matrix)) - identity)


def smallest_set(scores: dict, threshold: float) -> set:
    """Keys of the largest scores, taken until their share reaches `threshold`, and of all equal to the last."""
    total, share, cutoff = sum(scores.values()), 0.0, 0.0
    for score in sorted(scores.values(), reverse=True):
        cutoff = score
        share += score / total
        if share >= threshold:
            break
    return {key for key, score in scores.items() if score > 0 and score >= cutoff * (1 - 1e-9)}


def prune(edges: Edges, node_threshold: float, edge_threshold: float) -> tuple[set[int], set[tuple[int, int]]]:
    """Kept nodes, and kept edges as (target, source)."""
    matrix, weights, kinds = dense_parts(edges)
    kept = smallest_set(dict(enumerate(np.maximum(influence(matrix, weights), 0))), node_threshold)
    kept |= {row for row, kind in enumerate(kinds) if kind not in (NodeKind.FEATURE, NodeKind.ERROR)}
    for row in set(range(len(kinds))) - kept:
        matrix[row, :] = 0
        matrix[:, row] = 0
    score = hat(matrix) * (influence(matrix, weights) + weights)[:, None]
    scores = {(target, source): score[target, source] for target, source in zip(*np.nonzero(matrix), strict=True)}
    links = smallest_set(scores, edge_threshold)
    while True:
        have_output, have_input = {source for _, source in links}, {target for target, _ in links}
        dead = {
            row
            for row in kept
            if (kinds[row] in (NodeKind.FEATURE, NodeKind.ERROR) and row not in have_output)
            or (kinds[row] == NodeKind.FEATURE and row not in have_input)
        }
        if not dead:
            return kept, links
        kept -= dead
        links = {(target, source) for target, source in links if target in kept and source in kept}


def scores(edges: Edges, without: tuple[int, ...] = ()) -> tuple[float, float]:
    """Replacement and completeness, of the graph without all nodes but logits at the positions `without`."""
    matrix, weights, kinds = dense_parts(edges)
    stay = np.array([k == NodeKind.LOGIT or p not in without for k, p in zip(kinds, edges.nodes.pos, strict=True)])
    matrix, weights, kinds = matrix[np.ix_(stay, stay)], weights[stay], kinds[stay]
    normalised, inf = hat(matrix), influence(matrix, weights)
    tokens, errors = kinds == NodeKind.TOKEN, kinds == NodeKind.ERROR
    reached = inf[tokens].sum() + inf[errors].sum()
    replacement = inf[tokens].sum() / reached if reached else np.nan
    explained = 1 - normalised[:, errors].sum(axis=1)
    return replacement, (explained * (inf + weights)).sum() / (inf + weights).sum()
