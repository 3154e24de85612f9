"""Names that look like one point and are another, each with the model that decides."""

import pytest
import torch

from interp.engines.base import Request
from interp.names import NameRefused, names_of, point_of, read
from tests.families.loaded import engine

from .conftest import TOKENS


def means(name: str, tool: str, family: str) -> str:
    return str(point_of(name, tool, engine(family).layout))


@pytest.mark.parametrize("tool", ["transformer_lens", "transformer_lens_legacy", "sae_lens", "circuit_tracer"])
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "llama", "gpt2"])
def test_hook_mlp_out_is_the_contribution(tool: str, family: str) -> None:
    assert means("blocks.1.hook_mlp_out", tool, family) == "mlp_out_post.1"
    assert means("blocks.1.hook_attn_out", tool, family) == "attn_out_post.1"


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "olmo2", "llama"])
def test_mlp_hook_out_is_the_raw_output(family: str) -> None:
    assert means("blocks.1.mlp.hook_out", "transformer_lens", family) == "mlp_out.1"
    assert means("blocks.1.attn.hook_out", "transformer_lens", family) == "attn_out.1"


def test_where_the_module_adds_the_residual_its_output_is_the_stream() -> None:
    assert means("blocks.1.mlp.hook_out", "transformer_lens", "bloom") == "resid_post.1"
    assert means("blocks.1.attn.hook_out", "transformer_lens", "bloom") == "resid_mid.1"
    assert means("mlps_output[1]", "nnterp", "bloom") == "resid_post.1"
    assert means("h.1.mlp", "sparsify", "bloom") == "resid_post.1"
    assert means("blocks.1.hook_embed".removeprefix("blocks.1."), "transformer_lens", "bloom") == "resid_pre.0"


@pytest.mark.parametrize("tool", ["transformer_lens", "transformer_lens_legacy"])
def test_hook_mlp_in_is_the_stream_before_the_norm(tool: str) -> None:
    assert means("blocks.1.hook_mlp_in", tool, "gpt2") == "resid_mid.1"
    assert means("blocks.1.hook_mlp_in", tool, "gpt_neox_sequential") == "resid_mid.1"
    assert means("blocks.1.hook_mlp_in", tool, "gpt_neox_parallel") == "resid_pre.1"
    for family in ("gpt2", "gpt_neox_parallel"):
        assert means("blocks.1.mlp.hook_in", "transformer_lens", family) == "mlp_in.1"
        answer = read("blocks.1.hook_attn_in", tool, engine(family).layout)
        assert str(answer.address) == "resid_pre.1" and "repeated for every head" in answer.note
    with pytest.raises(NameRefused, match="parallel"):
        point_of("blocks.1.hook_mlp_in", tool)


def test_hook_normalized_differs_between_generations_and_norms() -> None:
    name = "blocks.1.ln2.hook_normalized"
    assert means(name, "transformer_lens", "gpt2") == "mlp_normalized.1"
    assert means(name, "transformer_lens_legacy", "gpt2") == "mlp_in.1"  # a LayerNorm, after gain and bias
    assert means(name, "transformer_lens", "llama") == "mlp_normalized.1"
    assert means(name, "transformer_lens_legacy", "llama") == "mlp_normalized.1"  # an RMSNorm, before the gain
    assert means(name, "circuit_tracer", "gemma2") == "mlp_normalized.1"
    assert means(name, "sae_lens", "llama") == "mlp_normalized.1"
    with pytest.raises(NameRefused, match=r"mlp_normalized\.1 in the bridge and mlp_in\.1 in the HookedTransformer"):
        point_of(name, "sae_lens", engine("gpt2").layout)
    assert means("ln_final.hook_normalized", "transformer_lens", "gpt2") == "final_normalized"
    assert means("ln_final.hook_normalized", "transformer_lens_legacy", "gpt2") == "final_norm"
    assert means("ln_final.hook_normalized", "transformer_lens_legacy", "llama") == "final_normalized"
    for tool in ("transformer_lens", "transformer_lens_legacy"):
        with pytest.raises(NameRefused, match="norm"):
            point_of(name, tool)


