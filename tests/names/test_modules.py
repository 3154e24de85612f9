"""Places of the module tree: what every module really receives and returns, against what its name translates to."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interp.engines.base import Request
from interp.models.float64 import numerics
from interp.names import NameRefused, point_of, read, spell
from interp.points import POINTS, Address
from tests.families.loaded import engine
from tests.families.tiny import SPLIT_LLAMAS

from .conftest import FAMILIES, TOKENS

MODELS = (*FAMILIES, "bloom", "granite", "phi3", "qwen3_moe", "opt")
EVERY = (*MODELS, *SPLIT_LLAMAS)


def recorded(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor that a module was called with or returned, by its name as a place."""
    found: dict[str, Tensor] = {}

    def watch(path: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        entered = [*args, *kwargs.values()]
        if entered and isinstance(entered[0], Tensor) and entered[0].is_floating_point():
            found[f"{path} input"] = entered[0].clone()
        if isinstance(output, Tensor):
            found[f"{path} output"] = output.clone()
        elif isinstance(output, tuple) and isinstance(output[0], Tensor):
            found[f"{path} output[0]"] = output[0].clone()

    handles = [
        module.register_forward_hook(lambda m, a, k, y, path=path: watch(path, a, k, y), with_kwargs=True)  # type: ignore[misc]
        for path, module in model.named_modules()
        if path
    ]
    with torch.no_grad(), numerics(torch.float64):
        model(input_ids=torch.tensor([TOKENS]), use_cache=False)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("family", EVERY)
def test_every_place_of_every_module(family: str) -> None:
    model = engine(family)
    places = recorded(model.module)
    answers = {}
    for name in places:
        try:
            answers[name] = read(name, "hf", model.layout)
        except NameRefused as refusal:
            assert "is no point" in str(refusal)
    assert len(answers) >= 20 and len(answers) > len(places) / 2
    points = sorted({str(address) for a in answers.values() for address in (a.address, *a.also)})
    captured = model.run([Request(TOKENS, capture=points)])[0].capture
    for name, answer in answers.items():
        for address in (answer.address, *answer.also):
            ours, theirs = captured[address], places[name].squeeze(0)
            if ours.shape != theirs.shape:
                assert answer.note, f"{family}: {name} and {address} differ in shape, and nobody says so"
                theirs = theirs.transpose(0, 1) if "heads come before" in answer.note else theirs
            # A request for the attention's inside runs the eager attention, which rounds otherwise.
            close = torch.isclose(theirs.reshape(ours.shape), ours, rtol=0, atol=1e-12 * float(ours.abs().max()))
            assert close.all(), f"{family}: {name} is not {address}"


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("tool", ["hf", "nnsight", "sparsify", "dictionary_learning", "nnterp", "sae_lens", "hooks"])
def test_a_name_reads_back_as_its_address(family: str, tool: str) -> None:
    layout, spoken = engine(family).layout, 0
    for point in POINTS.values():
        address = Address(point.name, 1 if point.per_layer else None)
        try:
            spellings = spell(address, tool, layout)
        except NameRefused as refusal:
            assert len(str(refusal)) > 40
            continue
        spoken += 1
        for spelling in spellings:
            answer = read(spelling.name, tool, layout)
            assert address in (answer.address, *answer.also)
    assert spoken >= (0 if tool == "sparsify" and family in SPLIT_LLAMAS else 5)  # which looks for one list of layers


@pytest.mark.parametrize(
    ("family", "name", "address"),
    [
        ("llama", "model.layers.1.mlp output", "mlp_out.1"),
        ("llama", "model.layers.1.mlp.output", "mlp_out.1"),
        ("llama", "model.layers[1].mlp:output", "mlp_out.1"),
        ("llama", "layers.1 input", "resid_pre.1"),
        ("llama", "model.layers.1.self_attn output[0]", "attn_out.1"),
        ("llama", "model.layers.1.self_attn.o_proj input", "z.1"),
        ("llama", "model.embed_tokens output", "embeddings"),
        ("llama", "lm_head output", "lm_head"),
        ("gpt2", "transformer.h.1 output", "resid_post.1"),
        ("gpt2", "h.1.mlp.c_proj input", "mlp_act.1"),
        ("gpt_neox_sequential", "gpt_neox.layers.1.post_attention_layernorm input", "resid_mid.1"),
        ("gpt_neox_parallel", "gpt_neox.layers.1.post_attention_layernorm input", "resid_pre.1"),
        ("gemma2", "model.layers.1.post_feedforward_layernorm output", "mlp_out_post.1"),
        ("gemma2", "model.layers.1.pre_feedforward_layernorm input", "resid_mid.1"),
        ("bloom", "transformer.h.1.mlp output", "resid_post.1"),
        ("bloom", "transformer.h.1.mlp.dense_4h_to_h output", "mlp_out.1"),
        ("split_llama", "layers_first.0 output", "resid_post.0"),
        ("split_llama", "layers_first.0.self_attn.o_proj input", "z.0"),
        ("split_llama", "adapter input", "resid_post.0"),
        ("split_llama", "layers_last.0 output", "resid_post.1"),
        ("split_llama", "layers_last.1.mlp output", "mlp_out.2"),
        ("split_llama", "norm output", "final_norm"),
    ],
)
def test_paths_by_hand(family: str, name: str, address: str) -> None:
    assert str(point_of(name, "hf", engine(family).layout)) == address


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("model.layers[1].mlp.output", "mlp_out.1"),
        ("lm.model.layers[1].mlp.output", "mlp_out.1"),
        ("model.layers[1].output", "resid_post.1"),
        ("model.layers[1].self_attn.output[0]", "attn_out.1"),
        ("model.layers[1].input", "resid_pre.1"),
        ("model.layers[1].inputs[0][0]", "resid_pre.1"),
        ("model.layers[1].self_attn.inputs[1]['hidden_states']", "attn_in.1"),
    ],
)
def test_nnsight_by_hand(name: str, address: str) -> None:
    assert str(point_of(name, "nnsight", engine("llama").layout)) == address


