"""Roles are read from the data flow: wiring, norms, multipliers, head and embedding terms, by hand for each family."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from interp.engines.load import wrap
from interp.errors import InterpError
from interp.models.anatomy import Anatomy, Head, Mixer, Neurons, Refusal, Sublayer
from interp.models.norms import Norm
from interp.models.resolve import resolve
from interp.models.tiny import tiny_model
from tests.families.loaded import engine, hook_count
from tests.families.tiny import D_VOCAB, EVERY, build


def anatomy(family: str) -> Anatomy:
    return engine(family).anatomy


def attn(family: str, layer: int = 1) -> Sublayer:
    found = anatomy(family).blocks[layer].attn
    assert isinstance(found, Sublayer)
    return found


PARALLEL = {"gpt_neox_parallel", "cohere", "cohere2", "phi", "gptj", "falcon"}


@pytest.mark.parametrize("family", EVERY)
def test_wiring_and_the_order_of_the_sublayers(family: str) -> None:
    for block in anatomy(family).blocks:
        assert block.parallel == (family in PARALLEL)
        assert isinstance(block.attn, Sublayer) and isinstance(block.mlp, Sublayer)
        assert "att" in block.attn.path.split(".")[-1] and "att" not in block.mlp.path.split(".")[-1]


@pytest.mark.parametrize(
    ("family", "pre", "post"),
    [
        ("llama", True, False),
        ("gemma2", True, True),
        ("glm4", True, True),
        ("olmo2", False, True),
        ("granite", True, False),
        ("bloom", True, False),
    ],
)
def test_norms_stand_where_the_family_puts_them(family: str, pre: bool, post: bool) -> None:
    for block in anatomy(family).blocks:
        for sublayer in (block.attn, block.mlp):
            assert isinstance(sublayer, Sublayer)
            assert (sublayer.pre_norm is not None, sublayer.post_norm is not None) == (pre, post)


def test_the_effective_gain_is_one_plus_the_weight_on_gemma_only() -> None:
    offsets = {f: attn(f).pre_norm.gain_offset for f in ("llama", "gemma", "gemma2", "gemma3", "gpt2")}  # type: ignore[union-attr]
    assert offsets == {"llama": 0.0, "gemma": 1.0, "gemma2": 1.0, "gemma3": 1.0, "gpt2": 0.0}
    centred = {f: attn(f).pre_norm.centred for f in ("llama", "gemma3", "gpt2", "olmo", "cohere", "phi")}  # type: ignore[union-attr]
    assert centred == {"llama": False, "gemma3": False, "gpt2": True, "olmo": True, "cohere": True, "phi": True}


def test_multipliers_scales_and_caps() -> None:
    assert attn("granite").multiplier == pytest.approx(0.22)
    assert all(attn(f).multiplier == 1.0 for f in ("llama", "gemma3", "gpt2", "bloom"))
    heads: dict[str, Any] = {f: anatomy(f).head for f in ("granite", "cohere", "gemma2", "llama")}
    assert all(isinstance(head, Head) for head in heads.values())
    assert {f: (head.scale, head.cap) for f, head in heads.items()} == {
        "granite": (pytest.approx(1 / 8), None),
        "cohere": (pytest.approx(0.0625), None),
        "gemma2": (1.0, 5.0),
        "llama": (1.0, None),
    }
    assert heads["llama"].logits(torch.tensor(3.0)).item() == 3.0
    assert heads["gemma2"].logits(torch.tensor(3.0)).item() == pytest.approx(5 * torch.tensor(0.6).tanh().item())


def test_embedding_terms() -> None:
    kinds = {f: [t.kind for t in anatomy(f).start.terms] for f in ("llama", "gpt2", "opt", "mpt")}  # type: ignore[union-attr]
    assert kinds["llama"] == kinds["mpt"] == ["token"]
    assert sorted(kinds["gpt2"]) == sorted(kinds["opt"]) == ["position", "token"]
    (granite,) = anatomy("granite").start.terms  # type: ignore[misc]
    assert "times 3" in granite.tap.transform


@pytest.mark.parametrize(
    ("family", "heads", "kv", "width"),
    [("llama", 6, 2, 10), ("gpt2", 6, 6, 8), ("phi3", 6, 2, 8), ("gpt_neox_parallel", 6, 6, 8), ("gemma3", 6, 2, 10)],
)
def test_heads(family: str, heads: int, kv: int, width: int) -> None:
    mixer = anatomy(family).blocks[2].mixer
    assert isinstance(mixer, Mixer)
    assert (mixer.n_heads, mixer.n_kv_heads, mixer.d_head) == (heads, kv, width)
    info = engine(family).model
    assert (info.n_heads, info.n_kv_heads, info.d_head) == (heads, kv, width)


def test_sparse_layers_have_no_neurons_and_dense_ones_do() -> None:
    blocks = anatomy("qwen3_moe").blocks
    assert [isinstance(b.neurons, Neurons) for b in blocks] == [True, False, True]
    assert isinstance(blocks[1].neurons, Refusal) and "no dense neurons" in blocks[1].neurons.reason
    assert engine("qwen3_moe").model.d_mlp == 80


def test_a_falcon_mlp_that_is_overwritten_in_place_still_shows_its_neurons() -> None:
    """Falcon adds attention into the MLP's own output tensor; what the module returned is what counts."""
    assert all(isinstance(b.neurons, Neurons) for b in anatomy("falcon").blocks)


def test_the_final_norm_and_trunk() -> None:
    for family, trunk in (("llama", "model"), ("gpt2", "transformer"), ("gpt_neox_parallel", "gpt_neox")):
        found = anatomy(family)
        assert isinstance(found.final_norm, Norm)
        assert found.trunk == trunk


def test_resolving_leaves_the_model_and_the_generator_as_they_were() -> None:
    model = build("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attention, state = model.config._attn_implementation, torch.get_rng_state()  # type: ignore[union-attr]
    resolve(model, D_VOCAB)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config._attn_implementation == attention  # type: ignore[union-attr]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert hook_count(model) == 0


class NoTrunk(nn.Module):
    """A model whose modules pass no stream from one to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(D_VOCAB, 8), nn.Linear(8, D_VOCAB)

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> dict[str, torch.Tensor]:
        return {"logits": self.head(self.embed(input_ids))}


def test_a_model_without_a_trunk_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(InterpError, match=r"No trunk was found in NoTrunk.*write its Anatomy by hand"):
        resolve(NoTrunk(), D_VOCAB)


def test_a_head_of_one_layer_and_a_head_count_of_one() -> None:
    """The smallest shapes, where an axis of length one could be dropped or taken for another."""
    sizes: dict[str, Any] = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1, "head_dim": 6}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 31, "max_position_embeddings": 16}
    config = CONFIG_MAPPING["llama"](**sizes)
    torch.manual_seed(0)
    small = wrap(AutoModelForCausalLM.from_config(config).double())
    assert small.anatomy.refused == {}
    for point in ("query.0", "key.0", "value.0", "z.0"):
        assert small.support(point).readable, point


def test_a_module_that_runs_twice_in_a_pass_is_refused_and_not_read_at_its_first_call() -> None:
    """Llama 4 norms queries and keys with one module: a tap there would catch both."""
    model = wrap(tiny_model("llama4_text", torch.float64))
    for point in ("q_norm_in.0", "q_norm_out.0", "k_norm_in.0", "k_norm_out.0"):
        support = model.support(point)
        assert not support.readable and "qk_norm runs several times in one pass" in support.reason
    assert model.support("query.0").writable and model.support("key.0").writable
