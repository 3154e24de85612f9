"""Every tensor that TransformerLens' bridge caches: run by its own environment with a folder of models and token ids.

Writes MODEL.safetensors per model, and MODEL.forked.safetensors with the hooks that exist once the flags for the inputs
of attention and MLP are set. For some families also MODEL.legacy.safetensors: what the HookedTransformer class of the
same release caches without folding or centring.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformer_lens import HookedTransformer, HookedTransformerConfig  # pyright: ignore[reportMissingImports]
from transformer_lens.model_bridge import TransformerBridge  # pyright: ignore[reportMissingImports]
from transformer_lens.pretrained import weight_conversions  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM

LEGACY = {"gpt2", "gpt_neox_parallel", "gpt_neox_sequential", "qwen3"}
FORKED = ("hook_attn_in", "hook_mlp_in")


def cached(bridge, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        _, cache = bridge.run_with_cache(tokens)
    return {name: value.detach().clone().contiguous() for name, value in cache.items()}


def hooked(folder: Path) -> HookedTransformer:
    """The legacy class on the same weights; its loader knows released models only, so the config is made here."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    own = model.config
    n_heads, kind = own.num_attention_heads, own.model_type
    fields = {
        "n_layers": own.num_hidden_layers,
        "d_model": own.hidden_size,
        "n_ctx": own.max_position_embeddings,
        "n_heads": n_heads,
        "d_head": getattr(own, "head_dim", own.hidden_size // n_heads),
        "d_mlp": own.n_inner if kind == "gpt2" else own.intermediate_size,
        "d_vocab": own.vocab_size,
        "use_attn_result": True,
        "use_hook_mlp_in": True,
        "original_architecture": type(model).__name__,
        "dtype": torch.float32,
        "device": "cpu",
    }
    rotary = {"positional_embedding_type": "rotary", "rotary_adjacent_pairs": False}
    if kind == "gpt2":
        fields |= {"act_fn": "gelu_new", "normalization_type": "LN", "eps": own.layer_norm_epsilon}
        convert = weight_conversions.convert_gpt2_weights
    elif kind == "gpt_neox":
        half = {"rotary_dim": fields["d_head"] // 2, "parallel_attn_mlp": own.use_parallel_residual}
        fields |= rotary | half | {"act_fn": "gelu", "normalization_type": "LN", "eps": own.layer_norm_eps}
        convert = weight_conversions.convert_neox_weights
    else:
        fields |= rotary | {"act_fn": "silu", "normalization_type": "RMS", "eps": own.rms_norm_eps, "gated_mlp": True}
        fields |= {"n_key_value_heads": own.num_key_value_heads, "rotary_dim": own.head_dim, "use_qk_norm": True}
        fields |= {"rotary_base": own.rope_parameters["rope_theta"], "final_rms": True}
        convert = weight_conversions.convert_qwen3_weights
    config = HookedTransformerConfig(**fields)
    legacy = HookedTransformer(config)
    unfolded = dict.fromkeys(("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases"), False)
    legacy.load_and_process_state_dict(convert(model, config), **unfolded)
    return legacy


def main(models: Path, out: Path, ids: list[int]) -> None:
    tokens = torch.tensor([ids])
    for folder in sorted(models.iterdir()):
        bridge = TransformerBridge.boot_transformers(str(folder))
        save_file(cached(bridge, tokens), out / f"{folder.name}.safetensors")
        bridge.set_use_hook_mlp_in(True)
        bridge.set_use_attn_in(True)
        forked = {name: value for name, value in cached(bridge, tokens).items() if name.endswith(FORKED)}
        save_file(forked, out / f"{folder.name}.forked.safetensors")
        if folder.name in LEGACY:
            save_file(cached(hooked(folder), tokens), out / f"{folder.name}.legacy.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
