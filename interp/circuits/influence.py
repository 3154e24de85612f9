"""How much does each node matter to the output, and how much of that is explained?

With A the edge weights (row = target) and w the logits' probabilities on their own rows:

1. Â = |A| with every row divided by its sum.
2. influence = w (Â + Â² + …): the share of the output that passes through a node. The series ends, as edges lead
   from lower to higher layers only.
3. replacement = Σ inf(tokens) / (Σ inf(tokens) + Σ inf(errors)).
4. completeness = Σᵢ (1 − Σ_{j ∈ errors} Âᵢⱼ)(infᵢ + wᵢ) / Σᵢ (infᵢ + wᵢ).

Position and bias nodes count neither as tokens nor as errors. "Without excluded positions" means: delete every node
at those positions, logits aside, then apply the same four equations to what is left.

Source: Ameisen et al. 2025, "Circuit Tracing", https://transformer-circuits.pub/2025/attribution-graphs/methods.html
"""

from typing import NamedTuple

import numpy as np
import scipy.sparse as sp

from interp.circuits.graph import Edges, NodeKind
from interp.errors import InterpError


class Scores(NamedTuple):
    """Replacement and completeness of one graph, 0…1; NaN where neither tokens nor errors reach the output."""

    replacement: float
    completeness: float
    replacement_without_excluded_positions: float
    completeness_without_excluded_positions: float


def normalise_rows(matrix: sp.csr_array) -> sp.csr_array:
    """Â: |matrix| in float64 with each row divided by its sum; rows of zeros stay zero."""
    normalised = abs(matrix).astype(np.float64)
    total = np.asarray(normalised.sum(axis=1)).ravel()
    normalised.data /= np.repeat(np.where(total > 0, total, 1.0), np.diff(normalised.indptr))
    return normalised


def propagate(normalised: sp.csr_array, weights: np.ndarray) -> np.ndarray:
    """w (Â + Â² + …) [N], for row-normalised Â [N, N] without cycles. Raises `InterpError` if there is one."""
    backward = normalised.T.tocsr()
    wave = backward @ weights
    total = wave.copy()
    for _ in range(len(weights)):
        if not wave.any():
            return total
        wave = backward @ wave
        total += wave
    raise InterpError("The graph has a cycle, so influence is not defined; edges must lead to higher layers.")


def node_influence(matrix: sp.csr_array, weights: np.ndarray) -> np.ndarray:
    """Influence [N] of every node, for edge weights [N, N] and logit weights [N]."""
    return propagate(normalise_rows(matrix), weights)


def cumulative_share(influence: np.ndarray) -> np.ndarray:
    """For each node, the share of all influence that it and every more influential node carry together [N]."""
    order = np.argsort(-influence, kind="stable")
    share = np.empty_like(influence)
    total = influence.sum()
    share[order] = np.minimum(np.cumsum(influence[order]) / total, 1.0) if total > 0 else 1.0
    return share


def replacement_score(edges: Edges, without_excluded_positions: bool = False) -> float:
    """Share of token and error influence that comes from tokens."""
    return _scores(edges, without_excluded_positions)[0]


def completeness_score(edges: Edges, without_excluded_positions: bool = False) -> float:
    """Share of inputs that are not errors, each target weighted by its influence on the output."""
    return _scores(edges, without_excluded_positions)[1]


def graph_scores(edges: Edges) -> Scores:
    """Both scores, with and without excluded positions."""
    return Scores(*_scores(edges, False), *_scores(edges, True))


def _scores(edges: Edges, without_excluded_positions: bool) -> tuple[float, float]:
    if without_excluded_positions and edges.at_excluded_positions.any():
        edges = edges.take(~edges.at_excluded_positions)
    weights = edges.logit_weights
    normalised = normalise_rows(edges.matrix)
    influence = propagate(normalised, weights)
    is_error = edges.nodes.is_kind(NodeKind.ERROR)
    from_tokens, from_errors = influence[edges.nodes.is_kind(NodeKind.TOKEN)].sum(), influence[is_error].sum()
    reached = influence + weights
    explained = 1 - normalised @ is_error.astype(np.float64)
    return _ratio(from_tokens, from_tokens + from_errors), _ratio((explained * reached).sum(), reached.sum())


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole > 0 else float("nan")
