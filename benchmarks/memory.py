"""What generation with capture holds at most, in a process of its own: `python -m benchmarks.memory CALLERS`.

    peak of the run − libraries − tokenizer ≤ (weights + KV cache + captured tensors) × 1.10

Libraries are what the process holds after it has imported everything and sent a tiny model of the same type the same
way: code, thread pools and buffers that are there before any weight is. The tokenizer is weighed by loading it once
before. The peak of loading is another number.
"""

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer

from benchmarks.prompts import prompts
from benchmarks.resident import held, peak
from interp import Request, load_model
from interp.engines.eager import EagerEngine
from interp.engines.load import wrap
from interp.errors import UserError
from interp.models.checkpoint import resolve
from interp.models.tiny import tiny_model

RUNS = 3


def measure(model: str, point: str, n_prompt: int, n_new: int, callers: int) -> dict[str, Any]:
    """The figures of one process, in bytes; peaks and what is held when loaded are without libraries and tokenizer."""
    command = [sys.executable, "-m", "benchmarks.memory", model, point, *map(str, (n_prompt, n_new, callers))]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError("The process that measures memory ended with an error; what it said stands above.")
    return json.loads(done.stdout.splitlines()[-1])


def main(model: str, point: str, n_prompt: int, n_new: int, callers: int) -> None:
    tiny = wrap(tiny_model("llama"), prove=False)
    tiny.run([Request([1, 2, 3], capture=["resid_post.1"], max_new_tokens=3) for _ in range(callers)])
    del tiny
    gc.collect()
    libraries = held()
    spare = AutoTokenizer.from_pretrained(resolve(model, lambda line: None).path)
    spare("Hello, world")
    tokenizer = held() - libraries
    del spare
    gc.collect()
    before = libraries + tokenizer
    with peak() as loading:
        engine = load_model(model, device="cpu", dtype="float32")
    engine.module.generation_config.eos_token_id = None  # type: ignore[union-attr]
    requests = [Request(ids, [point], max_new_tokens=n_new) for ids in prompts(engine.tokenizer, callers, n_prompt)]
    loaded, runs, captured = held(), [], 0
    for _ in range(RUNS):
        with peak() as run:
            results = engine.run(requests)
        runs.append(run.bytes - before)
        captured = sum(tensor.nbytes for result in results for tensor in result.capture.values())
        del results
    figures = {
        "libraries": libraries,
        "tokenizer": tokenizer,
        "loading_peak": loading.bytes - before,
        "loaded": loaded - before,
        "run_peaks": runs,
        "weights": weights(engine.module),
        "kv_cache": kv_cache(engine, callers * (n_prompt + n_new - 1)),
        "captured": captured,
        "measured": run.measured,
    }
    print(json.dumps(figures))


def weights(module: nn.Module) -> int:
    """Bytes of all parameters and buffers, shared ones once."""
    stores = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in module.state_dict().values()}
    return sum(stores.values())


def kv_cache(engine: EagerEngine, positions: int) -> int:
    """Bytes of the keys and values of that many positions."""
    model = engine.model
    per_position = 2 * model.n_layers * model.n_kv_heads * model.d_head
    return positions * per_position * torch.finfo(getattr(torch, model.dtype)).bits // 8


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
