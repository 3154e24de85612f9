"""Without a model a translation tells what holds on every family, both ways, and refuses the rest with what decides."""

from functools import cache

import pytest

from interp.errors import UserError
from interp.names import TOOLS, NameRefused, meanings, names_of, point_of, spell
from interp.points import POINTS, Address
from tests.families.loaded import engine

SEVEN = ["bloom", "mpt", "gemma2", "olmo2", "gpt_neox_parallel", "qwen3_moe", "granite"]


@cache
def told() -> list[tuple[str, str, Address]]:
    """Every tool's every name in layer 1 and in the trunk that is handed out without a model."""
    addresses = [Address(point.name, 1 if point.per_layer else None) for point in POINTS.values()]
    return [(tool, name, address) for tool in TOOLS for address in addresses for name in names_of(address, tool)]


@pytest.mark.parametrize("tool", TOOLS)
def test_every_name_goes_round(tool: str) -> None:
    names = {name: address for other, name, address in told() if other == tool}
    assert len(names) == sum(other == tool for other, _, _ in told())  # no name of a tool has two meanings
    assert len(names) >= {"nnsight": 0, "dictionary_learning": 1}.get(tool, 3)
    for name, address in names.items():
        assert point_of(name, tool) == address
        if address.layer is not None:
            assert point_of(name.replace("1", "41"), tool) == Address(address.name, 41)


@pytest.mark.parametrize("family", [*SEVEN, "split_llama"])
def test_what_is_told_without_a_model_holds_on_every_model(family: str) -> None:
    """A name that means P without a model means P on this one, or nothing where this model has no P."""
    layout, checked = engine(family).layout, 0
    for tool, name, address in told():
        if tool not in ("hf", "sparsify", "gemma_scope") and address in layout.where:
            # Paths are the family's own, and Gemma Scope is for Gemma.
            assert point_of(name, tool, layout) == address
            checked += 1
    assert checked > 30


@pytest.mark.parametrize(
    ("tool", "name", "address"),
    [
        ("transformer_lens", "blocks.5.hook_mlp_out", "mlp_out_post.5"),
        ("transformer_lens", "blocks.5.hook_attn_out", "attn_out_post.5"),
        ("transformer_lens", "blocks.5.attn.hook_pattern", "attn_probs.5"),
        ("transformer_lens", "blocks.5.mlp.hook_in", "mlp_in.5"),
        ("transformer_lens", "ln_final.hook_normalized", "final_normalized"),
        ("transformer_lens_legacy", "blocks.5.attn.hook_q", "query.5"),
        ("transformer_lens_legacy", "blocks.5.hook_attn_in", "resid_pre.5"),
        ("circuit_tracer", "blocks.5.hook_mlp_out", "mlp_out_post.5"),
        ("nnterp", "mlps_input[5]", "mlp_in.5"),
        ("nnterp", "layers_output[5]", "resid_post.5"),
        ("nnsight", "model.layers[5].output", "resid_post.5"),
        ("hf", "model.layers.5 output", "resid_post.5"),
        ("hf", "model.layers.5.mlp output", "mlp_out.5"),
    ],
)
def test_names_by_hand(tool: str, name: str, address: str) -> None:
    assert point_of(name, tool) == Address.parse(address)


@pytest.mark.parametrize(
    ("tool", "name", "decides"),
    [
        ("transformer_lens", "blocks.5.mlp.hook_out", "BLOOM"),
        ("transformer_lens", "blocks.5.attn.hook_out", "BLOOM"),
        ("transformer_lens", "blocks.5.hook_mlp_in", "parallel"),
        ("transformer_lens", "blocks.5.ln2.hook_normalized", "where the block has its norms"),
        ("transformer_lens", "blocks.5.mlp.hook_pre", "neurons or experts"),
        ("transformer_lens_legacy", "blocks.5.ln2.hook_normalized", "kind of the norm"),
        ("nnterp", "mlps_output[5]", "BLOOM"),
        ("hf", "transformer.h.5.mlp output", "BLOOM"),
        ("nnsight", "transformer.h[5].mlp.output", "BLOOM"),
        ("hf", "model.layers.5.self_attn.o_proj input", "calls its modules"),
    ],
)
def test_what_depends_on_the_model_is_refused_with_what_decides(tool: str, name: str, decides: str) -> None:
    with pytest.raises(NameRefused, match="no meaning that holds on every family: it depends on") as refusal:
        point_of(name, tool)
    assert decides in str(refusal.value)


@pytest.mark.parametrize(
    ("tool", "name"),
    [
        ("transformer_lens", "blocks.x.hook_resid_pre"),
        ("transformer_lens", "blocks..hook_resid_pre"),
        ("transformer_lens", "blocks.-1.hook_resid_pre"),
        ("transformer_lens", "blocks.².hook_resid_pre"),
        ("transformer_lens", "blocks.5.hook_nothing"),
        ("transformer_lens", "blocks.5.attn.hook_cos"),
        ("sparsify", "layers."),
        ("nnterp", "layers_output[5"),
        ("nnterp", "layers_output[]"),
        ("hf", "model.layers.5.mlp"),
        ("sae_lens", ""),
        ("gemma_scope", "layer_x/mlp"),
        ("dictionary_learning", "resid_post_layer_"),
    ],
)
def test_what_is_no_name_is_refused(tool: str, name: str) -> None:
    with pytest.raises(NameRefused):
        point_of(name, tool)


def test_a_point_without_a_name_is_refused_with_the_nearest_that_have_one() -> None:
    assert names_of("resid_pre.2", "transformer_lens")[:2] == ["blocks.2.hook_resid_pre", "blocks.2.hook_in"]
    assert names_of("mlp_normalized.2", "transformer_lens") == []
    with pytest.raises(NameRefused, match=r"nnterp has no name .* nearest that it names: .*mlp_in\.2"):
        spell("mlp_normalized.2", "nnterp")
    with pytest.raises(NameRefused, match=r"none of its names picks one head or stream; nearest: z\.2"):
        spell("z.2.head-1", "transformer_lens")


def test_an_unknown_tool_is_an_error() -> None:
    for call in (lambda: names_of("z.2", "lens"), lambda: point_of("z", "lens")):
        with pytest.raises(UserError, match="known: transformer_lens"):
            call()


def test_whose_name_it_is_is_found_out() -> None:
    assert list(meanings("mlp_out_post.4")) == ["interp"]
    assert set(meanings("blocks.4.hook_mlp_out")) == {
        "transformer_lens", "transformer_lens_legacy", "sae_lens", "circuit_tracer",
    }  # fmt: skip
    assert "nnterp" in meanings("layers_output[5]") and "gemma_scope" in meanings("layer_12/mlp")
    with pytest.raises(NameRefused, match="BLOOM"):
        meanings("blocks.4.mlp.hook_out")
    with pytest.raises(UserError, match="No point is called 'mlp_outt'; nearest: mlp_out"):
        meanings("mlp_outt.4")
