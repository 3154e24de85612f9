"""Every tensor that TransformerLens' bridge caches: run by its own environment with a folder of models and token ids.

Writes MODEL.safetensors per model, and MODEL.forked.safetensors with the hooks that exist once the flags for the inputs
of attention and MLP are set.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformer_lens.model_bridge import TransformerBridge  # pyright: ignore[reportMissingImports]

FORKED = ("hook_attn_in", "hook_mlp_in")


def cached(bridge, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        _, cache = bridge.run_with_cache(tokens)
    return {name: value.detach().clone().contiguous() for name, value in cache.items()}


def main(models: Path, out: Path, ids: list[int]) -> None:
    tokens = torch.tensor([ids])
    for folder in sorted(models.iterdir()):
        bridge = TransformerBridge.boot_transformers(str(folder))
        save_file(cached(bridge, tokens), out / f"{folder.name}.safetensors")
        bridge.set_use_hook_mlp_in(True)
        bridge.set_use_attn_in(True)
        forked = {name: value for name, value in cached(bridge, tokens).items() if name.endswith(FORKED)}
        save_file(forked, out / f"{folder.name}.forked.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