def test_ln2_belongs_to_the_post_norm_where_no_norm_stands_before() -> None:
    assert means("blocks.1.ln2.hook_normalized", "transformer_lens", "olmo2") == "mlp_post_normalized.1"
    assert means("blocks.1.ln1.hook_scale", "transformer_lens", "olmo2") == "attn_post_norm_scale.1"
    assert means("blocks.1.ln2.hook_in", "transformer_lens", "olmo2") == "mlp_out.1"
    assert means("blocks.1.hook_resid_mid", "transformer_lens", "olmo2") == "resid_mid.1"
    with pytest.raises(NameRefused, match="no blocks whose only norms stand behind"):
        point_of("blocks.1.ln2.hook_normalized", "transformer_lens_legacy", engine("olmo2").layout)


def test_the_mlp_hooks_of_experts_are_the_blocks_ends() -> None:
    assert means("blocks.1.mlp.hook_pre", "transformer_lens", "mixtral") == "mlp_in.1"
    assert means("blocks.1.mlp.hook_post", "transformer_lens", "mixtral") == "mlp_out.1"
    # A stack of dense and sparse blocks: each layer is what it is.
    assert means("blocks.0.mlp.hook_post", "transformer_lens", "qwen3_moe") == "mlp_act.0"
    assert means("blocks.1.mlp.hook_post", "transformer_lens", "qwen3_moe") == "mlp_out.1"
    with pytest.raises(NameRefused, match="experts"):
        point_of("blocks.1.mlp.hook_post", "transformer_lens_legacy", engine("mixtral").layout)
    with pytest.raises(NameRefused, match="neurons or experts"):
        point_of("blocks.1.mlp.hook_pre", "transformer_lens")


def test_a_parallel_block_has_no_middle() -> None:
    with pytest.raises(NameRefused, match=r"adds attention and MLP in parallel; nearest: resid_post\.1, mlp_in\.1"):
        point_of("blocks.1.hook_resid_mid", "transformer_lens", engine("phi").layout)
    with pytest.raises(NameRefused, match="one norm here, which TransformerLens calls ln1"):
        point_of("blocks.1.ln2.hook_out", "transformer_lens", engine("phi").layout)


def test_sparsify_names_a_block_and_its_mlp() -> None:
    layout = engine("llama").layout
    assert means("layers.1", "sparsify", "llama") == "resid_post.1"
    assert means("model.layers.1", "sparsify", "llama") == "resid_post.1"
    answer = read("layers.1.mlp", "sparsify", layout)
    assert str(answer.address) == "mlp_out.1" and "a transcoder" in answer.note
    assert means("h.1", "sparsify", "gpt2") == "resid_post.1" and means("h.1.attn", "sparsify", "gpt2") == "attn_out.1"
    assert names_of("resid_post.1", "sparsify", layout) == ["layers.1"]
    assert str(point_of("layers.3", "sparsify")) == "resid_post.3"
    assert str(point_of("layers.3.mlp", "sparsify")) == "mlp_out.3"
    assert str(point_of("h.3", "sparsify")) == "resid_post.3"
    with pytest.raises(NameRefused, match="BLOOM"):
        point_of("h.3.mlp", "sparsify")


def test_dictionary_learning_names_its_submodules() -> None:
    assert str(point_of("resid_post_layer_3", "dictionary_learning")) == "resid_post.3"
    assert means("mlp_out_layer_1", "dictionary_learning", "gemma2") == "mlp_out.1"
    assert means("attn_out_layer_1", "dictionary_learning", "gemma2") == "attn_out.1"
    assert means("mlp_out_layer_1", "dictionary_learning", "bloom") == "resid_post.1"
    assert means("gpt_neox.layers.1.mlp", "dictionary_learning", "gpt_neox_parallel") == "mlp_out.1"
    with pytest.raises(NameRefused, match="BLOOM"):
        point_of("mlp_out_layer_3", "dictionary_learning")
    with pytest.raises(NameRefused, match="layers 0 to 2"):
        point_of("mlp_out_layer_3", "dictionary_learning", engine("llama").layout)


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("layer_12/res", "resid_post.12"),
        ("layer_12/mlp", "mlp_out_post.12"),
        ("layer_12/att", "z.12"),
        ("gemma-scope-2b-pt-res/layer_20/width_16k/average_l0_71", "resid_post.20"),
        ("google/gemma-scope-9b-pt-mlp/layer_3/width_16k/average_l0_30", "mlp_out_post.3"),
        ("gemma-scope-2b-pt-transcoders/layer_5/width_16k/average_l0_14", "mlp_normalized.5"),
        ("resid_post/layer_12_width_16k_l0_medium", "resid_post.12"),
        ("gemma-scope-2-1b-pt/mlp_out/layer_12_width_16k_l0_medium", "mlp_out_post.12"),
        ("attn_out/layer_12_width_16k_l0_medium", "z.12"),
        ("transcoder_all/layer_5_width_16k_l0_big_affine", "mlp_in.5"),
    ],
)
def test_gemma_scope(name: str, address: str) -> None:
    assert str(point_of(name, "gemma_scope")) == address


