"""What transformers' GGUF importer drops or rounds, put right from the file's own metadata, or refused.

- Floats: GGUF stores them in 32 bits (1e-5 reads 9.999999747e-06); the shortest decimal with that float32 is taken.
- Rotary scaling: `rope.scaling.*` and the `rope_freqs` tensor of Llama 3 are ignored by the importer.
- Head width, score scale and soft caps: taken from the config class's defaults, which are one checkpoint's values.
- Digits: tokenizers of the SmolLM kind split numbers into single digits before merging; the importer does not.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from interp.errors import UserError
from interp.models.gguf_header import GgufHeader

REBUILT_TENSORS = frozenset({"rope_freqs.weight"})
"""Tensors that become numbers of the config, not weights of the model."""

# llama.cpp scales scores by 1/sqrt(d_model / n_heads), not 1/sqrt(d_head), on exactly these (architecture, layers):
# the 27B models; https://github.com/ggml-org/llama.cpp/blob/master/src/llama-model.cpp, f_attention_scale.
_SCALED_BY_WIDTH = {("gemma2", 46), ("gemma3", 62)}

# `tokenizer.ggml.pre` values for which llama.cpp splits off each digit, then applies GPT-2's pattern (llama-vocab.cpp).
_SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
_GPT2_PATTERN = {"default", "gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jina-es", "jina-de", "granite-docling"}


def repair_config(config: Any, header: GgufHeader) -> None:
    """Correct a transformers config, in place, from the header. Raises `UserError` for rotary scaling unknown here."""
    _shorten_floats(config)
    if "token_embd.weight" in header.tensors:
        config.vocab_size = header.tensors["token_embd.weight"].shape[0]
    key_length = header.get("attention.key_length")
    # With a width of their own for sliding layers (Gemma 4), `key_length` is not `head_dim`.
    if key_length is not None and header.get("attention.key_length_swa") is None and hasattr(config, "head_dim"):
        config.head_dim = key_length
    if hasattr(config, "query_pre_attn_scalar"):
        by_width = (header.architecture, config.num_hidden_layers) in _SCALED_BY_WIDTH
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if by_width else config.head_dim
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if header.get(key) is not None and hasattr(config, key):
            setattr(config, key, _shortest(header.get(key)))
    _repair_rope(config, header)


def repair_tokenizer(tokenizer: Any, header: GgufHeader, report: Callable[[str], None]) -> None:
    """Correct how a byte-level tokenizer splits text, in place; reports a kind of splitting that is not known."""
    from tokenizers import pre_tokenizers

    kind = header.metadata.get("tokenizer.ggml.pre", "default")
    if header.metadata.get("tokenizer.ggml.model") != "gpt2":
        return
    if kind in _SINGLE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif kind not in _GPT2_PATTERN and isinstance(tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
        report(f"The file's tokenizer splits text as {kind!r}, which is not known here; GPT-2's way is used instead.")


def _repair_rope(config: Any, header: GgufHeader) -> None:
    kind = header.get("rope.scaling.type")
    factor = header.get("rope.scaling.factor", header.get("rope.scale_linear"))
    if kind is None and factor not in (None, 0.0, 1.0):
        kind = "linear"
    if "rope_freqs.weight" in header.tensors:
        _set_rope(config, **_llama3_parameters(config, header))
    elif kind == "linear" and factor not in (None, 0.0, 1.0):
        _set_rope(config, rope_type="linear", factor=_shortest(factor))
    elif kind == "yarn":
        original = header.get("rope.scaling.original_context_length")
        if factor is None or original is None:
            raise UserError(
                f"{header.path} asks for yarn rotary scaling without its factor or original context length."
            )
        _set_rope(config, rope_type="yarn", factor=_shortest(factor), original_max_position_embeddings=original)
    elif kind not in (None, "none", "linear"):
        raise UserError(f"{header.path} uses rotary scaling {kind!r}, which cannot be imported exactly from GGUF.")


def _set_rope(config: Any, **parameters: Any) -> None:
    """Where layer types rotate differently (Gemma 3), scaling belongs to the layers with full attention."""
    by_type = config.rope_parameters.get("full_attention")
    (config.rope_parameters if by_type is None else by_type).update(parameters)


def _llama3_parameters(config: Any, header: GgufHeader) -> dict[str, Any]:
    """Parameters of Llama 3.1's rotary scaling that give back the divisors stored in `rope_freqs`, or `UserError`.

    llama.cpp stores only the divisors; low and high factor 1 and 4 are those of every released model.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    divisors = read_float32(header, "rope_freqs.weight").astype(np.float64)
    plain = config.rope_parameters["rope_theta"] ** (-np.arange(len(divisors)) / len(divisors))
    before = dict(config.rope_parameters)
    for original in (8192, 4096, 16384, 32768):
        parameters = {
            "rope_type": "llama3",
            "factor": _shortest(divisors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }
        config.rope_parameters = before | parameters
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        config.rope_parameters = before
        if np.allclose(frequencies.double().numpy(), plain / divisors, rtol=1e-5, atol=0):
            return parameters
    raise UserError(f"{header.path} stores rotary divisors that are not Llama 3's; they cannot be imported exactly.")


def read_float32(header: GgufHeader, name: str) -> np.ndarray:
    """A tensor that the file stores as float32."""
    entry = header.tensors[name]
    count = entry.n_bytes // 4
    return np.fromfile(header.path, "<f4", count, offset=header.data_start + entry.offset).reshape(entry.shape)


def _shorten_floats(config: Any) -> None:
    for key, value in list(vars(config).items()):
        if isinstance(value, float):
            setattr(config, key, _shortest(value))
        elif key == "rope_parameters" and isinstance(value, dict):
            setattr(config, key, _shorten_values(value))


def _shorten_values(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _shorten_values(v) if isinstance(v, dict) else _shortest(v) if isinstance(v, float) else v
        for key, v in values.items()
    }


def _shortest(value: float) -> float:
    """The shortest decimal that rounds to the same float32, if `value` is a float32 at all."""
    value = float(value)
    return float(str(np.float32(value))) if float(np.float32(value)) == value else value
