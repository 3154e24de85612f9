"""What the package captures and generates on the oldest transformers that it admits.

Run by an environment of its own with a folder of models and token ids; writes MODEL.safetensors per model.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from interp import Request, load_model

POINTS = ["resid_post.1", "attn_probs.0", "z.2", "mlp_act.1", "logits"]


def main(models: Path, out: Path, ids: list[int]) -> None:
    for folder in sorted(models.iterdir()):
        engine = load_model(folder, device="cpu", dtype="float32")
        plain, new = Request(ids, POINTS), Request(ids, ["resid_post.1"], max_new_tokens=4)
        (captured,), (continued,) = engine.run([plain]), engine.run([new])
        saved = {str(address): tensor.contiguous() for address, tensor in captured.capture.items()}
        saved |= {"continued": continued.capture["resid_post.1"], "tokens": torch.tensor(continued.tokens)}
        save_file(saved, out / f"{folder.name}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