def test_gemma_scope_is_for_gemma() -> None:
    assert means("layer_1/mlp", "gemma_scope", "gemma2") == "mlp_out_post.1"
    assert means("mlp_out/layer_1", "gemma_scope", "gemma3") == "mlp_out_post.1"
    with pytest.raises(NameRefused, match="a dictionary for Gemma 2"):
        point_of("layer_1/mlp", "gemma_scope", engine("gpt2").layout)
    with pytest.raises(NameRefused, match="says its site and layer"):
        point_of("layer_12", "gemma_scope")


def test_a_head_of_sae_lens() -> None:
    assert str(point_of("blocks.3.attn.hook_z hook_head_index=2", "sae_lens")) == "z.3.head-2"
    assert names_of("z.3.head-2", "sae_lens")[0] == "blocks.3.attn.hook_z hook_head_index=2"
    assert "all heads joined" in read("blocks.3.attn.hook_z", "sae_lens").note
    assert means("model.layers.1.mlp", "sae_lens", "llama") == "mlp_out.1"
    with pytest.raises(NameRefused, match="picks a head"):
        point_of("blocks.3.hook_resid_post hook_head_index=2", "sae_lens")


def test_circuit_tracer_declares_one_hook_for_all_layers() -> None:
    assert means("blocks.1.mlp.hook_in", "circuit_tracer", "gemma2") == "mlp_in.1"
    assert means("blocks.1.mlp.hook_out", "circuit_tracer", "gemma2") == "mlp_out.1"
    assert means("blocks.1.hook_resid_mid", "circuit_tracer", "llama") == "resid_mid.1"
    assert means("feature_input_hook: blocks.1.ln2.hook_normalized", "circuit_tracer", "gemma2") == "mlp_normalized.1"
    with pytest.raises(NameRefused, match=r"as in blocks\.5\.hook_mlp_out"):
        point_of("feature_output_hook: hook_mlp_out", "circuit_tracer")


def test_hidden_states_without_a_model() -> None:
    assert str(point_of("hidden_states[0]", "hf")) == "resid_pre.0"
    assert str(point_of("outputs.hidden_states[-1]", "hf")) == "final_norm"
    with pytest.raises(NameRefused, match="the last entry is normed"):
        point_of("hidden_states[5]", "hf")


@pytest.mark.parametrize(("family", "stream"), [("gpt2", "resid_mid.1"), ("gpt_neox_parallel", "resid_pre.1")])
def test_the_norm_of_the_legacy_stream_is_what_the_mlp_receives(family: str, stream: str) -> None:
    """hook_mlp_in, through the block's norm, is the legacy ln2.hook_normalized: both read from one run."""
    model = engine(family)
    before, after = (
        means(f"blocks.1.{hook}", "transformer_lens_legacy", family) for hook in ("hook_mlp_in", "ln2.hook_normalized")
    )
    assert before == stream
    norm = model.layout.blocks[1].mlp_pre_norm
    assert norm is not None and norm.centred
    captured = model.run([Request(TOKENS, capture=[before, after])])[0].capture
    with torch.no_grad(), model.numerics():
        assert torch.equal(model.module.get_submodule(norm.path)(captured[before]), captured[after])