def test_the_first_row_of_a_batch_is_no_point() -> None:
    """Blocks return a bare tensor in transformers 5, so the [0] of older code takes the first prompt."""
    with pytest.raises(NameRefused, match="one row of the batch"):
        point_of("model.layers[1].output[0]", "nnsight", engine("llama").layout)


def test_a_slice_of_a_fused_projection_is_refused_with_what_is_in_it() -> None:
    with pytest.raises(NameRefused, match=r"query\.1, key\.1, value\.1"):
        point_of("transformer.h.1.attn.c_attn output", "hf", engine("gpt2").layout)
    with pytest.raises(NameRefused, match=r"c_attn output, channels"):
        spell("query.1", "hf", engine("gpt2").layout)


def test_a_scaled_contribution_is_refused_with_its_factor() -> None:
    layout = engine("granite").layout
    with pytest.raises(NameRefused, match=r"model\.layers\.1\.mlp output, times 0\.22"):
        spell("mlp_out_post.1", "hf", layout)
    assert str(point_of("model.layers.1.mlp output", "hf", layout)) == "mlp_out.1"


@pytest.mark.parametrize("family", MODELS)
def test_hidden_states_are_what_enters_the_blocks_and_the_last_is_normed(family: str) -> None:
    model = engine(family)
    with torch.no_grad(), model.numerics():
        own = model.module(input_ids=torch.tensor([TOKENS]), output_hidden_states=True, use_cache=False).hidden_states
    names = [f"hidden_states[{i}]" for i in range(len(own))]
    addresses = [point_of(name, "hf", model.layout) for name in names]
    assert [str(a) for a in addresses] == ["resid_pre.0", "resid_pre.1", "resid_pre.2", "final_norm"]
    captured = model.run([Request(TOKENS, capture=addresses)])[0].capture
    for state, address in zip(own, addresses, strict=True):
        assert torch.equal(state[0], captured[address])
    with pytest.raises(NameRefused, match=r"hidden_states\[0\] to hidden_states\[3\]"):
        point_of("hidden_states[4]", "hf", model.layout)
