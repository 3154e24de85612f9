"""Tiny random models of real families that can show a fault: random norm gains and biases, unequal dimensions,
fewer key-value heads than heads, head width times heads unlike the model's width."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig

from interp.models.split_llama import SplitLlama
from interp.models.split_llama_files import SplitLlamaConfig
from interp.models.tiny import randomize

D_MODEL, D_MLP, N_HEADS, N_KV_HEADS, D_HEAD, D_VOCAB, N_LAYERS = 48, 80, 6, 2, 10, 131, 3

_LLAMA: dict[str, Any] = {
    "hidden_size": D_MODEL,
    "intermediate_size": D_MLP,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": N_HEADS,
    "num_key_value_heads": N_KV_HEADS,
    "head_dim": D_HEAD,
    "vocab_size": D_VOCAB,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {
    "n_embd": D_MODEL,
    "n_layer": N_LAYERS,
    "n_head": N_HEADS,
    "n_inner": D_MLP,
    "n_positions": 64,
    "vocab_size": D_VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NEOX = {
    "hidden_size": D_MODEL,
    "intermediate_size": D_MLP,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": N_HEADS,
    "vocab_size": D_VOCAB,
    "max_position_embeddings": 64,
    "rotary_pct": 0.5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "gpt2": ("gpt2", _GPT2),
    "gpt_neox_parallel": ("gpt_neox", _NEOX | {"use_parallel_residual": True}),
    "gpt_neox_sequential": ("gpt_neox", _NEOX | {"use_parallel_residual": False}),
    "qwen2": ("qwen2", {k: v for k, v in _LLAMA.items() if k != "head_dim"}),
    "qwen3": ("qwen3", _LLAMA),
    "gemma": ("gemma", _LLAMA),
    "gemma2": ("gemma2", _LLAMA | _SLIDING | {"query_pre_attn_scalar": 7, "final_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", _LLAMA | _SLIDING | {"query_pre_attn_scalar": 7}),
    "olmo2": ("olmo2", {k: v for k, v in _LLAMA.items() if k != "head_dim"}),
    "glm4": ("glm4", _LLAMA | {"partial_rotary_factor": 0.5}),
    "granite": (
        "granite",
        {k: v for k, v in _LLAMA.items() if k != "head_dim"}
        | {
            "residual_multiplier": 0.22,
            "embedding_multiplier": 3.0,
            "logits_scaling": 8.0,
            "attention_multiplier": 0.2,
        },
    ),
    "cohere": (
        "cohere",
        {k: v for k, v in _LLAMA.items() if k != "head_dim"} | {"logit_scale": 0.0625, "use_qk_norm": False},
    ),
    "phi": ("phi", {k: v for k, v in _LLAMA.items() if k != "head_dim"} | {"partial_rotary_factor": 0.5}),
    "cohere2": (
        "cohere2",
        {k: v for k, v in _LLAMA.items() if k != "head_dim"} | {"logit_scale": 0.0625, "sliding_window": 4},
    ),
    "phi3": ("phi3", {k: v for k, v in _LLAMA.items() if k != "head_dim"} | {"pad_token_id": 0}),
    "olmo": ("olmo", {k: v for k, v in _LLAMA.items() if k != "head_dim"}),
    "qwen3_moe": (
        "qwen3_moe",
        _LLAMA
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 36,
            "decoder_sparse_step": 2,
            "experts_implementation": "eager",
        },
    ),
    "mixtral": ("mixtral", _LLAMA | {"num_local_experts": 4, "experts_implementation": "eager"}),
    "gptj": ("gptj", _GPT2 | {"rotary_dim": 4}),
    "opt": (
        "opt",
        {k: v for k, v in _LLAMA.items() if k not in ("head_dim", "intermediate_size", "num_key_value_heads")}
        | {"ffn_dim": D_MLP, "word_embed_proj_dim": D_MODEL, "pad_token_id": 0},
    ),
    "bloom": ("bloom", {"hidden_size": D_MODEL, "n_layer": N_LAYERS, "n_head": N_HEADS, "vocab_size": D_VOCAB} | _ENDS),
    "mpt": (
        "mpt",
        {"d_model": D_MODEL, "n_layers": N_LAYERS, "n_heads": 4, "vocab_size": D_VOCAB, "max_seq_len": 64}
        | {"expansion_ratio": 2}
        | _ENDS,
    ),
    "falcon": (
        "falcon",
        {k: v for k, v in _LLAMA.items() if k not in ("head_dim", "intermediate_size", "num_key_value_heads")}
        | {"num_kv_heads": N_KV_HEADS, "new_decoder_architecture": True, "ffn_hidden_size": D_MLP, "bias": True},
    ),
    "stablelm": ("stablelm", {k: v for k, v in _LLAMA.items() if k != "head_dim"} | {"partial_rotary_factor": 0.5}),
}

_EARLY = _LLAMA | {
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 14,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "attention_bias": True,
    "mlp_bias": True,
}
SPLIT_LLAMAS = {"split_llama": False, "split_llama_mlp": True}
"""One early layer of a Llama of its own dimensions, an adapter, and the last two layers of another: a matrix or an MLP
stands between them. The dimensions of this file are those of the late layers."""
EVERY = (*FAMILIES, *SPLIT_LLAMAS)


def build(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> nn.Module:
    """A tiny model of `family` in eval mode; `changes` go to its config."""
    torch.manual_seed(seed)
    if family in SPLIT_LLAMAS:
        model: nn.Module = SplitLlama(_split_llama(family, **changes), dtype=dtype)
    else:
        model = _of_transformers(family, dtype, **changes)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        randomize(name, parameter, generator)
    return model.to(dtype).eval().requires_grad_(False)


def _of_transformers(family: str, dtype: torch.dtype, **changes: Any) -> nn.Module:
    model_type, fields = FAMILIES[family]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**fields, **changes))
    finally:
        torch.set_default_dtype(before)


@cache
def _folder() -> TemporaryDirectory:
    """Kept as long as the process, since a SplitLlama looks for its tokenizer where it was read."""
    return TemporaryDirectory()


def _split_llama(family: str, **changes: Any) -> SplitLlamaConfig:
    """A directory without weights, of which only some layers are used; `changes` go to both of its checkpoints."""
    folder = Path(_folder().name) / family
    for name, fields in (("early", _EARLY), ("late", _LLAMA)):
        LlamaConfig(**fields, **changes).save_pretrained(folder / name)
    stated = {"path8b": "early", "path70b": "late", "num_layers_8": 1, "num_layers_70": N_LAYERS - 1}
    stated |= {"vocab_size": D_VOCAB, "mlp": SPLIT_LLAMAS[family]}
    (folder / "config.json").write_text(json.dumps(stated))
    return SplitLlamaConfig(folder, random_init=True)
