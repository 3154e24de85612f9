"""The frozen model on a prompt: its logits are the model's, its sources those of brute force; misfits are refused."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from interp.circuits.graph import NodeKind
from interp.circuits.replacement_model import ReplacementModel
from interp.dictionaries import Transcoder
from interp.dictionaries.config import ModelReference
from interp.engines.load import wrap
from interp.errors import PointRefused, UserError
from interp.models.anatomy import Refusal
from interp.models.float64 import true_float64
from interp.points import Address
from tests.circuits.frozen_oracle import LAYOUTS, FrozenModel
from tests.circuits.tiny_graphs import TOKENS, case, transcoders, wrapped
from tests.families.tiny import D_MODEL, build


def unembedded(module: nn.Module, head: str) -> torch.Tensor:
    """The unembedding module's output at the last position of a plain forward pass."""
    seen = []
    handle = module.get_submodule(head).register_forward_hook(lambda m, args, output: seen.append(output[0, -1]))
    with true_float64(), torch.no_grad():
        module(input_ids=torch.tensor([TOKENS]))
    handle.remove()
    return seen[0]


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "gpt_neox_parallel", "gemma2", "granite", "cohere", "phi", "split_llama_mlp"]
)
def test_logit_rows_sum_to_the_models_own_logits_less_their_mean(family):
    tried = case(family, target_tokens=tuple(range(131)), max_feature_nodes=0)
    rows = np.flatnonzero(tried.edges.nodes.is_kind(NodeKind.LOGIT))
    own = unembedded(tried.module, LAYOUTS[family].head) * LAYOUTS[family].logit_scale
    sums = np.asarray(tried.edges.matrix[rows].sum(axis=1)).ravel()
    np.testing.assert_allclose(sums + float(own.mean()), own.numpy(), rtol=0, atol=1e-12)
    np.testing.assert_allclose(tried.edges.pre_activation[rows], sums, rtol=0, atol=1e-12)
    logits = 5.0 * torch.tanh(own / 5.0) if family == "gemma2" else own
    np.testing.assert_allclose(tried.edges.nodes.value[rows], logits.softmax(-1).numpy(), rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "granite", "split_llama"])
def test_latents_errors_and_first_terms_are_those_that_brute_force_finds(family):
    """Of the 60 largest of 70 pre-activations some are negative and some nearly zero."""
    tried = case(family, given=transcoders(k=60, family=family), max_feature_nodes=0)
    values = FrozenModel(tried.module, family, tried.transcoders, TOKENS).values
    assert values is not None
    for layer, state in enumerate(tried.state.layers):
        dense = torch.zeros_like(values.features[layer])
        dense[state.positions, state.latents] = state.activations
        torch.testing.assert_close(dense, values.features[layer], rtol=0, atol=1e-12)
        assert (state.activations > 0).all() and (dense > 0).sum() == len(state.activations)
        torch.testing.assert_close(state.error, values.errors[layer], rtol=0, atol=1e-12)
    scale = {"granite": 3.0}.get(family, 1.0)
    terms = dict(tried.state.terms)
    torch.testing.assert_close(terms["token"], values.tokens * scale, rtol=0, atol=1e-12)
    assert set(terms) == ({"token"} if values.positions is None else {"token", "position"})
    if values.positions is not None:
        torch.testing.assert_close(terms["position"], values.positions, rtol=0, atol=1e-12)


def test_where_a_token_was_not_trained_on_nothing_fires_and_the_error_is_the_whole_output():
    given = transcoders()
    given[1].config.excluded_token_ids = [1, 5, 64]
    tried = case("gemma2", given=given)
    assert tried.state.excluded_positions == [0]
    own = FrozenModel(tried.module, "gemma2", given, TOKENS).mlp_out
    for layer, excluded in ((0, [0]), (1, [0, 2, 5]), (2, [0])):
        state = tried.state.layers[layer]
        assert not np.isin(state.positions.numpy(), excluded).any()
        assert sorted(set(state.positions.tolist())) == [p for p in range(len(TOKENS)) if p not in excluded]
        torch.testing.assert_close(state.error[excluded], own[layer][excluded], rtol=0, atol=1e-12)
    coo, nodes = tried.edges.matrix.tocoo(), tried.edges.nodes
    at = (nodes.pos[coo.col] == 2) & (nodes.layer[coo.col] == 1)
    assert set(nodes.kind[coo.col][at].tolist()) <= {int(NodeKind.ERROR), int(NodeKind.BIAS)}


def test_building_twice_gives_the_same_state_even_from_transcoders_left_in_training_mode():
    given = {layer: transcoder.train() for layer, transcoder in transcoders(activation="batchtopk", k=5).items()}
    before = {layer: copy.deepcopy(transcoder.state_dict()) for layer, transcoder in given.items()}
    rm = ReplacementModel(wrapped("llama"), given)
    first, second = rm.build(TOKENS), rm.build(torch.tensor([TOKENS]))
    for one, two in zip(first.layers, second.layers, strict=True):
        assert torch.equal(one.latents, two.latents) and torch.equal(one.activations, two.activations)
    for layer, transcoder in given.items():
        assert all(torch.equal(before[layer][name], value) for name, value in transcoder.state_dict().items())


