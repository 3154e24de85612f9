"""Config values that a GGUF file states and the importer does not read, against the published configs."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma2Config, Gemma3TextConfig, LlamaConfig

from interp.errors import UserError
from interp.models.gguf_header import GgufHeader
from interp.models.gguf_repairs import repair_config


def header(architecture: str, **keys: Any) -> GgufHeader:
    metadata = {"general.architecture": architecture}
    metadata |= {f"{architecture}.{key.replace('__', '.')}": value for key, value in keys.items()}
    return GgufHeader(Path("model.gguf"), 3, metadata, {}, {}, (0, 0), 0)


@pytest.mark.parametrize(
    ("config", "key_length", "published"),
    [
        (Gemma2Config(num_hidden_layers=46, hidden_size=4608, num_attention_heads=32, head_dim=128), 128, 144),
        (Gemma2Config(num_hidden_layers=42, hidden_size=3584, num_attention_heads=16, head_dim=256), 256, 256),
        (Gemma3TextConfig(num_hidden_layers=62, hidden_size=5376, num_attention_heads=32, head_dim=128), 128, 168),
        (Gemma3TextConfig(num_hidden_layers=34, hidden_size=2560, num_attention_heads=8, head_dim=256), 256, 256),
    ],
    ids=["gemma-2-27b", "gemma-2-9b", "gemma-3-27b", "gemma-3-4b"],
)
def test_score_scale_of_gemma(config: Any, key_length: int, published: int) -> None:
    architecture = "gemma2" if isinstance(config, Gemma2Config) else "gemma3"
    repair_config(config, header(architecture, attention__key_length=key_length))
    assert (config.head_dim, config.query_pre_attn_scalar) == (key_length, published)


def test_soft_caps_are_the_files() -> None:
    config = Gemma2Config()
    repair_config(config, header("gemma2", attn_logit_softcapping=20.0, final_logit_softcapping=12.5))
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (20.0, 12.5)


def test_yarn_needs_its_original_length() -> None:
    keys: dict[str, Any] = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    with pytest.raises(UserError, match="original context length"):
        repair_config(LlamaConfig(), header("llama", **keys))
    config: Any = LlamaConfig()
    repair_config(config, header("llama", **keys, rope__scaling__original_context_length=4096))
    assert config.rope_parameters == {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
    }


def test_float32_values_become_the_decimals_they_were() -> None:
    config: Any = LlamaConfig(rms_norm_eps=9.999999747378752e-06)
    config.rope_parameters["rope_theta"] = 1000000.0
    repair_config(config, header("llama"))
    assert config.rms_norm_eps == 1e-5
    assert config.rope_parameters["rope_theta"] == 1e6
    assert config.initializer_range == 0.02
