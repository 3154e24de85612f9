"""Named tensors of TransformerLens' bridge on one model: run by its own environment (folder, file, ids, names)."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformer_lens.model_bridge import TransformerBridge  # pyright: ignore[reportMissingImports]


def main(folder: Path, out: Path, ids: list[int], names: list[str]) -> None:
    bridge = TransformerBridge.boot_transformers(str(folder), dtype=torch.float32)
    with torch.no_grad():
        _, cache = bridge.run_with_cache(torch.tensor([ids]), names_filter=names)
    save_file({name: cache[name].clone().contiguous() for name in names}, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4]))