def test_a_layer_may_be_named_by_number_address_or_text():
    engine, given = wrapped("llama"), transcoders()
    rm = ReplacementModel(engine, {0: given[0], Address("mlp_in", 1): given[1], "mlp_in.2": given[2]})
    assert rm.transcoders == given
    with pytest.raises(UserError, match=r"resid_pre\.0 is no mlp_in"):
        ReplacementModel(engine, {"resid_pre.0": given[0]})
    with pytest.raises(UserError, match="Two keys name one layer"):
        ReplacementModel(engine, {**given, "mlp_in.1": given[2]})


def changed(layer: int, **fields) -> dict[int, Transcoder]:
    given = transcoders(torch.float32)
    for name, value in fields.items():
        setattr(given[layer].config, name, value)
    return given


def test_transcoders_that_do_not_belong_are_refused_in_one_sentence():
    engine = wrapped("llama", torch.float32)
    own = ModelReference("this", fingerprint=engine.model.fingerprint)
    points = {"input_points": ["mlp_in.1"], "output_points": ["mlp_out.1"]}
    ReplacementModel(engine, changed(1, model=own, **points))
    narrow = {**transcoders(torch.float32), 1: Transcoder(d_in=D_MODEL, d_out=D_MODEL - 1, n_latents=9, k=2)}
    without = {layer: t for layer, t in transcoders(torch.float32).items() if layer != 1}
    beyond = transcoders(torch.float32)
    beyond[3] = beyond[0]
    for given, said in (
        (changed(1, model=ModelReference("another", fingerprint="0" * 8)), "layer 1 was trained on another"),
        (changed(1, **points | {"output_points": ["mlp_out_post.1"]}), "maps mlp_in.1 to mlp_out_post.1"),
        (changed(2, **points), "needs mlp_in.2 to mlp_out.2"),
        (narrow, f"maps {D_MODEL} to {D_MODEL - 1} channels, but .* is {D_MODEL} wide"),
        (without, "has 3 layers; layer 1 has no transcoder"),
        (beyond, "transcoder for layer 3, but .* has 3 layers"),
    ):
        with pytest.raises(UserError, match=said) as raised:
            ReplacementModel(engine, given)
        assert str(raised.value).count("\n") == 0 and str(raised.value).endswith(".")


def test_a_transcoder_has_the_width_of_its_own_group_of_layers():
    with pytest.raises(UserError, match=r"layer 0 maps 48 to 48 channels, but .* is 36 wide there\.$"):
        ReplacementModel(wrapped("split_llama"), transcoders())
    narrow = transcoders(family="split_llama")
    with pytest.raises(UserError, match=r"layer 1 maps 36 to 36 channels, but .* is 48 wide there\.$"):
        ReplacementModel(wrapped("split_llama"), {**narrow, 1: narrow[0]})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_too_coarse_to_be_explained_exactly_is_refused(dtype):
    with pytest.raises(UserError, match=r"load it with dtype float32\.$"):
        ReplacementModel(wrap(build("llama", dtype), prove=False), transcoders(dtype))


def test_a_mixture_of_experts_is_replaced_like_any_mlp():
    """The transcoder takes the whole sublayer's place, router and experts, so nothing of them needs to be linear."""
    tried = case("qwen3_moe")
    rows = tried.edges.nodes.is_kind(NodeKind.LOGIT)
    own = unembedded(tried.module, "lm_head")
    chosen = tried.edges.nodes.index[rows]
    sums = np.asarray(tried.edges.matrix.sum(axis=1)).ravel()[rows]
    np.testing.assert_allclose(sums, (own[chosen] - own.mean()).numpy(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "point",
    [
        *("attn_probs.1", "value.1", "z.1", "attn_norm_scale.1", "mlp_norm_scale.1"),
        *("attn_post_norm_scale.1", "mlp_post_norm_scale.1", "resid_pre.0", "final_norm_scale", "lm_head", "logits"),
    ],
)
def test_a_point_whose_proof_failed_is_not_built_upon(point, monkeypatch):
    engine = wrapped("gemma2")
    monkeypatch.setitem(engine.anatomy.refused, Address.parse(point), Refusal("its equation fails"))
    with pytest.raises(PointRefused, match=f"{point} is not there: its equation fails"):
        ReplacementModel(engine, transcoders())


class MeanAbsoluteNorm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.abs().mean(-1, keepdim=True)


def test_a_final_norm_of_unknown_kind_is_refused():
    module = build("llama")
    module.model.norm = MeanAbsoluteNorm()
    with pytest.raises(PointRefused, match="lm_head is not there"):
        ReplacementModel(wrap(module), transcoders(torch.float32))
