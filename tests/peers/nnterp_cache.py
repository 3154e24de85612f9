"""Every accessor of nnterp: run by its own environment with a folder of models and token ids.

Writes MODEL.safetensors per model. Attention probabilities are left out where nnterp itself cannot trace them.
"""

import json
import sys
from pathlib import Path

import torch
from nnterp import StandardizedTransformer  # pyright: ignore[reportMissingImports]
from nnterp.rename_utils import RenameConfig  # pyright: ignore[reportMissingImports]
from safetensors.torch import save_file

OWN = {"phi": RenameConfig(ln_final_name="final_layernorm")}
"""A module name that nnterp 1.3.0 does not know."""
WITHOUT_PROBABILITIES = ("gpt2",)
"""It looks for a call inside the attention's source that transformers 5 no longer has."""


def load(folder: Path) -> StandardizedTransformer:
    probabilities = folder.name not in WITHOUT_PROBABILITIES
    return StandardizedTransformer(
        str(folder),
        enable_attention_probs=probabilities,
        rename_config=OWN.get(folder.name),
        device_map="cpu",
        dtype=torch.float32,
    )


def main(models: Path, out: Path, ids: list[int]) -> None:
    for folder in sorted(models.iterdir()):
        model, saved = load(folder), {}
        with model.trace({"input_ids": torch.tensor([ids])}):
            saved["token_embeddings"] = model.token_embeddings.save()
            for layer in range(model.num_layers):
                saved[f"layers_input[{layer}]"] = model.layers_input[layer].save()
                saved[f"attentions_input[{layer}]"] = model.attentions_input[layer].save()
                if model.attn_probs_available:
                    saved[f"attention_probabilities[{layer}]"] = model.attention_probabilities[layer].save()
                saved[f"attentions_output[{layer}]"] = model.attentions_output[layer].save()
                saved[f"mlps_input[{layer}]"] = model.mlps_input[layer].save()
                saved[f"mlps_output[{layer}]"] = model.mlps_output[layer].save()
                saved[f"layers_output[{layer}]"] = model.layers_output[layer].save()
            saved["ln_final.output"] = model.ln_final.output.save()
            saved["lm_head.output"] = model.lm_head.output.save()
            saved["logits"] = model.logits.save()
        tensors = {name: value.detach().clone().contiguous() for name, value in saved.items()}
        save_file(tensors, out / f"{folder.name}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
