"""GGUF files written here from models known to the last bit come back as those models."""

import json
import math
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from interp.errors import UserError
from interp.models import gguf as conversion
from interp.models.gguf import checkpoint_from_gguf, is_complete
from interp.models.gguf_header import read_header, write_without_vocabulary

LLAMA_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = LLAMA_NAMES | {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(hf_name: str, names: dict[str, str]) -> str:
    stem = hf_name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return names[stem] + ".weight"
    layer, role = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{names[role]}.weight"


def permuted_as_llama_cpp_stores(weights: np.ndarray, n_heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    half = weights.shape[0] // n_heads // 2
    return weights.reshape(n_heads, 2, half, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    return model.eval()


def tiny_llama(tied: bool = False, **rope: object) -> LlamaForCausalLM:
    """Three layers, 6 heads on 2 kv heads of width 8."""
    config = LlamaConfig(
        vocab_size=261,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0} | rope,
    )
    return randomised(LlamaForCausalLM(config))  # pyright: ignore[reportReturnType]


def llama_writer(path: Path, model: LlamaForCausalLM, skip: tuple[str, ...] = ()) -> gguf.GGUFWriter:
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(48)
    writer.add_block_count(3)
    writer.add_feed_forward_length(96)
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(261)
    for name, tensor in model.state_dict().items():
        stored = gguf_name(name, LLAMA_NAMES)
        if stored in skip or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        weights = tensor.numpy()
        if ".attn_q." in stored:
            weights = permuted_as_llama_cpp_stores(weights, 6)
        elif ".attn_k." in stored:
            weights = permuted_as_llama_cpp_stores(weights, 2)
        writer.add_tensor(stored, weights)
    return writer


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """256 bytes, four merges and one control token; split as SmolLM2's."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    merges = ["1 2", "a b", "ab c", "Ġ a"]
    tokens = [*bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in merges), "<|end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 260 + [3])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(260)
    writer.add_eos_token_id(260)
    writer.add_chat_template("{{ messages[0]['content'] }}")


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_llama(path: Path, model: LlamaForCausalLM, tokenizer: bool = False, skip: tuple[str, ...] = ()) -> Path:
    writer = llama_writer(path, model, skip)
    if tokenizer:
        add_tokenizer(writer)
    finish(writer)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INTERP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def reports() -> list[str]:
    return []


def assert_same_model(folder: Path, model: torch.nn.Module) -> None:
    back = AutoModelForCausalLM.from_pretrained(folder)
    expected, got = model.state_dict(), back.state_dict()
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == torch.float32
        assert torch.equal(got[name], tensor), name
    tokens = torch.arange(3, 60)[None] * 4
    with torch.no_grad():
        assert torch.equal(back(tokens).logits, model(tokens).logits)


def test_a_file_without_output_matrix_has_tied_embeddings(tmp_path: Path, reports: list[str]) -> None:
    model = tiny_llama(tied=True)
    folder = checkpoint_from_gguf(write_llama(tmp_path / "tied.gguf", model), reports.append)
    assert_same_model(folder, model)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")


def test_packed_weights_come_back_as_their_float32_values(tmp_path: Path, reports: list[str]) -> None:
    """float16 is widened; a Q8_0 block is one float16 scale and 32 bytes, its values their products."""
    rng = np.random.default_rng(0)
    half = rng.normal(size=(261, 48)).astype(np.float16)
    scales = rng.normal(size=(48, 3, 1)).astype(np.float16)
    bytes_ = rng.integers(-127, 128, size=(48, 3, 32)).astype(np.int8)
    blocks = np.concatenate([scales.view(np.uint8), bytes_.view(np.uint8)], axis=-1).reshape(48, 102)

    path = tmp_path / "packed.gguf"
    writer = llama_writer(path, tiny_llama(), skip=("token_embd.weight", "blk.2.ffn_down.weight"))
    writer.add_tensor("token_embd.weight", half)
    writer.add_tensor("blk.2.ffn_down.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    finish(writer)
    weights = load_file(checkpoint_from_gguf(path, reports.append) / "model.safetensors")
    assert np.array_equal(weights["model.embed_tokens.weight"].numpy(), half.astype(np.float32))
    expected = scales.astype(np.float32) * bytes_.astype(np.float32)
    assert np.array_equal(weights["model.layers.2.mlp.down_proj.weight"].numpy(), expected.reshape(48, 96))


def test_llama3_rotary_scaling_is_rebuilt_from_its_divisors(tmp_path: Path, reports: list[str]) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny_llama(rope_theta=500000.0, **scaling)
    plain = 500000.0 ** (-np.arange(4) / 4)
    wavelengths = 2 * math.pi / plain
    smooth = (8192 / wavelengths - 1) / (4 - 1)
    between = 1 / ((1 - smooth) / 8 + smooth)
    divisors = np.where(wavelengths < 8192 / 4, 1, np.where(wavelengths > 8192, 8, between)).astype(np.float32)
    assert len(set(divisors.tolist())) > 1

    path = tmp_path / "llama3.gguf"
    writer = llama_writer(path, model)
    writer.add_float32("llama.rope.freq_base", 500000.0)
    writer.add_tensor("rope_freqs.weight", divisors)
    finish(writer)
    folder = checkpoint_from_gguf(path, reports.append)
    assert_same_model(folder, model)
    assert json.loads((folder / "config.json").read_text())["rope_parameters"] == scaling | {"rope_theta": 500000.0}


def test_divisors_of_another_kind_are_refused(tmp_path: Path, reports: list[str], cache: Path) -> None:
    path = tmp_path / "odd.gguf"
    writer = llama_writer(path, tiny_llama())
    writer.add_tensor("rope_freqs.weight", np.array([1, 2, 3, 4], np.float32))
    finish(writer)
    with pytest.raises(UserError, match="rotary divisors"):
        checkpoint_from_gguf(path, reports.append)
    assert list((cache / "models").iterdir()) == []


def test_linear_rotary_scaling_is_kept(tmp_path: Path, reports: list[str]) -> None:
    model = tiny_llama(rope_type="linear", factor=4.0)
    path = tmp_path / "linear.gguf"
    writer = llama_writer(path, model)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)
    finish(writer)
    assert_same_model(checkpoint_from_gguf(path, reports.append), model)


def test_unknown_rotary_scaling_is_refused(tmp_path: Path, reports: list[str]) -> None:
    path = tmp_path / "longrope.gguf"
    writer = llama_writer(path, tiny_llama())
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    finish(writer)
    with pytest.raises(UserError, match="longrope"):
        checkpoint_from_gguf(path, reports.append)


def test_gemma_gains_widths_and_windows(tmp_path: Path, reports: list[str]) -> None:
    config = Gemma3TextConfig(
        vocab_size=251,
        hidden_size=42,
        intermediate_size=72,
        num_hidden_layers=7,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=9,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
    )
    assert config.layer_types is not None and config.rope_parameters is not None
    assert [kind == "full_attention" for kind in config.layer_types] == [False] * 5 + [True, False]
    config.rope_parameters["full_attention"] |= {"rope_type": "linear", "factor": 8.0}
    model = randomised(Gemma3ForCausalLM(config))
    path = tmp_path / "gemma.gguf"
    writer = gguf.GGUFWriter(str(path), "gemma3")
    writer.add_context_length(512)
    writer.add_embedding_length(42)
    writer.add_block_count(7)
    writer.add_feed_forward_length(72)
    writer.add_head_count(3)
    writer.add_head_count_kv(1)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_sliding_window(9)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)
    writer.add_layer_norm_rms_eps(1e-6)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight":
                continue
            if "norm" in name:
                stored = tensor + 1
                tensor.copy_(stored - 1)  # the gain that float32 can give back from its sum with one
            else:
                stored = tensor
            writer.add_tensor(gguf_name(name, GEMMA_NAMES), stored.numpy())
    finish(writer)
    folder = checkpoint_from_gguf(path, reports.append)
    assert_same_model(folder, model)
    saved = json.loads((folder / "config.json").read_text())
    assert saved["query_pre_attn_scalar"] == saved["head_dim"] == 16
    assert saved["layer_types"] == config.layer_types
    assert saved["sliding_window"] == 9


def test_head_width_comes_from_the_file_not_from_the_config_class(tmp_path: Path, reports: list[str]) -> None:
    config = Qwen3Config(
        vocab_size=251,
        hidden_size=40,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=14,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    assert Qwen3Config().head_dim == 128
    model = randomised(Qwen3ForCausalLM(config))
    path = tmp_path / "qwen3.gguf"
    writer = gguf.GGUFWriter(str(path), "qwen3")
    writer.add_context_length(512)
    writer.add_embedding_length(40)
    writer.add_block_count(2)
    writer.add_feed_forward_length(72)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(14)
    writer.add_value_length(14)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    names = LLAMA_NAMES | {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
    for name, tensor in model.state_dict().items():
        writer.add_tensor(gguf_name(name, names), tensor.numpy())
    finish(writer)
    assert_same_model(checkpoint_from_gguf(path, reports.append), model)


def test_tokenizer_splits_digits_and_keeps_control_tokens(tmp_path: Path, reports: list[str]) -> None:
    folder = checkpoint_from_gguf(write_llama(tmp_path / "tiny.gguf", tiny_llama(), tokenizer=True), reports.append)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("12 abc<|end|>").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["1", "2", "Ġ", "abc", "<|end|>"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (260, 260)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert len(reports) == 1


def test_a_file_without_tokenizer_converts_and_says_so(tmp_path: Path, reports: list[str]) -> None:
    folder = checkpoint_from_gguf(write_llama(tmp_path / "tiny.gguf", tiny_llama()), reports.append)
    assert not (folder / "tokenizer.json").exists()
    assert "no tokenizer" in reports[-1]


def test_a_tokenizer_of_unknown_kind_is_left_out_and_named(tmp_path: Path, reports: list[str]) -> None:
    path = tmp_path / "odd.gguf"
    writer = llama_writer(path, tiny_llama())
    writer.add_tokenizer_model("nonesuch")
    writer.add_token_list(["a", "b"])
    finish(writer)
    folder = checkpoint_from_gguf(path, reports.append)
    assert not (folder / "tokenizer.json").exists()
    assert "'nonesuch' tokenizer" in reports[-1]


def test_second_call_only_verifies(tmp_path: Path, reports: list[str]) -> None:
    path = write_llama(tmp_path / "tiny.gguf", tiny_llama())
    folder = checkpoint_from_gguf(path, reports.append)
    inode = folder.stat().st_ino
    reports.clear()
    start = time.perf_counter()
    assert checkpoint_from_gguf(path, reports.append) == folder
    assert time.perf_counter() - start < 0.2
    assert reports == []
    assert folder.stat().st_ino == inode


@pytest.mark.parametrize("damage", ["truncate", "overwrite", "remove"])
def test_a_damaged_conversion_is_made_anew(tmp_path: Path, reports: list[str], damage: str) -> None:
    model = tiny_llama()
    path = write_llama(tmp_path / "tiny.gguf", model)
    folder = checkpoint_from_gguf(path, reports.append)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    if damage == "remove":
        weights.unlink()
    else:
        weights.write_bytes(content[:-4] + (b"" if damage == "truncate" else b"\1\2\3\4"))
    assert not is_complete(folder)
    assert checkpoint_from_gguf(path, reports.append) == folder
    assert weights.read_bytes() == content


def test_an_interrupted_conversion_leaves_nothing(
    tmp_path: Path, reports: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "_save_tokenizer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint_from_gguf(write_llama(tmp_path / "tiny.gguf", tiny_llama()), reports.append)
    assert list((cache / "models").iterdir()) == []


@pytest.mark.parametrize("kept", [0, 3, 30, 200, -1, -5000])
def test_truncated_files_are_refused_in_one_sentence(
    tmp_path: Path, reports: list[str], cache: Path, kept: int
) -> None:
    path = write_llama(tmp_path / "tiny.gguf", tiny_llama(), tokenizer=True)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"cut short|not a GGUF file") as error:
        checkpoint_from_gguf(path, reports.append)
    assert "\n" not in str(error.value)
    assert not (cache / "models").exists()


def test_noise_after_the_magic_bytes_is_refused(tmp_path: Path, reports: list[str]) -> None:
    path = write_llama(tmp_path / "tiny.gguf", tiny_llama())
    content = bytearray(path.read_bytes())
    for seed in range(20):
        noisy = content.copy()
        noisy[4:400] = np.random.default_rng(seed).bytes(396)
        path.write_bytes(noisy)
        with pytest.raises(UserError, match=r"cut short|not a readable GGUF file"):
            checkpoint_from_gguf(path, reports.append)


def test_a_file_that_lacks_a_weight_is_refused(tmp_path: Path, reports: list[str]) -> None:
    path = write_llama(tmp_path / "tiny.gguf", tiny_llama(), skip=("blk.1.ffn_up.weight",))
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj"):
        checkpoint_from_gguf(path, reports.append)


def test_a_weight_without_place_in_the_model_is_refused(tmp_path: Path, reports: list[str]) -> None:
    path = tmp_path / "biased.gguf"
    writer = llama_writer(path, tiny_llama())
    writer.add_tensor("blk.0.attn_q.bias", np.ones(48, np.float32))
    finish(writer)
    with pytest.raises(UserError, match="no place in it"):
        checkpoint_from_gguf(path, reports.append)


def test_an_unknown_architecture_is_named(tmp_path: Path, reports: list[str]) -> None:
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(str(path), "nonesuch")
    writer.add_tensor("token_embd.weight", np.ones((4, 8), np.float32))
    finish(writer)
    with pytest.raises(UserError, match="'nonesuch'"):
        checkpoint_from_gguf(path, reports.append)


def test_header_reads_what_the_gguf_package_reads(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", tiny_llama(), tokenizer=True)
    header, reader = read_header(path), gguf.GGUFReader(path)
    assert header.data_start == reader.data_offset
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        entry = header.tensors[tensor.name]
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert header.data_start + entry.offset == tensor.data_offset
        assert entry.n_bytes == tensor.n_bytes
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            assert header.metadata[key] == field.contents(), key


def test_the_file_without_vocabulary_has_the_same_tensors(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    writer = gguf.GGUFWriter(str(path), "gemma3")
    writer.add_context_length(512)
    writer.add_token_list([f"token {i}" for i in range(1500)])
    writer.add_token_scores([float(-i) for i in range(1500)])
    writer.add_bos_token_id(2)
    rng = np.random.default_rng(1)
    for name, shape in {"a.weight": (3, 5), "b.weight": (7,), "c.weight": (2, 11)}.items():
        writer.add_tensor(name, rng.normal(size=shape).astype(np.float32))
    finish(writer)
    header = read_header(path)
    assert header.metadata["tokenizer.ggml.tokens"] == 1500
    bare = tmp_path / "bare.gguf"
    write_without_vocabulary(header, bare)
    before, after = gguf.GGUFReader(path), gguf.GGUFReader(bare)
    assert {k for k in before.fields if not k.startswith("GGUF.")} - {k for k in after.fields} == {
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.scores",
    }
    assert after.fields["gemma3.vocab_size"].contents() == 1500
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert old.name == new.name
        assert np.array_equal(old.data, new.data)
