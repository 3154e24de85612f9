"""Every edge: against autograd through the real module, against moved sources, and summed to what it explains."""

import numpy as np
import pytest
import torch

from interp.circuits.attribution import AttributionComputer, AttributionConfig
from interp.circuits.certificate import certify
from interp.circuits.graph import Edges, NodeKind
from interp.circuits.replacement_model import ReplacementModel
from interp.errors import InterpError, UserError
from tests.circuits.frozen_oracle import LAYOUTS, FrozenModel, by_node, random_factors
from tests.circuits.tiny_graphs import BOS, TOKENS, Case, case, standard, transcoders, wrapped
from tests.families.tiny import EVERY

NOT_LINEAR = {
    "bloom": r"no linear start: a norm stands behind its embeddings",
}
"""Families that have no frozen linear form, and why."""
SEVERAL = ["llama", "gpt2", "gpt_neox_parallel", "gemma2", "gemma3", "olmo2", "cohere"]
EXACT = sorted(set(EVERY) - set(NOT_LINEAR))


def rows_of(edges: Edges) -> np.ndarray:
    return np.flatnonzero(~np.isnan(edges.pre_activation))


def feature_of(edges: Edges, row: int) -> tuple[int, int, int] | None:
    nodes = edges.nodes
    if nodes.kind[row] != NodeKind.FEATURE:
        return None
    return int(nodes.layer[row]), int(nodes.pos[row]), int(nodes.index[row])


def columns(edges: Edges, *kinds: NodeKind) -> np.ndarray:
    return edges.nodes.is_kind(*kinds)


@pytest.fixture
def llama() -> Case:
    return standard("llama")


@pytest.mark.parametrize("family", EXACT)
def test_rows_sum_to_their_pre_activations_in_float64(family):
    for skip in (True, False):
        tried = standard(family, skip)
        certificate = certify(tried.edges)
        assert certificate.max_relative_error < 1e-13
        assert certificate.rows == 4 + tried.state.n_active and tried.state.n_active > 60
        assert tried.edges.excluded_positions == [0]


@pytest.mark.parametrize("family", [*SEVERAL, "split_llama_mlp"])
def test_rows_sum_to_their_pre_activations_in_float32(family):
    certificate = certify(case(family, torch.float32).edges)
    assert 0 < certificate.max_relative_error < 1e-5


@pytest.mark.parametrize(("activation", "k"), [("relu", None), ("jumprelu", None), ("batchtopk", 5)])
def test_rows_sum_whatever_decides_which_latents_fire(activation, k):
    tried = case("gemma2", given=transcoders(activation=activation, k=k))
    assert certify(tried.edges).max_relative_error < 1e-13 and tried.state.n_active > 50


@pytest.mark.parametrize("tokens", [[BOS], [7], [1, 1, 1], [9, BOS, 4]])
def test_rows_sum_on_short_prompts_and_wherever_untrained_tokens_stand(tokens):
    tried = case("gpt2", tokens=tokens)
    assert certify(tried.edges).max_relative_error < 1e-13
    assert tried.edges.excluded_positions == [i for i, t in enumerate(tokens) if t == BOS]
    features = columns(tried.edges, NodeKind.FEATURE)
    assert not np.isin(tried.edges.nodes.pos[features], tried.edges.excluded_positions).any()


@pytest.mark.parametrize("family", sorted(LAYOUTS))
def test_every_edge_is_gradient_times_value_in_the_real_module(family):
    for skip in (True, False) if family in ("llama", "gemma2", "gpt2") else (True,):
        tried = standard(family, skip)
        edges, rows = tried.edges, rows_of(tried.edges)
        frozen = FrozenModel(tried.module, family, tried.transcoders, TOKENS)
        frozen.run(grad=True)
        sources = ~columns(edges, NodeKind.LOGIT)
        assert columns(edges, NodeKind.FEATURE, NodeKind.LOGIT)[rows].all() and len(rows) == 4 + tried.state.n_active
        matrix = edges.matrix.toarray()
        assert not matrix[:, ~sources].any()
        for row in rows:
            target = frozen.target(edges.nodes, row)
            assert target.item() == pytest.approx(edges.pre_activation[row], abs=1e-11)
            expected = frozen.row(target, edges.nodes, feature_of(edges, row))
            np.testing.assert_allclose(matrix[row, sources], expected[sources], rtol=0, atol=1e-11)


