"""What reading costs: a forward pass plain, with one residual tap, and with every block-level point of all layers."""

import torch

from benchmarks.paired import clocked, measure, ratio, spread
from benchmarks.report import Report, Row, Table
from interp import Address, Request, load_model
from interp.models.anatomy import Refusal
from interp.points import BLOCK_POINTS

MODEL, N_POS, ROUNDS = "smollm2-135m-instruct", 128, 31


def run() -> Report:
    """Times over that of the plain forward pass."""
    engine = load_model(MODEL, device="cpu", dtype="float32")
    n_layers = engine.model.n_layers
    tokens = torch.randint(0, engine.model.d_vocab, (N_POS,), generator=torch.Generator().manual_seed(0)).tolist()
    batch = torch.tensor([tokens])
    one = Address("resid_post", n_layers // 2)
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
        engine.run([Request(tokens, capture=[one], return_logits=True)])

    def all_taps() -> None:
        engine.run([Request(tokens, capture=every, return_logits=True)])

    functions = {"plain": plain, "one_tap": one_tap, "all_block_taps": all_taps}
    for function in functions.values():
        function()
    times = measure({name: clocked(function) for name, function in functions.items()}, ROUNDS)
    texts = {"one_tap": f"{one} captured", "all_block_taps": f"{len(every)} block-level points captured"}
    rows = [
        Row(f"{name}_over_plain", text, ratio(times[name], times["plain"]), _milliseconds(times[name]))
        for name, text in texts.items()
    ]
    return Report(
        benchmark="capture",
        title=f"{MODEL}, {N_POS} tokens, {engine.model.dtype} on {engine.model.device}, {ROUNDS} rounds",
        tables=[Table("Time of a forward pass over transformers' own (below 1 is faster)", rows)],
        notes=[f"transformers' own forward pass takes {_milliseconds(times['plain'])}."],
        facts={"seconds": {name: round(spread(taken).median, 4) for name, taken in times.items()}},
    )


def _milliseconds(seconds: list[float]) -> str:
    return f"{spread(seconds).median * 1000:.0f} ms"
