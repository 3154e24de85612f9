"""Do the edges account for what they claim to explain? The largest gap between a row's sum and its pre-activation.

Per row: |Σ incoming − pre-activation| / Σ|incoming|. The pre-activation includes the encoder's bias, which is an
incoming edge of its own, so in exact arithmetic every gap is zero and what is left is rounding.
"""

from dataclasses import dataclass

import numpy as np

from interp.circuits.graph import Edges
from interp.errors import InterpError

SCOPE = "unpruned graph: all rows with all their incoming edges, before any pruning"


@dataclass(frozen=True)
class Certificate:
    """How exactly a graph's rows sum to the pre-activations that they explain."""

    max_relative_error: float
    """Largest |Σ incoming − pre-activation| / Σ|incoming| over all rows."""
    max_absolute_error: float
    """Largest |Σ incoming − pre-activation| over all rows, in units of the pre-activation."""
    worst_row: str
    """Node id of the row with the largest relative error."""
    rows: int
    """Number of rows checked: every logit and every selected feature."""
    scope: str = SCOPE
    """What the figures were computed on; pruning and saving carry the certificate along unchanged."""

    def __str__(self) -> str:
        return (
            f"{self.rows} rows sum to their pre-activation within {self.max_relative_error:.1e} relative "
            f"({self.max_absolute_error:.1e} absolute), worst at {self.worst_row}"
        )


def certify(edges: Edges) -> Certificate:
    """The certificate of `edges`, summed in float64.

    Raises `InterpError` where no node has a pre-activation, or a row without incoming edges has one that is not zero.
    """
    rows = np.flatnonzero(~np.isnan(edges.pre_activation))
    if not len(rows):
        raise InterpError("No node of the graph has a pre-activation, so nothing can be certified.")
    incoming = edges.matrix[rows].astype(np.float64)
    pre_activation = edges.pre_activation[rows]
    gap = np.abs(np.asarray(incoming.sum(axis=1)).ravel() - pre_activation)
    scale = np.asarray(abs(incoming).sum(axis=1)).ravel()
    unexplained = np.flatnonzero((scale == 0) & (gap > 0))
    if len(unexplained):
        at = unexplained[0]
        raise InterpError(
            f"Row {edges.node_ids[rows[at]]} has no incoming edge, but its pre-activation is {pre_activation[at]:g}; "
            "attribution must give every row its sources."
        )
    relative = np.divide(gap, scale, out=np.zeros_like(gap), where=scale > 0)
    worst = int(np.argmax(relative))
    return Certificate(float(relative[worst]), float(gap.max()), edges.node_ids[rows[worst]], len(rows))
