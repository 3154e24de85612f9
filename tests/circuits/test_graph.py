"""Nodes, edges, influence, scores and the graph JSON."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from interp.circuits.graph import AttributionGraph, NodeKind, Nodes, describe_node, file_name_part
from interp.circuits.graph_json import cantor_pair, graph_document, validate_document
from interp.circuits.influence import node_influence, propagate
from interp.errors import InterpError, UserError
from tests.circuits import dense_oracle
from tests.circuits.synthetic import hand_edges, synthetic_edges


def test_influence_and_scores_of_a_graph_computed_on_paper():
    # Â: feature = ¾ token0 + ¼ token1; logit = ½ feature + ¼ error + ¼ token1; w = ½ on the logit.
    edges = hand_edges()
    influence = node_influence(edges.matrix, edges.logit_weights)
    np.testing.assert_allclose(influence, [3 / 16, 1 / 8 + 1 / 16, 1 / 4, 1 / 8, 0], rtol=1e-15)
    graph = AttributionGraph.from_edges(edges)
    assert graph.replacement_score() == pytest.approx((6 / 16) / (6 / 16 + 2 / 16), rel=1e-15)
    # Only the logit (weight ½) has an error among its inputs, a quarter of them; inf + w sums to 12/16 + 8/16.
    assert graph.completeness_score() == pytest.approx(1 - (1 / 4 * 1 / 2) / (20 / 16), rel=1e-15)
    # By rank: feature 4/16, then the two tokens 3/16 each in some order, then the error 2/16, of 12/16.
    assert graph.influence[2] == pytest.approx(4 / 12)
    assert sorted(graph.influence[:2]) == pytest.approx([7 / 12, 10 / 12])
    assert graph.influence[3] == pytest.approx(1)
    assert np.isnan(graph.influence[4])


def test_scores_without_the_excluded_positions_computed_on_paper():
    # Without position 0: feature = token1 alone; logit as before.
    graph = AttributionGraph.from_edges(replace(hand_edges(), excluded_positions=[0]))
    assert graph.replacement_score(without_excluded_positions=True) == pytest.approx(3 / 4, rel=1e-15)
    assert graph.replacement_score() == pytest.approx(3 / 4, rel=1e-15)
    # Without position 1 nothing but the logit and an unconnected token is left: neither score is defined by inputs.
    only_first = AttributionGraph.from_edges(replace(hand_edges(), excluded_positions=[1]))
    assert np.isnan(only_first.replacement_score(without_excluded_positions=True))
    assert only_first.completeness_score(without_excluded_positions=True) == 1


@given(seed=st.integers(0, 10_000), density=st.floats(0.05, 1.0))
def test_influence_and_scores_equal_the_dense_closed_form(seed, density):
    edges = synthetic_edges(seed, density=density)
    matrix, weights, _ = dense_oracle.dense_parts(edges)
    expected = dense_oracle.influence(matrix, weights)
    np.testing.assert_allclose(node_influence(edges.matrix, edges.logit_weights), expected, rtol=1e-10, atol=1e-14)
    scores = AttributionGraph.from_edges(edges).scores
    assert scores is not None
    with_all, without = dense_oracle.scores(edges), dense_oracle.scores(edges, without=(0,))
    np.testing.assert_allclose(scores, [*with_all, *without], rtol=1e-9)


def test_excluding_positions_changes_both_scores():
    scores = AttributionGraph.from_edges(synthetic_edges(0)).scores
    assert scores is not None
    assert abs(scores.replacement - scores.replacement_without_excluded_positions) > 0.01
    assert abs(scores.completeness - scores.completeness_without_excluded_positions) > 0.01


def test_all_influence_of_the_logits_ends_in_nodes_without_inputs():
    edges = synthetic_edges(3)
    influence = node_influence(edges.matrix, edges.logit_weights)
    leaves = np.diff(edges.matrix.indptr) == 0
    assert influence[leaves].sum() == pytest.approx(edges.logit_weights.sum(), rel=1e-12)


def test_biases_and_positions_count_neither_as_tokens_nor_as_errors():
    edges = hand_edges()
    kind = edges.nodes.kind.copy()
    kind[3] = NodeKind.BIAS
    graph = AttributionGraph.from_edges(replace(edges, nodes=replace(edges.nodes, kind=kind)))
    assert graph.replacement_score() == 1
    assert graph.completeness_score() == 1
    kind[0] = NodeKind.POSITION
    other = AttributionGraph.from_edges(replace(edges, nodes=replace(edges.nodes, kind=kind)))
    assert other.replacement_score() == 1


def test_a_cycle_has_no_influence():
    loop = sp.csr_array(np.array([[0.0, 1.0], [1.0, 0.0]]))
    with pytest.raises(InterpError, match="cycle"):
        propagate(loop, np.array([1.0, 0.0]))


def test_edges_that_cannot_be_are_refused():
    edges = hand_edges()

    def with_edge(target, source, weight=1.0):
        matrix = edges.matrix.tolil()
        matrix[target, source] = weight
        return replace(edges, matrix=sp.csr_array(matrix))

    with pytest.raises(InterpError, match=r"E_12_1 → 1_-1_1 cannot be: only features and logits have inputs"):
        with_edge(3, 1)
    with pytest.raises(InterpError, match=r"1_-1_1 → 0_7_1 cannot be: it does not lead to a higher layer"):
        with_edge(2, 3)
    with pytest.raises(InterpError, match="not a finite number"):
        with_edge(2, 0, np.nan)
    with pytest.raises(InterpError, match="at least one logit"):
        edges.take(np.arange(4))
    with pytest.raises(InterpError, match="E_11_0 occurs twice"):
        edges.take(np.array([0, 0, 1, 2, 3, 4]))
    with pytest.raises(InterpError, match="one length"):
        Nodes(*(np.zeros(n) for n in (2, 2, 2, 2, 3)))


def test_an_encoders_own_bias_may_act_within_its_layer_and_a_feature_may_not():
    nodes = Nodes(*np.array([[4, 0, 5], [0, 0, 1], [0, 0, 0], [-1, 3, 9], [1, 1, 1]]))
    edges = replace(
        hand_edges(), nodes=nodes, matrix=sp.csr_array(np.array([[0, 0, 0], [2.0, 0, 0], [0, 1, 0]])), n_layers=1,
        pre_activation=np.array([np.nan, 2, 1]),
    )  # fmt: skip
    assert AttributionGraph.from_edges(edges).node_ids == ["0_bias_0", "0_3_0", "2_9_0"]
    with pytest.raises(InterpError, match="higher layer"):
        replace(edges, nodes=replace(nodes, kind=np.array([0, 0, 5])))


def test_words_for_each_kind_of_node():
    edges = synthetic_edges(0)
    words = {describe_node(edges, row) for row in range(len(edges.nodes))}
    assert {'token " capital"@2', "position@1", "error L2@3", "bias L0@0"} <= words
    assert any(word.startswith('logit " out"0"') for word in words)
    feature = int(np.flatnonzero(edges.nodes.is_kind(NodeKind.FEATURE))[0])
    expected = f"L0 #{edges.nodes.index[feature]}@1"
    assert describe_node(edges, feature) == expected
    assert describe_node(edges, feature, {edges.node_ids[feature]: "cities"}) == expected.replace("@", ' "cities"@')


# --- JSON


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("pruned", [True, False])
def test_save_load_save_is_byte_equal_and_loses_nothing(tmp_path, dtype, pruned):
    graph = AttributionGraph.from_edges(synthetic_edges(1, n_pos=12, dtype=dtype), metadata={"slug": "france"})
    if pruned:
        graph = graph.prune(0.7, 0.9)
    feature = next(node for node, kind in zip(graph.node_ids, graph.nodes.kind, strict=True) if kind == 0)
    graph = graph.with_labels({feature: 'capital "cities" </script>'})
    graph.save(tmp_path / "graph.json")
    loaded = AttributionGraph.load(tmp_path / "graph.json")
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "graph.json").read_bytes() == (tmp_path / "again.json").read_bytes()

    assert loaded.node_ids == graph.node_ids
    for column in ("kind", "layer", "pos", "index", "value"):
        np.testing.assert_array_equal(getattr(loaded.nodes, column), getattr(graph.nodes, column))
    assert loaded.matrix.dtype == dtype
    np.testing.assert_array_equal(loaded.matrix.toarray(), graph.matrix.toarray())
    np.testing.assert_array_equal(loaded.influence, graph.influence)
    np.testing.assert_array_equal(loaded.edges.pre_activation, graph.edges.pre_activation)
    assert loaded.certificate == graph.certificate
    assert loaded.scores == graph.scores
    assert loaded.pruning == graph.pruning
    assert loaded.labels == graph.labels
    for field in ("prompt", "prompt_tokens", "token_ids", "n_layers", "scan", "excluded_positions", "logit_strings"):
        assert getattr(loaded.edges, field) == getattr(graph.edges, field)
    assert loaded.edges.settings == graph.edges.settings


def test_the_json_fits_the_schema_and_the_table_of_node_kinds(tmp_path):
    edges = synthetic_edges(2)
    graph = AttributionGraph.from_edges(edges).prune(0.9)
    graph.save(tmp_path / "graph.json")
    document = json.loads((tmp_path / "graph.json").read_text())
    validate_document(document)
    assert document == graph_document(graph)
    assert document["metadata"]["scan"] == "example-model-270m"
    assert document["metadata"]["prompt_tokens"] == edges.prompt_tokens
    assert document["metadata"]["node_threshold"] == 0.9
    assert document["metadata"]["pruning_settings"] == {"node_threshold": 0.9, "edge_threshold": 0.98}
    assert document["qParams"] == {
        "pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": "",
    }  # fmt: skip
    nodes = {node["node_id"]: node for node in document["nodes"]}
    assert {node["feature_type"] for node in nodes.values()} == {
        "cross layer transcoder", "mlp reconstruction error", "embedding", "position", "bias", "logit",
    }  # fmt: skip

    def fields(node_id):
        return tuple(nodes[node_id][name] for name in ("feature", "layer", "ctx_idx", "jsNodeId"))

    assert fields("E_102_2") == (2, "E", 2, "E_102-2")
    assert fields("P_3") == (3, "E", 3, "P-3")
    assert fields("2_bias_1") == (None, "2", 1, "2_bias-1")
    error = next(name for name in nodes if "_-1_" in name)
    layer, pos = error.split("_-1_")
    assert fields(error) == (-1, layer, int(pos), f"{layer}_{pos}-0")
    feature = next(node for node in nodes.values() if node["feature_type"] == "cross layer transcoder")
    layer, latent, pos = (int(part) for part in feature["node_id"].split("_"))
    assert fields(feature["node_id"]) == (
        (layer + latent) * (layer + latent + 1) // 2 + latent, str(layer), pos, f"{layer}_{latent}-0",
    )  # fmt: skip
    logit = edges.nodes.index[edges.top_logit]
    assert fields(f"4_{logit}_3") == (logit, "4", 3, f"L_{logit}-3")
    assert nodes[f"4_{logit}_3"]["is_target_logit"] is True
    assert sum(node["is_target_logit"] for node in nodes.values()) == 1
    probability = edges.nodes.value[edges.top_logit]
    assert nodes[f"4_{logit}_3"]["clerp"] == f'Output " out"0" (p={probability:.3f})'
    assert {link[end] for link in document["links"] for end in ("source", "target")} <= set(nodes)


@pytest.mark.parametrize(
    ("field", "value"),
    [("node_id", "0_1"), ("layer", "E"), ("feature", -1), ("feature_type", "lorsa"), ("clerp", None), ("extra", 1)],
)
def test_the_schema_refuses_a_node_that_does_not_fit_its_kind(field, value):
    document = graph_document(AttributionGraph.from_edges(synthetic_edges(2)))
    node = next(node for node in document["nodes"] if node["feature_type"] == "cross layer transcoder")
    node[field] = value
    with pytest.raises(InterpError, match="does not fit its schema at"):
        validate_document(document)


def test_the_schema_refuses_a_logit_without_its_probability_in_the_label():
    document = graph_document(AttributionGraph.from_edges(hand_edges()))
    validate_document(document)
    document["nodes"][4]["clerp"] = 'Output "!"'
    with pytest.raises(InterpError, match="schema"):
        validate_document(document)


def test_cantor_pairs_computed_by_walking_the_diagonals():
    walk = [(diagonal - step, step) for diagonal in range(40) for step in range(diagonal + 1)]
    assert [cantor_pair(layer, latent) for layer, latent in walk] == list(range(len(walk)))


def others_document(error_id="0_1_1"):
    """A graph as circuit-tracer writes it: no `metadata.interp`, error ids `0_{layer}_{pos}`."""
    node = {"run_idx": 0, "reverse_ctx_idx": 0, "token_prob": 0.0, "is_target_logit": False, "clerp": ""}
    return {
        "metadata": {
            "slug": "x", "scan": "gemma-2-2b", "prompt": "Hello world", "prompt_tokens": ["Hello", " world"],
            "schema_version": 1, "node_threshold": 0.8, "transcoder_list": [],
        },
        "qParams": {"pinnedIds": ["0_7_1"], "supernodes": [["greeting", "0_7_1"]], "linkType": "both"},
        "nodes": [
            node | {"node_id": "E_11_0", "feature": 0, "layer": "E", "ctx_idx": 0, "feature_type": "embedding",
                    "jsNodeId": "E_11-0", "influence": 0.4},
            node | {"node_id": "E_12_1", "feature": 1, "layer": "E", "ctx_idx": 1, "feature_type": "embedding",
                    "jsNodeId": "E_12-1", "influence": 0.7},
            node | {"node_id": "0_7_1", "feature": 35, "layer": "0", "ctx_idx": 1, "jsNodeId": "0_7-0",
                    "feature_type": "cross layer transcoder", "influence": 0.2, "activation": 2.0, "clerp": "greeting"},
            node | {"node_id": error_id, "feature": -1, "layer": "1", "ctx_idx": 1, "jsNodeId": "1_1-0",
                    "feature_type": "mlp reconstruction error", "influence": 0.8},
            node | {"node_id": "3_5_1", "feature": 5, "layer": "3", "ctx_idx": 1, "feature_type": "logit",
                    "jsNodeId": "L_5-1", "token_prob": 0.5, "is_target_logit": True, "clerp": 'Output "!" (p=0.500)',
                    "influence": None},
        ],
        "links": [
            {"source": "E_11_0", "target": "0_7_1", "weight": 3}, {"source": "E_12_1", "target": "0_7_1", "weight": -1},
            {"source": "E_12_1", "target": "3_5_1", "weight": -1}, {"source": "0_7_1", "target": "3_5_1", "weight": 2},
            {"source": error_id, "target": "3_5_1", "weight": 1},
        ],
    }  # fmt: skip


@pytest.mark.parametrize("error_id", ["0_1_1", "1_-1_1"])
def test_other_tools_graphs_are_read_with_either_error_id_and_written_with_ours(tmp_path, error_id):
    (tmp_path / "theirs.json").write_text(json.dumps(others_document(error_id)))
    graph = AttributionGraph.load(tmp_path / "theirs.json")
    assert graph.node_ids == hand_edges().node_ids == ["E_11_0", "E_12_1", "0_7_1", "1_-1_1", "3_5_1"]
    np.testing.assert_array_equal(graph.matrix.toarray(), hand_edges().matrix.toarray())
    assert graph.certificate is None and graph.edges.n_layers == 2 and graph.labels["0_7_1"] == "greeting"
    assert graph.edges.token_ids == [11, 12] and graph.edges.logit_strings == {5: "!"}
    assert graph.replacement_score() == pytest.approx(3 / 4)
    graph.save(tmp_path / "ours.json")
    written = json.loads((tmp_path / "ours.json").read_text())
    validate_document(written)
    assert written["qParams"]["supernodes"] == [["greeting", "0_7_1"]]
    assert written["nodes"][2]["clerp"] == "greeting" and written["nodes"][0]["clerp"] == ""
    assert written["nodes"][3]["node_id"] == "1_-1_1"


def test_broken_graph_files_are_refused_in_one_sentence(tmp_path):
    def refusal(change=None, text=None):
        document = others_document()
        if change:
            change(document)
        path = tmp_path / "broken.json"
        path.write_text(json.dumps(document) if text is None else text)
        with pytest.raises(UserError) as error:
            AttributionGraph.load(path)
        message = str(error.value)
        assert "broken.json" in message and "\n" not in message
        return message

    assert "not a graph JSON" in refusal(text='{"metadata": {')
    assert "not a graph JSON" in refusal(text="[1, 2]")
    assert "'links' is missing" in refusal(lambda d: d.pop("links"))
    assert "node 9_9_9" in refusal(lambda d: d["links"].append({"source": "9_9_9", "target": "3_5_1", "weight": 1}))
    assert "'lorsa'" in refusal(lambda d: d["nodes"][2].update(feature_type="lorsa"))
    assert "0_7_0" in refusal(lambda d: d["nodes"][2].update(node_id="0_7_0"))
    assert "no logit node" in refusal(lambda d: d["nodes"].pop())
    assert "newer than 1" in refusal(lambda d: d["metadata"].update(interp={"format_version": 2}))

    def collide(document):
        document["nodes"][2].update(node_id="0_1_1", jsNodeId="0_1-0")

    assert "0_1_1 names two nodes" in refusal(collide)
    with pytest.raises(UserError, match="Cannot read the graph"):
        AttributionGraph.load(tmp_path / "absent.json")


def test_a_failed_save_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    graph = AttributionGraph.from_edges(hand_edges())
    path = tmp_path / "graph.json"
    graph.save(path)
    before = path.read_bytes()
    unwritable = replace(graph, edges=replace(graph.edges, settings={"device": object()}))
    with pytest.raises(UserError, match="plain JSON values"):
        unwritable.save(path)
    with pytest.raises(UserError, match="slug may contain"):
        replace(graph, metadata={"slug": "a b"}).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_graph_that_the_public_frontend_cannot_draw_is_written_with_a_warning(tmp_path):
    edges = synthetic_edges(0, n_layers=1)
    with pytest.warns(UserWarning, match="no node above layer 0"):
        AttributionGraph.from_edges(edges).save(tmp_path / "flat.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AttributionGraph.from_edges(synthetic_edges(0, n_layers=2)).save(tmp_path / "deep.json")


@given(st.text())
def test_slugs_are_always_fit_for_the_frontend(text):
    slug = file_name_part(text)
    assert slug and set(slug) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")


def test_labels_are_for_nodes_of_the_graph():
    graph = AttributionGraph.from_edges(hand_edges())
    with pytest.raises(UserError, match="no node 5_5_5"):
        graph.with_labels({"5_5_5": "nothing"})
    labelled = graph.with_labels({"0_7_1": "greeting"})
    assert labelled.prune(1.0, 1.0).labels == {"0_7_1": "greeting"} and graph.labels == {}
