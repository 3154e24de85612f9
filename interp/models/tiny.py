"""A tiny random model of any type that transformers' causal-LM mapping knows, built so that faults can show.

One set of small dimensions serves most types: pairwise distinct, fewer key-value heads than heads, head width times
heads unlike the model's width where the config allows it. Norm gains and biases are random: nothing is an identity.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from interp.errors import InterpError

D_VOCAB, N_LAYERS = 131, 3
LARGEST = 100_000_000
"""Parameters above which a model is not tiny: its config has a size that the dimensions here do not reach."""

GENERIC: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size"), 48),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "decoder_ffn_dim", "ffn_hidden_size"), 80),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"), N_LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads"), 6),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("sliding_window", "sliding_window_size"), 4),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("vocab_size_per_layer_input", "text_vocab_size"), D_VOCAB),
    "hidden_size_per_layer_input": 8,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "vocab_size": D_VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rotary_dim": 4,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 40,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 12,
    "attention_dropout": 0.0,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_expand": 2,
    "encoder_layers": 2,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 80,
}
LATENT = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "axk1",
    "axk2",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "longcat_flash",
    "minicpm3",
    "sarvam_mla",
    "youtu",
)
HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid")
ONE_ATTENDS = ["linear_attention", "full_attention", "linear_attention"]
OWN: dict[str, dict[str, Any]] = {
    # Three layers of which one has attention: by default it would come later.
    **{name: {"layer_types": ONE_ATTENDS} for name in HYBRID},
    **{n: {"layer_types": ONE_ATTENDS, "num_key_value_heads": 6} for n in ("kimi_linear", "bailing_hybrid")},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1},
    # Latent attention has one key and value per head.
    **{name: {"num_key_value_heads": 6} for name in LATENT},
    "dots1": {"n_shared_experts": 1},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "helium": {"head_dim": 8},
    "mamba2": {"num_heads": 6, "head_dim": 16, "n_groups": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "cohere_compass_text": {"layer_types": ["full_attention"] * N_LAYERS},
    "falcon_h1": {"mamba_n_heads": 6, "mamba_d_ssm": 96, "mamba_d_head": 16},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 1.5},
        "ffn_config": {"hidden_size": 48, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "n_mamba_heads": 6,
        "num_key_value_heads": 6,
    },
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "o_groups": 2,
        "o_lora_rank": 12,
        "hc_mult": 3,
        "index_n_heads": 4,
        "index_head_dim": 8,
        "index_topk": 2,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
    },
    "hy_v4": {"hc_mult": 3},
}
"""Fields that one type needs beside or instead of the generic ones."""


VARIANTS: dict[str, dict[str, Any]] = {
    "gpt_neox, sequential": {"use_parallel_residual": False},
    "falcon, old": {"parallel_attn": False, "multi_query": False, "alibi": True},
    "falcon, new": {"new_decoder_architecture": True, "num_kv_heads": 2, "multi_query": False},
    "opt, norm behind": {"do_layer_norm_before": False},
    "opt, projected embedding": {"word_embed_proj_dim": 32},
    "gpt2, plain": {"n_inner": None, "scale_attn_by_inverse_layer_idx": True},
    "cohere, query norm": {"use_qk_norm": True},
    "stablelm, parallel": {"use_parallel_residual": True, "qk_layernorm": True},
    "phi, query norm": {"qk_layernorm": True},
    "olmo, clipped": {"clip_qkv": 0.8},
    "gemma2, capped": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "granite, all multipliers": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    },
}
"""Other wirings of a type than its config's default, under the type's name and what is different."""


def tiny_model(family: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """A tiny random model of a type or of one of `VARIANTS`, in eval mode.

    Raises whatever its config or its class raises, and `InterpError` if it is not tiny.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config_type = CONFIG_MAPPING[family.partition(",")[0]]
    fields = _fields(config_type) | VARIANTS.get(family, {})
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        config = config_type(**fields)
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        if size > LARGEST:
            raise InterpError(f"its config has {size:,} parameters with every small dimension that is known here")
        model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            randomize(name, parameter, generator)
    kept = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name in kept and buffer.is_floating_point() and buffer.ndim <= 1:  # a layer's factor, a router's correction
            randomize(name, buffer, generator)
        elif name.endswith("tid2eid"):  # which experts a token goes to, in routers that hash
            chosen = torch.rand(len(buffer), 4, generator=generator).argsort(-1)[:, : buffer.shape[1]]
            buffer.copy_(chosen)
    return model.to(dtype).eval().requires_grad_(False)


def _fields(config_type: type) -> dict[str, Any]:
    """Small values for every field of a config, and of the text part of a multimodal one, that is known here."""
    known = set(inspect.signature(config_type.__init__).parameters) | set(getattr(config_type, "attribute_map", {}))
    for base in config_type.__mro__:
        known |= set(getattr(base, "__annotations__", {}))
    fields = {name: value for name, value in GENERIC.items() if name in known}
    text = getattr(config_type, "sub_configs", {}).get("text_config")
    if text is not None and hasattr(text, "model_type"):
        fields["text_config"] = _fields(text)
    return fields | OWN.get(getattr(config_type, "model_type", ""), {})


def randomize(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    """Norm gains around their start, biases and matrices large enough that every term matters."""
    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
    with torch.no_grad():
        if parameter.ndim >= 2:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        elif name.endswith("bias"):
            parameter.copy_(0.3 * noise)
        else:
            parameter.add_(0.3 * noise)