@pytest.mark.parametrize("family", sorted(LAYOUTS))
def test_the_frozen_module_moves_by_what_the_edges_say_however_far_its_sources_are_moved(family):
    tried = standard(family)
    edges, rows = tried.edges, rows_of(tried.edges)
    frozen = FrozenModel(tried.module, family, tried.transcoders, TOKENS)
    factors = random_factors(frozen, torch.Generator().manual_seed(0), size=100.0)
    frozen.run(factors)
    moved = np.array([frozen.target(edges.nodes, row).item() for row in rows])
    assert np.abs(moved - edges.pre_activation[rows]).max() > 30
    weights = by_node(edges.nodes, factors, torch.ones(3, len(TOKENS)))
    np.testing.assert_allclose(moved, edges.matrix[rows] @ weights, rtol=0, atol=1e-10)


def test_no_edge_comes_from_a_later_position_or_reaches_back_in_depth(llama):
    coo, nodes = llama.edges.matrix.tocoo(), llama.edges.nodes
    assert (nodes.pos[coo.col] <= nodes.pos[coo.row]).all()
    features = columns(llama.edges, NodeKind.FEATURE)
    both = features[coo.col] & features[coo.row]
    assert both.any() and (nodes.layer[coo.col][both] < nodes.layer[coo.row][both]).all()


def test_in_parallel_blocks_a_features_inputs_skip_its_own_layers_attention():
    """With one layer, an MLP that reads the block's input knows its own position only; after attention it knows all."""
    for family, knows_others in (("gpt_neox_parallel", False), ("gpt_neox_sequential", True)):
        tried = standard(family)
        coo, nodes = tried.edges.matrix.tocoo(), tried.edges.nodes
        first = (nodes.kind[coo.row] == NodeKind.FEATURE) & (nodes.layer[coo.row] == 0)
        assert (nodes.pos[coo.col][first] != nodes.pos[coo.row][first]).any() == knows_others


def test_fewer_rows_leave_the_kept_rows_as_they_are(llama):
    nodes, full = llama.edges.nodes, llama.edges.matrix.toarray()
    some = case("llama", max_feature_nodes=20)
    assert np.array_equal(some.edges.nodes.index, nodes.index)
    rows = rows_of(some.edges)
    np.testing.assert_allclose(some.edges.matrix.toarray()[rows], full[rows], rtol=0, atol=1e-14)
    assert certify(some.edges).max_relative_error < 1e-13 and certify(some.edges).rows == 24

    logits, features = columns(llama.edges, NodeKind.LOGIT), columns(llama.edges, NodeKind.FEATURE)
    strength = (np.abs(full[logits]) * nodes.value[logits][:, None]).sum(0)
    chosen = [row for row in rows if features[row]]
    left = np.flatnonzero(features & ~np.isin(np.arange(len(nodes)), chosen))
    assert len(chosen) == 20 and strength[chosen].min() >= strength[left].max() > 0
    assert case("llama", max_feature_nodes=0).edges.matrix.nnz == np.count_nonzero(full[logits])


def test_logits_are_the_smallest_likeliest_set_that_reaches_the_mass(llama):
    probabilities = llama.state.logits.float().softmax(-1)
    order = probabilities.argsort(descending=True)
    for mass in (0.01, 0.2, 0.5):
        edges = case("llama", max_logits=100, logit_mass=mass, max_feature_nodes=0).edges
        logits = columns(edges, NodeKind.LOGIT)
        n = int(logits.sum())
        assert edges.nodes.index[logits].tolist() == order[:n].tolist()
        np.testing.assert_allclose(edges.nodes.value[logits], probabilities[order[:n]].numpy(), rtol=1e-6)
        assert probabilities[order[:n]].sum() >= mass > probabilities[order[: n - 1]].sum()
    edges = case("llama", target_tokens=(9, 3, 9), max_feature_nodes=0).edges
    assert edges.nodes.index[columns(edges, NodeKind.LOGIT)].tolist() == [9, 3]


