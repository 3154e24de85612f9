"""An address has one text, and only places that can exist have one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interp.errors import UserError
from interp.points import BLOCK_POINTS, POINTS, Address

LAYERED = [p.name for p in POINTS.values() if p.per_layer]
HEADED = [p.name for p in POINTS.values() if p.has_heads]


@given(st.sampled_from(LAYERED), st.integers(0, 10**6))
def test_text_and_address_are_inverse(name: str, layer: int) -> None:
    address = Address(name, layer)
    assert str(address) == f"{name}.{layer}"
    assert Address.parse(str(address)) == address == address.whole
    assert hash(Address.parse(str(address))) == hash(address)


@given(st.sampled_from(HEADED), st.integers(0, 99), st.integers(0, 200))
def test_a_head_is_part_of_the_text(name: str, layer: int, head: int) -> None:
    address = Address(name, layer, head=head)
    assert str(address) == f"{name}.{layer}.head-{head}"
    assert Address.parse(str(address)) == address != address.whole


def test_examples_of_the_design() -> None:
    assert Address.parse("mlp_out_post.4") == Address("mlp_out_post", 4)
    assert Address.parse("z.3.head-2") == Address("z", 3, head=2)
    assert Address.parse("resid_post.5.stream-1") == Address("resid_post", 5, stream=1)
    assert Address.parse("final_norm") == Address("final_norm")
    same = Address("z", 1)
    assert Address.parse(same) is same


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("resid_pots.3", "nearest: resid_post"),
        ("resid_post", "once per layer"),
        ("logits.2", "once per model"),
        ("mlp_in.2.head-1", "no head axis: its shape per token is d_model"),
        ("z.2.stream-1", "no stream axis: its shape per token is heads x d_head"),
        ("resid_post.-1", "is no address"),
        ("resid_post.1.2", "is no address"),
        ("resid_post.x", "is no address"),
        ("Resid_post.1", "is no address"),
        ("z.1.head-", "is no address"),
        ("", "is no address"),
        (" resid_post.1", "is no address"),
        ("resid_post.1\n", "is no address"),
    ],
)
def test_what_is_no_place_is_an_error_that_says_why(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Address.parse(text)


def test_negative_layers_are_an_error() -> None:
    with pytest.raises(UserError, match="count from 0"):
        Address("resid_post", -1)


def test_block_level_points_are_per_layer_and_as_wide_as_the_model() -> None:
    assert {
        "resid_pre",
        "attn_in",
        "attn_out",
        "attn_out_post",
        "resid_mid",
        "mlp_in",
        "mlp_out",
        "mlp_out_post",
    } <= set(BLOCK_POINTS)
    assert not {"z", "mlp_act", "final_norm", "embeddings", "mlp_norm_scale"} & set(BLOCK_POINTS)


def test_every_point_states_its_meaning_and_one_shape() -> None:
    for point in POINTS.values():
        assert point.meaning and point.shape
    for name in ("attn_probs", "attn_scores"):
        assert POINTS[name].shape == ("heads", "query", "key")
    for name in ("key", "value", "key_rot", "k_norm_in"):
        assert POINTS[name].shape == ("kv_heads", "d_head")
