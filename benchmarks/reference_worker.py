"""The reference engine, interp-engine, in a process of its own: loads a model once, then answers a line with a line.

Run by the Python of `.peers/interp_engine` with a model's folder. Each line on stdin is a JSON object
`{"prompts": [[id, …], …], "point": "resid_post.15", "new": 64}`; every prompt is one caller in a thread of its own, as
its synchronous API is used. The answer has `seconds` for all of them and each one's new `tokens` and captured `shapes`.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from interp_engine import load_model  # pyright: ignore[reportMissingImports]
from interp_engine.sync import sync_model  # pyright: ignore[reportMissingImports]


def answer(model: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Run the callers at once."""

    def call(prompt: list[int]) -> tuple[list[int], list[int]]:
        completion, captured = model.capture_generation(prompt, [order["point"]], max_tokens=order["new"])
        (tensor,) = captured.values()
        return list(completion.token_ids), list(tensor.shape)

    with ThreadPoolExecutor(len(order["prompts"])) as callers:
        started = time.perf_counter()
        done = list(callers.map(call, order["prompts"]))
        seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens": [tokens for tokens, _ in done], "shapes": [shape for _, shape in done]}


def main(folder: str) -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # whatever the libraries print is no answer
    loaded = load_model(folder, backend="eager", device="cpu", dtype="float32")
    loaded.tokenizer.eos_token_id = None  # every generation has the full length
    model = sync_model(loaded)
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(model, json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