def test_a_larger_decoder_bias_takes_from_the_errors_what_it_gives_to_the_biases(llama):
    given = transcoders()
    shift = torch.linspace(-3, 5, given[1].b_dec.numel(), dtype=torch.float64)
    with torch.no_grad():
        given[1].b_dec.add_(shift)
    moved = case("llama", given=given).edges
    difference = moved.matrix.toarray() - llama.edges.matrix.toarray()
    nodes = moved.nodes
    changed = np.abs(difference).max(0) > 1e-12
    assert changed.any()
    assert (columns(moved, NodeKind.ERROR, NodeKind.BIAS) & (nodes.layer == 1) & (nodes.pos > 0))[changed].all()
    for pos in range(1, len(TOKENS)):
        error, bias = (
            (nodes.layer == 1) & (nodes.pos == pos) & columns(moved, kind) for kind in (NodeKind.ERROR, NodeKind.BIAS)
        )
        assert np.abs(difference[:, bias]).max() > 1e-3
        np.testing.assert_allclose(difference[:, error], -difference[:, bias], rtol=0, atol=1e-12)


def test_a_larger_encoder_bias_moves_its_own_bias_edge_and_the_values_that_fire():
    """All latents of layer 1 move by one number, so the same ones fire: gradients stay, values and errors follow."""
    before, given = standard("llama"), transcoders()
    with torch.no_grad():
        given[1].b_enc.add_(0.25)
    after = case("llama", given=given)
    assert before.state.layers[1].activations.min() > 0
    old, new, nodes = before.edges.matrix.toarray(), after.edges.matrix.toarray(), before.edges.nodes
    assert np.array_equal(after.edges.nodes.index, nodes.index)
    mine = columns(before.edges, NodeKind.FEATURE) & (nodes.layer == 1)
    values = [case_.state.layers[1].activations.numpy() for case_ in (before, after)]
    np.testing.assert_allclose(values[1] - values[0], 0.25, rtol=0, atol=1e-13)
    np.testing.assert_allclose(new[:, mine] / values[1], old[:, mine] / values[0], rtol=0, atol=1e-12)
    free = ~mine & ~((nodes.layer == 1) & columns(before.edges, NodeKind.ERROR, NodeKind.BIAS))
    np.testing.assert_allclose(new[:, free], old[:, free], rtol=0, atol=1e-12)
    gained = (new - old)[:, columns(before.edges, NodeKind.BIAS) & (nodes.layer == 1)]
    np.testing.assert_allclose(gained[mine], 0.25 * np.eye(len(TOKENS))[nodes.pos[mine]], rtol=0, atol=1e-12)
    np.testing.assert_allclose(gained[~mine], 0, rtol=0, atol=1e-12)


def test_renumbering_latents_renumbers_nodes_and_nothing_else(llama):
    given = transcoders()
    order = torch.randperm(70, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for name in ("W_enc", "b_enc", "W_dec"):
            parameter = getattr(given[1], name)
            parameter.copy_(parameter[order].clone())
    moved = case("llama", given=given).edges
    nodes = llama.edges.nodes
    mine = columns(llama.edges, NodeKind.FEATURE) & (nodes.layer == 1)
    assert np.array_equal(order.numpy()[moved.nodes.index[mine]], nodes.index[mine])
    assert np.array_equal(moved.nodes.index[~mine], nodes.index[~mine])
    np.testing.assert_allclose(moved.matrix.toarray(), llama.edges.matrix.toarray(), rtol=0, atol=1e-13)


def test_progress_is_told_of_every_layer(llama):
    heard: list[tuple[str, int, int, str]] = []
    AttributionComputer(llama.rm, AttributionConfig(), lambda *said: heard.append(said)).compute_full_graph(
        llama.state, torch.tensor([TOKENS])
    )
    assert heard == [("attribution", done, 3, "layers") for done in (1, 2, 3)]


def test_wrong_requests_are_told_in_one_sentence(llama):
    computer = AttributionComputer(llama.rm, AttributionConfig(target_tokens=(131,)))
    with pytest.raises(UserError, match="Target token 131 is outside the vocabulary of 131 tokens"):
        computer.compute_full_graph(llama.state, TOKENS)
    with pytest.raises(UserError, match="not the prompt that the state was built on"):
        computer.compute_full_graph(llama.state, TOKENS[1:])
    with pytest.raises(UserError, match="at least one logit"):
        AttributionConfig(max_logits=0)
    with pytest.raises(UserError, match="-1 is below 0"):
        AttributionConfig(max_feature_nodes=-1)
    for mass in (0.0, 1.1):
        with pytest.raises(UserError, match="above 0 and up to 1"):
            AttributionConfig(logit_mass=mass)


@pytest.mark.parametrize("family", sorted(NOT_LINEAR))
def test_a_model_without_a_linear_form_is_refused_with_the_reason(family):
    with pytest.raises(InterpError, match=NOT_LINEAR[family]):
        ReplacementModel(wrapped(family), transcoders())
