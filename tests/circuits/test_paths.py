"""The strongest paths, against the enumeration of all paths."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interp.circuits.graph import AttributionGraph, Edges, NodeKind
from interp.errors import UserError
from tests.circuits import dense_oracle
from tests.circuits.synthetic import hand_edges, synthetic_edges


def all_paths(edges: Edges) -> dict[tuple[str, ...], float]:
    normalised = dense_oracle.hat(edges.matrix.toarray())
    found = {}

    def walk(chain: tuple[int, ...], share: float) -> None:
        sources = np.flatnonzero(normalised[chain[0]])
        if not len(sources):
            found[tuple(edges.node_ids[row] for row in chain)] = share
        for source in sources.tolist():
            walk((source, *chain), share * normalised[chain[0], source])

    walk((edges.top_logit,), 1.0)
    return found


@given(seed=st.integers(0, 10_000), k=st.integers(1, 40))
def test_the_strongest_paths_are_the_first_of_all_paths(seed, k):
    edges = synthetic_edges(seed, n_layers=3, n_pos=3, features_per_cell=2)
    everything = all_paths(edges)
    found = AttributionGraph.from_edges(edges).paths(k)
    assert len(found) == min(k, len(everything))
    for path in found:
        assert path.share == pytest.approx(everything[path.node_ids], rel=1e-12)
    shares = [path.share for path in found]
    np.testing.assert_allclose(shares, sorted(everything.values(), reverse=True)[:k], rtol=1e-12)
    assert len({path.node_ids for path in found}) == len(found)


def test_the_shares_of_all_paths_sum_to_one():
    graph = AttributionGraph.from_edges(synthetic_edges(0))
    assert sum(path.share for path in graph.paths(100_000)) == pytest.approx(1, rel=1e-12)


def test_paths_in_words_computed_on_paper():
    graph = AttributionGraph.from_edges(hand_edges())
    assert [str(path) for path in graph.paths(10)] == [
        'token "Hello"@0 → L0 #7@1 → logit "!" (share 37.5 %, sign +)',
        'token " world"@1 → logit "!" (share 25.0 %, sign −)',
        'error L1@1 → logit "!" (share 25.0 %, sign +)',
        'token " world"@1 → L0 #7@1 → logit "!" (share 12.5 %, sign −)',
    ]


def test_paths_without_excluded_positions_renormalise_what_is_left():
    graph = AttributionGraph.from_edges(replace(hand_edges(), excluded_positions=[0]))
    best = graph.paths(1, without_excluded_positions=True)[0]
    assert best.words == 'token " world"@1 → L0 #7@1 → logit "!" (share 50.0 %, sign −)'


def test_no_path_is_not_a_number_of_paths():
    with pytest.raises(UserError, match="k is 0"):
        AttributionGraph.from_edges(hand_edges()).paths(0)


@given(seed=st.integers(0, 10_000))
def test_paths_through_features_are_those_of_all_paths_that_pass_one(seed):
    edges = synthetic_edges(seed, n_layers=3, n_pos=3, features_per_cell=2)
    features = {edges.node_ids[row] for row in np.flatnonzero(edges.nodes.is_kind(NodeKind.FEATURE))}
    passing = {ids: share for ids, share in all_paths(edges).items() if features & set(ids)}
    found = AttributionGraph.from_edges(edges).paths(10, through_features=True)
    assert len(found) == min(10, len(passing)) and all(features & set(path.node_ids) for path in found)
    np.testing.assert_allclose([path.share for path in found], sorted(passing.values(), reverse=True)[:10], rtol=1e-12)
