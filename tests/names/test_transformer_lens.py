"""TransformerLens' bridge on the same weights: every name that its cache holds is translated rightly, or refused."""

import pytest

from interp.names import NameRefused, read, spell
from interp.points import POINTS, Address
from tests.families.loaded import engine
from tests.families.tiny import D_MODEL, N_LAYERS

from .comparison import compare
from .conftest import FAMILIES, Peer


@pytest.mark.parametrize("family", FAMILIES)
def test_every_name_of_the_cache(family: str, transformer_lens: Peer, record_property) -> None:
    tensors = transformer_lens(family)
    assert len(tensors) > 100 and f"blocks.{N_LAYERS - 1}.hook_resid_post" in tensors
    found = compare("transformer_lens", family, tensors)
    assert not found.wrong
    assert all(reason.endswith(".") and len(reason) > 40 for reason in found.refused.values())
    block = [name for name in tensors if name.startswith("blocks.")]
    wide = [name for name in block if tensors[name].shape[-1] == D_MODEL]
    record_property("names", f"{family}: {len(found.translated)} translated, {len(found.refused)} refused")
    assert found.share(wide) >= 0.9
    assert found.share(block) >= 0.89  # the norms inside attention have two points of four, and cosines and sines none


@pytest.mark.parametrize("family", FAMILIES)
def test_what_exists_only_once_a_switch_is_set(family: str, transformer_lens: Peer) -> None:
    found = compare("transformer_lens", family, transformer_lens(f"{family}.forked"))
    assert not found.wrong
    if family != "phi":  # one norm for both sublayers: the bridge fires nothing before the MLP
        assert {a.address.name for a in found.translated.values()} & {"resid_mid", "resid_pre", "mlp_in"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_name_that_is_handed_out_exists(family: str, transformer_lens: Peer) -> None:
    cache, layout = transformer_lens(family), engine(family).layout
    for point in POINTS.values():
        address = Address(point.name, 1 if point.per_layer else None)
        if address not in layout.where:
            continue
        try:
            spellings = spell(address, "transformer_lens", layout)
        except NameRefused:
            continue
        for spelling in spellings:
            assert spelling.name in cache or "exists once" in spelling.note, f"{family}: {address} as {spelling.name}"


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox_parallel", "gpt_neox_sequential", "qwen3"])
def test_every_name_of_the_legacy_class(family: str, transformer_lens: Peer) -> None:
    """The class of 3.x differs from that of 2.x in one thing: LayerNorm fires hook_normalized before gain and bias."""
    tensors = transformer_lens(f"{family}.legacy")
    found = compare("transformer_lens_legacy", family, tensors)
    moved = [line for line in found.wrong if "hook_normalized" in line]
    assert found.wrong == moved and len(moved) == (0 if family == "qwen3" else 2 * N_LAYERS + 1)
    names = [line.split(" ")[0] for line in moved]
    assert not compare("transformer_lens", family, {name: tensors[name] for name in names}).wrong
    assert {"blocks.1.hook_mlp_in", "blocks.1.attn.hook_result", "blocks.1.mlp.hook_post"} <= set(found.translated)


def test_the_comparison_notices_a_neighbour(transformer_lens: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the raw output in place of the contribution, the comparison fails where that matters, and only there."""
    from interp.names import transformer_lens as rules

    monkeypatch.setitem(rules.EVERYWHERE, "hook_mlp_out", "mlp_out")
    for family in ("gemma2", "gemma3", "olmo2"):
        wrong = compare("transformer_lens", family, transformer_lens(family)).wrong
        assert len(wrong) == N_LAYERS and all("hook_mlp_out" in line for line in wrong)
    assert not compare("transformer_lens", "llama", transformer_lens("llama")).wrong


def test_the_layer_counts(transformer_lens: Peer) -> None:
    """One layer off is another tensor: the comparison would notice."""
    tensors = transformer_lens("llama")
    shifted = {f"blocks.{layer}.hook_resid_pre": tensors[f"blocks.{layer + 1}.hook_resid_pre"] for layer in (0, 1)}
    assert len(compare("transformer_lens", "llama", shifted).wrong) == 2
    with pytest.raises(NameRefused, match="layers 0 to 2"):
        read("blocks.3.hook_resid_pre", "transformer_lens", engine("llama").layout)
