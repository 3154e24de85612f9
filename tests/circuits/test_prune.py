"""Pruning against the dense oracle and against graphs pruned by hand; paths against enumeration."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from interp.circuits.graph import AttributionGraph, Edges, NodeKind
from interp.circuits.prune import prune_masks, strongest
from interp.errors import UserError
from tests.circuits import dense_oracle
from tests.circuits.synthetic import hand_edges, synthetic_edges


@given(
    seed=st.integers(0, 10_000),
    node_threshold=st.floats(0.05, 0.999),
    edge_threshold=st.floats(0.05, 0.999),
    density=st.floats(0.05, 1.0),
)
def test_pruning_equals_the_dense_oracle(seed, node_threshold, edge_threshold, density):
    edges = synthetic_edges(seed, density=density)
    keep_node, keep_edge = prune_masks(edges, node_threshold, edge_threshold)
    nodes, links = dense_oracle.prune(edges, node_threshold, edge_threshold)
    target, source = edges.matrix.tocoo().coords
    assert set(np.flatnonzero(keep_node).tolist()) == nodes
    assert set(zip(target[keep_edge].tolist(), source[keep_edge].tolist(), strict=True)) == links


def test_the_smallest_set_by_hand():
    score = np.array([0.1, 0.4, 0.0, 0.2, 0.3])
    assert strongest(score, 0.4).tolist() == [False, True, False, False, False]
    assert strongest(score, 0.41).tolist() == [False, True, False, False, True]
    assert strongest(score, 0.95).tolist() == [True, True, False, True, True]
    assert strongest(score, 1.0).tolist() == [True, True, False, True, True]
    assert strongest(score, 0.0).tolist() == [False, True, False, False, False]
    assert not strongest(np.zeros(3), 0.5).any()
    # A share too small to move the sum in float64 is still a share.
    assert strongest(np.array([1.0, 1e-20]), 1.0).all()


def test_a_graph_pruned_by_hand():
    # influence: feature 4/16, tokens 3/16 each, error 2/16; shares 4/12, 7/12, 10/12, 1.
    graph = AttributionGraph.from_edges(hand_edges())
    pruned = graph.prune(node_threshold=0.5, edge_threshold=1.0)
    assert pruned.node_ids == ["E_11_0", "E_12_1", "0_7_1", "3_5_1"]
    assert pruned.matrix.toarray().tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [3, -1, 0, 0], [0, -1, 2, 0]]
    # Without the error: logit = ⅔ feature + ⅓ token1. Edge scores ⅓, ⅙, ¼ (token0), 1/12 (token1 → feature), of 5/6.
    thinner = graph.prune(node_threshold=0.5, edge_threshold=0.85)
    assert thinner.matrix.toarray().tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [3, 0, 0, 0], [0, -1, 2, 0]]
    # With the two strongest edges alone, token1 stays although nothing leaves it.
    thinnest = graph.prune(node_threshold=0.5, edge_threshold=0.65)
    assert thinnest.node_ids == pruned.node_ids
    assert thinnest.matrix.toarray().tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [3, 0, 0, 0], [0, 0, 2, 0]]


def test_features_that_lose_their_inputs_or_outputs_go_and_take_others_with_them():
    # token → a (weak) → b → logit, and a strong token → logit edge. Cutting token → a kills a, then b.
    base = hand_edges()
    nodes = replace(
        base.nodes,
        kind=np.array([NodeKind.TOKEN, NodeKind.FEATURE, NodeKind.BIAS, NodeKind.FEATURE, NodeKind.LOGIT]),
        layer=np.array([-1, 0, 0, 1, 2]),
        pos=np.array([0, 0, 0, 0, 1]),
        index=np.array([11, 1, -1, 2, 5]),
    )
    dense = np.zeros((5, 5))
    dense[1, [0, 2]] = 1.0, 0.0
    dense[3, 1] = 1.0
    dense[4, [0, 3]] = 2.0, 1.0
    edges: Edges = replace(base, nodes=nodes, matrix=sp.csr_array(dense), pre_activation=np.array([np.nan] * 4 + [3.0]))
    tied = AttributionGraph.from_edges(edges).prune(1.0, 0.5)
    # Edge scores: token → logit ⅓, and ⅙ for each of the chain's three; equal ones stay together.
    assert tied.matrix.nnz == 4 and len(tied.nodes) == 5
    only_strongest = AttributionGraph.from_edges(edges).prune(1.0, 0.3)
    assert only_strongest.node_ids == ["E_11_0", "0_bias_0", "3_5_1"]
    assert only_strongest.matrix.nnz == 1


@pytest.mark.parametrize("seed", range(5))
def test_what_pruning_always_keeps_and_what_travels_along(seed):
    graph = AttributionGraph.from_edges(synthetic_edges(seed, density=0.3))
    pruned = graph.prune(0.3, 0.5)
    kept = set(pruned.node_ids)
    for node, kind in zip(graph.node_ids, graph.nodes.kind, strict=True):
        if kind in (NodeKind.TOKEN, NodeKind.POSITION, NodeKind.BIAS, NodeKind.LOGIT):
            assert node in kept
    assert len(kept) < len(graph.nodes)
    has_output = np.bincount(pruned.matrix.indices, minlength=len(kept)) > 0
    has_input = np.diff(pruned.matrix.indptr) > 0
    assert has_output[pruned.nodes.is_kind(NodeKind.FEATURE, NodeKind.ERROR)].all()
    assert has_input[pruned.nodes.is_kind(NodeKind.FEATURE)].all()
    # Kept edges have their own weights; the certificate and the scores are still those of the whole graph.
    before = {node: row for row, node in enumerate(graph.node_ids)}
    rows = [before[node] for node in pruned.node_ids]
    cut = graph.matrix[rows][:, rows].tocoo()
    assert {(t, s, w) for t, s, w in zip(*pruned.matrix.tocoo().coords, pruned.matrix.data, strict=True)} <= {
        (t, s, w) for t, s, w in zip(*cut.coords, cut.data, strict=True)
    }
    assert pruned.certificate == graph.certificate and pruned.scores == graph.scores
    np.testing.assert_array_equal(pruned.influence, graph.influence[rows])
    assert pruned.pruning == {"node_threshold": 0.3, "edge_threshold": 0.5}


def test_thresholds_of_one_keep_all_that_has_influence():
    graph = AttributionGraph.from_edges(synthetic_edges(4, density=1.0))
    pruned = graph.prune(1.0, 1.0)
    # What no logit reads, directly or through features, has no influence and goes.
    matrix, weights, _ = dense_oracle.dense_parts(graph.edges)
    matters = dense_oracle.influence(matrix, weights) > 0
    optional = graph.nodes.is_kind(NodeKind.FEATURE, NodeKind.ERROR)
    assert pruned.node_ids == [n for n, keep in zip(graph.node_ids, matters | ~optional, strict=True) if keep]


@pytest.mark.parametrize("threshold", [-0.1, 1.1, float("nan")])
def test_thresholds_are_shares(threshold):
    graph = AttributionGraph.from_edges(hand_edges())
    with pytest.raises(UserError, match="node_threshold is a share of influence between 0 and 1"):
        graph.prune(threshold)
    with pytest.raises(UserError, match="edge_threshold"):
        graph.prune(0.5, threshold)
