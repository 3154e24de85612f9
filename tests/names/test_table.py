"""Other tools' names translate both ways, and a name that means different tensors in different families is refused."""

import pytest

from interp.errors import UserError
from interp.names import TOOLS, names_of, point_of
from interp.names.table import NAMES
from interp.points import POINTS, Address


@pytest.mark.parametrize("row", NAMES, ids=lambda row: f"{row.tool}:{row.pattern}")
def test_every_row_goes_round(row) -> None:
    per_layer = POINTS[row.point].per_layer
    assert per_layer == ("{l}" in row.pattern)
    for layer in (0, 7, 41):
        address = Address(row.point, layer if per_layer else None)
        name = row.pattern.format(l=layer)
        assert point_of(name, row.tool) == address
        assert name in names_of(address, row.tool)


def test_no_name_of_a_tool_has_two_meanings() -> None:
    names = [(row.tool, row.pattern) for row in NAMES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("tool", "name", "address"),
    [
        ("transformer_lens", "blocks.5.hook_mlp_out", "mlp_out_post.5"),
        ("transformer_lens", "blocks.5.mlp.hook_out", "mlp_out.5"),
        ("transformer_lens", "blocks.5.hook_attn_out", "attn_out_post.5"),
        ("transformer_lens", "blocks.5.attn.hook_pattern", "attn_probs.5"),
        ("circuit_tracer", "blocks.5.hook_mlp_out", "mlp_out_post.5"),
        ("nnterp", "mlps_output[5]", "mlp_out.5"),
        ("nnterp", "layers_output[5]", "resid_post.5"),
        ("sparsify", "layers.3", "resid_post.3"),
        ("sparsify", "layers.3.mlp", "mlp_out.3"),
        ("gemma_scope", "layer_12/mlp", "mlp_out_post.12"),
    ],
)
def test_names_by_hand(tool: str, name: str, address: str) -> None:
    assert point_of(name, tool) == Address.parse(address)


@pytest.mark.parametrize(
    ("tool", "name"),
    [
        ("transformer_lens", "blocks.5.hook_mlp_in"),  # the legacy stream before the norm
        ("transformer_lens", "blocks.5.hook_attn_in"),
        ("transformer_lens", "blocks.5.ln2.hook_normalized"),
        ("transformer_lens", "blocks.x.hook_resid_pre"),
        ("transformer_lens", "blocks..hook_resid_pre"),
        ("transformer_lens", "blocks.-1.hook_resid_pre"),
        ("transformer_lens", "blocks.².hook_resid_pre"),
        ("sparsify", "layers."),
        ("nnterp", "layers_output[5"),
        ("nnterp", "layers_output[]"),
        ("sae_lens", ""),
    ],
)
def test_a_name_without_one_meaning_is_refused_with_those_that_have_one(tool: str, name: str) -> None:
    with pytest.raises(UserError, match="no meaning that holds on every family; those that do: ") as error:
        point_of(name, tool)
    assert TOOLS[tool] in str(error.value)


def test_a_point_without_a_name_has_none() -> None:
    assert names_of("resid_pre.2", "transformer_lens") == ["blocks.2.hook_resid_pre", "blocks.2.hook_in"]
    assert names_of("mlp_normalized.2", "transformer_lens") == []
    assert names_of("z.2", "transformer_lens") == ["blocks.2.attn.hook_z"]
    assert names_of("z.2.head-1", "transformer_lens") == []  # that name means every head


def test_an_unknown_tool_is_an_error() -> None:
    for call in (lambda: names_of("z.2", "lens"), lambda: point_of("z", "lens")):
        with pytest.raises(UserError, match="known: transformer_lens"):
            call()
