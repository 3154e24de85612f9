"""A hook name and an Address name one place, both ways: the group's own count of layers against that of the whole."""

from pathlib import Path

import pytest

from interp.errors import UserError
from interp.names import NameRefused, meanings, point_of, spell
from interp.names.hooks import address, address_of, hook_of, layer_of
from interp.points import POINTS, Address
from interp.scripts.names import Names, run
from tests.families.loaded import engine
from tests.families.tiny import build
from tests.training.conftest import tiny_tokenizer

BLOCKS = ("layers_first.0", "layers_first.1", "layers_last.0", "layers_last.1", "layers_last.2")
HOOKS = {
    "embed": "embeddings",
    "layers_first.0.attn_out": "attn_out.0",
    "layers_first.0.mlp_in": "mlp_in.0",
    "layers_first.0.mlp_out": "mlp_out.0",
    "layers_first.0.resid_post": "resid_post.0",
    "layers_first.1.attn_out": "attn_out.1",
    "layers_first.1.mlp_in": "mlp_in.1",
    "layers_first.1.mlp_out": "mlp_out.1",
    "layers_first.1.resid_post": "resid_post.1",
    "adapter_out": "adapter_out",
    "layers_last.0.attn_out": "attn_out.2",
    "layers_last.0.mlp_in": "mlp_in.2",
    "layers_last.0.mlp_out": "mlp_out.2",
    "layers_last.0.resid_post": "resid_post.2",
    "layers_last.2.attn_out": "attn_out.4",
    "layers_last.2.mlp_in": "mlp_in.4",
    "layers_last.2.mlp_out": "mlp_out.4",
    "layers_last.2.resid_post": "resid_post.4",
    "layers_last.0.attn_probs": "attn_probs.2",
    "logits": "logits",
}
OTHERS = {"model.layers.3.resid_pre": "resid_pre.3", "transformer.h.0.z": "z.0"}
"""Of models with one group of blocks."""


@pytest.mark.parametrize("hook", HOOKS)
def test_every_name_of_the_contract_is_its_address_and_back(hook: str) -> None:
    right = Address.parse(HOOKS[hook])
    assert address_of(hook, BLOCKS) == address(hook, BLOCKS) == address(f" {hook} ", BLOCKS) == right
    assert hook_of(right, BLOCKS) == hook_of(HOOKS[hook], BLOCKS) == hook
    assert address(HOOKS[hook], BLOCKS) == address(right, BLOCKS) == right


def test_every_point_of_the_table_goes_round() -> None:
    for point in POINTS.values():
        for layer in range(5) if point.per_layer else [None]:
            one = Address(point.name, layer)
            assert address_of(hook_of(one, BLOCKS), BLOCKS) == one


def test_models_with_one_group_have_hook_names_too() -> None:
    blocks = {"model": [f"model.layers.{i}" for i in range(4)], "transformer": ["transformer.h.0"]}
    for hook, text in OTHERS.items():
        assert address(hook, blocks[hook.partition(".")[0]]) == Address.parse(text)
        assert hook_of(text, blocks[hook.partition(".")[0]]) == hook


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("layers_first.2.resid_post", r"There is no block 'layers_first\.2'; the model has layers_first\.0 to "
         r"layers_first\.1, layers_last\.0 to layers_last\.2\."),
        ("layers.0.resid_post", r"There is no block 'layers\.0'"),
        ("layers_last.01.resid_post", r"There is no block 'layers_last\.01'"),
        ("layers_first.0.mlp_outt", r"'layers_first\.0\.mlp_outt' ends in no point of a layer; nearest .*: mlp_out,"),
        ("layers_first.0.logits", r"ends in no point of a layer"),
    ],
)  # fmt: skip
def test_a_name_that_names_nothing_says_what_there_is(name: str, sentence: str) -> None:
    for call in (address_of, address):
        with pytest.raises(NameRefused, match=sentence):
            call(name, BLOCKS)


