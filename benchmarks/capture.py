"""What reading costs: a forward pass plain, with one residual tap, and with every block-level point of all layers."""

import torch

from benchmarks.paired import compare, table
from interp import Address, Request, load_model
from interp.models.anatomy import Refusal
from interp.points import BLOCK_POINTS

MODEL, N_POS = "smollm2-135m-instruct", 128


def run() -> str:
    """The table."""
    engine = load_model(MODEL)
    n_layers = engine.model.n_layers
    tokens = torch.randint(0, engine.model.d_vocab, (N_POS,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = torch.tensor([tokens])
    every = [
        Address(name, layer)
        for layer in range(n_layers)
        for name in BLOCK_POINTS
        if not isinstance(engine.anatomy.tap(Address(name, layer)), Refusal)
    ]

    def plain() -> None:
        with torch.no_grad():
            engine.module(input_ids=batch, use_cache=False)

    def one_tap() -> None:
        engine.run([Request(tokens, capture=[Address("resid_post", n_layers // 2)], return_logits=True)])

    def all_taps() -> None:
        engine.run([Request(tokens, capture=every, return_logits=True)])

    functions = {
        "plain forward of transformers": plain,
        "with one residual tap": one_tap,
        f"with {len(every)} block-level points": all_taps,
    }
    return table(f"{MODEL}, {N_POS} tokens, {engine.model.dtype} on {engine.model.device}", compare(functions))
