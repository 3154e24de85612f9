"""The certificate: does every row sum to its pre-activation?"""

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp

from interp.circuits.certificate import SCOPE, Certificate, certify
from interp.circuits.graph import AttributionGraph
from interp.errors import InterpError
from tests.circuits.synthetic import hand_edges, synthetic_edges


def test_a_consistent_graph_is_certified_to_rounding():
    edges = synthetic_edges(0)
    certificate = certify(edges)
    assert certificate.max_relative_error < 1e-14
    assert certificate.rows == int(np.isfinite(edges.pre_activation).sum())


def test_gaps_computed_on_paper():
    # feature: 3 − 1 = 2, claimed 2.5: 0.5 of Σ|incoming| 4. logit: 2 + 1 − 1 = 2, claimed 1: 1 of 4.
    edges = replace(hand_edges(), pre_activation=np.array([np.nan, np.nan, 2.5, np.nan, 1.0]))
    assert certify(edges) == Certificate(0.25, 1.0, "3_5_1", 2, SCOPE)
    # The largest absolute gap need not lie in the row with the largest relative one.
    scaled = sp.csr_array(edges.matrix * np.array([1, 1, 1, 1, 100.0])[:, None])
    certificate = certify(replace(edges, matrix=scaled, pre_activation=np.array([np.nan, np.nan, 2.5, np.nan, 199.0])))
    assert certificate.worst_row == "0_7_1"
    assert (certificate.max_relative_error, certificate.max_absolute_error) == (0.125, 1.0)


def test_float32_edges_are_summed_in_float64():
    edges = synthetic_edges(5, features_per_cell=20, dtype=np.float32)
    assert certify(edges).max_relative_error < 1e-14


def test_a_row_without_sources_is_refused_and_so_is_a_graph_without_rows():
    edges = hand_edges()
    with pytest.raises(InterpError, match=r"Row E_11_0 has no incoming edge, but its pre-activation is 4"):
        certify(replace(edges, pre_activation=np.array([4, np.nan, 2, np.nan, 2])))
    with pytest.raises(InterpError, match="nothing can be certified"):
        certify(replace(edges, pre_activation=np.full(5, np.nan)))


def test_the_certificate_is_the_unpruned_graphs_and_says_so():
    graph = AttributionGraph.from_edges(hand_edges())
    pruned = graph.prune(0.5, 1.0)
    assert pruned.certificate is graph.certificate
    assert pruned.certificate is not None and pruned.certificate.scope.startswith("unpruned graph")
    # Recomputed on the pruned graph it would be another: the error of 1 is missing from 2 − 1 + 1 = 2.
    assert certify(pruned.edges).max_relative_error == pytest.approx(1 / 3)
    assert str(pruned.certificate) == (
        "2 rows sum to their pre-activation within 0.0e+00 relative (0.0e+00 absolute), worst at 0_7_1"
    )