def test_what_is_neither_a_hook_name_nor_an_address_is_told_as_an_address() -> None:
    with pytest.raises(UserError, match="No point is called 'resid_pst'; nearest: resid_post"):
        address("resid_pst.1", BLOCKS)
    with pytest.raises(UserError, match=r"resid_post exists once per layer: write it with one, as in resid_post\.0"):
        address("resid_post", BLOCKS)
    with pytest.raises(UserError, match="is no address; write a point and a layer"):
        address("layers_first.0 output", BLOCKS)


def test_one_block_is_no_range() -> None:
    with pytest.raises(NameRefused, match=r"the model has layers_first\.0, layers_last\.0 to layers_last\.1\.$"):
        layer_of("layers_first.1", ("layers_first.0", "layers_last.0", "layers_last.1"))


def test_heads_streams_and_layers_beyond_have_no_hook_name() -> None:
    with pytest.raises(NameRefused, match=r"picks one head or stream; nearest: layers_last\.0\.z\."):
        hook_of("z.2.head-1", BLOCKS)
    with pytest.raises(NameRefused, match=r"picks one head or stream; nearest: layers_first\.1\.resid_post\."):
        hook_of("resid_post.1.stream-0", BLOCKS)
    with pytest.raises(NameRefused, match=r"resid_post\.5 does not exist: the model has layers 0 to 4"):
        hook_of("resid_post.5", BLOCKS)
    with pytest.raises(NameRefused, match="none of its names picks one head"):
        spell("z.1.head-2", "hooks", engine("split_llama").layout)


@pytest.mark.parametrize("family", ["split_llama", "llama"])
def test_on_a_model_only_what_it_serves_is_spoken(family: str) -> None:
    layout, first = engine(family).layout, {"split_llama": "layers_first.0", "llama": "model.layers.0"}[family]
    assert [spelling.name for spelling in spell("mlp_out.0", "hooks", layout)] == [f"{first}.mlp_out"]
    assert point_of(f"{first}.mlp_out", "hooks", layout) == Address("mlp_out", 0)
    with pytest.raises(NameRefused, match=r"which does not exist on .*: no norm stands there"):
        point_of(f"{first}.attn_post_normalized", "hooks", layout)
    if family == "llama":
        with pytest.raises(NameRefused, match="one group, with no adapter"):
            point_of("adapter_out", "hooks", layout)


def test_whose_name_a_hook_name_is() -> None:
    layout = engine("split_llama").layout
    assert {tool: str(a.address) for tool, a in meanings("layers_last.0.resid_post", None, layout).items()} == {
        "hooks": "resid_post.1"
    }
    assert list(meanings("embed")) == ["hooks"] and list(meanings("final_norm")) == ["interp", "hooks"]
    assert list(meanings("mlp_out_post.4")) == ["interp"] and "interp" in meanings("logits")
    with pytest.raises(NameRefused, match="depends on what the model calls its groups of blocks; name a model"):
        meanings("layers_first.0.resid_post")
    with pytest.raises(NameRefused, match=r"There is no block 'layers_first\.1'"):
        meanings("layers_first.1.resid_post", None, layout)


def test_the_command_translates_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build("split_llama").save_pretrained(tmp_path / "split")  # type: ignore[operator]
    tiny_tokenizer().save_pretrained(tmp_path / "split" / "first")
    model = str(tmp_path / "split")
    run(Names("layers_first.0.resid_post", model=model, to="interp"))
    run(Names("resid_post.0", model=model, to="hooks"))
    run(Names("layers_last.1.mlp_out", model=model, to="hf"))
    run(Names("layers_last.1.mlp output", model=model, to="hooks"))
    told = [line for line in capsys.readouterr().out.splitlines() if line]
    assert told[:3] == ["resid_post.0", "layers_first.0.resid_post", "layers_last.1.mlp output"]
    assert "layers_last.1.mlp_out" in told[3:]
