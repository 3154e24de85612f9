"""What generation gives while a point is captured: over transformers, over the reference engine, over our own without.

Greedy, past every end-of-sequence token, so that all write equally many tokens; that they write the same is checked.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import memory
from benchmarks.paired import Times, clocked, measure, ratio, spread
from benchmarks.prompts import prompts
from benchmarks.reference import worker
from benchmarks.report import Report, Row, Table
from interp import Request, load_model
from interp.engines.base import Result
from interp.engines.eager import EagerEngine
from interp.models.checkpoint import resolve

MODEL, POINT, N_PROMPT, N_NEW, CALLERS = "smollm2-135m-instruct", "resid_post.15", 128, 64, 8
ROUNDS_ALONE, ROUNDS_TOGETHER = 7, 5


def run() -> Report:
    """Speeds while capturing, and memory held."""
    engines = {
        "": _endless(load_model(MODEL, device="cpu", dtype="float32")),
        "compiled": _endless(load_model(MODEL, device="cpu", dtype="float32", compile=True)),
    }
    own = engines[""]
    texts = prompts(own.tokenizer, CALLERS, N_PROMPT)
    folder = resolve(MODEL, lambda line: None).path
    alone, as_alone = _one_caller(engines, texts[0])
    with worker(folder) as reference:
        answers: list[dict[str, Any]] = []

        def ask() -> float:
            answers.append(reference.generate(texts, POINT, N_NEW))
            return answers[-1]["seconds"]

        reference.generate(texts[:1], POINT, 2)
        together, results = _callers(engines, texts, {"reference": ask})
    as_reference = sum(
        ours.tokens[N_PROMPT:] == theirs for ours, theirs in zip(results, answers[-1]["tokens"], strict=True)
    )
    held = memory.measure(MODEL, POINT, N_PROMPT, N_NEW, 1), memory.measure(MODEL, POINT, N_PROMPT, N_NEW, CALLERS)
    return Report(
        benchmark="generate",
        title=(
            f"{MODEL}, {own.model.dtype} on {own.model.device}, {torch.get_num_threads()} threads: {N_PROMPT} tokens "
            f"of prompt, {N_NEW} new ones, {POINT} captured while decoding; {ROUNDS_ALONE} rounds of one caller and "
            f"{ROUNDS_TOGETHER} of {CALLERS}"
        ),
        tables=[
            Table(
                "Tokens per second over another's (above 1 is faster)",
                _speeds(alone, "one_caller", "one caller", "transformers", 1)
                + _speeds(together, "eight_callers", f"{CALLERS} callers", "reference", CALLERS),
            ),
            Table(
                "Most memory held over weights + KV cache + captured (without libraries and tokenizer)",
                [
                    _memory("memory_one_caller", "one caller", held[0]),
                    _memory("memory_eight_callers", f"{CALLERS} callers", held[1]),
                ],
            ),
        ],
        notes=[
            f"transformers.generate: {_rate(alone['transformers'], 1)}; "
            f"interp-engine, eager: {_rate(together['reference'], CALLERS)}.",
            f"The same tokens as transformers.generate: {'yes' if as_alone else 'NO'}; "
            f"as interp-engine: {as_reference} of {CALLERS} prompts.",
            _spoken(held[0]),
        ],
        facts={
            "tokens_equal_transformers": as_alone,
            "prompts_with_tokens_equal_to_reference": as_reference,
            "tokens_per_second": {
                "one_caller": {name: round(N_NEW / spread(taken).median, 2) for name, taken in alone.items()},
                "eight_callers": {
                    name: round(CALLERS * N_NEW / spread(taken).median, 2) for name, taken in together.items()
                },
            },
            "memory_bytes": {"one_caller": held[0], "eight_callers": held[1]},
        },
    )


def _endless(engine: EagerEngine) -> EagerEngine:
    engine.module.generation_config.eos_token_id = None  # type: ignore[union-attr]
    return engine


def _one_caller(engines: dict[str, EagerEngine], prompt: list[int]) -> tuple[Times, bool]:
    """Times beside those of `transformers.generate` on the same module, and whether both write the same."""
    module: Any = engines[""].module
    ids = torch.tensor([prompt])

    def transformers() -> Any:
        return module.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=N_NEW)

    times, (result,) = _callers(engines, [prompt], {"transformers": clocked(transformers)}, ROUNDS_ALONE)
    return times, transformers()[0].tolist() == result.tokens


def _callers(
    engines: dict[str, EagerEngine],
    texts: Sequence[list[int]],
    others: dict[str, Callable[[], float]],
    rounds: int = ROUNDS_TOGETHER,
) -> tuple[Times, list[Result]]:
    """Seconds of each engine for all prompts, in turn with `others`, and of the uncompiled one also without capture.

    With it what ours gave.
    """
    functions: dict[str, Callable[[], list[Result]]] = {}
    asked = [(f"{name} captured".strip(), engine, [POINT]) for name, engine in engines.items()]
    for name, engine, points in [*asked, ("plain", engines[""], [])]:
        requests = [Request(ids, points, max_new_tokens=N_NEW) for ids in texts]
        functions[name] = lambda engine=engine, requests=requests: engine.run(requests)
    results = [function() for function in functions.values()]
    for again in results:
        if [result.tokens for result in again] != [result.tokens for result in results[0]]:
            raise AssertionError("Capture or compilation changed what is written; there is nothing to compare.")
    return measure(others | {name: clocked(f) for name, f in functions.items()}, rounds), results[0]


def _speeds(times: Times, key: str, who: str, other: str, callers: int) -> list[Row]:
    """What is required first: capturing over the other tool; then what capture costs."""
    spelled = {"transformers": "transformers.generate", "reference": "interp-engine"}[other]
    captured, compiled, plain = times["captured"], times["compiled captured"], times["plain"]
    return [
        Row(f"{key}_over_{other}", f"{who}: over {spelled}", ratio(times[other], captured), _rate(captured, callers)),
        Row(
            f"{key}_compiled_over_{other}",
            f"{who}, compiled: over {spelled}",
            ratio(times[other], compiled),
            _rate(compiled, callers),
        ),
        Row(
            f"{key}_over_own_plain", f"{who}: over ours without capture", ratio(plain, captured), _rate(plain, callers)
        ),
    ]


def _rate(seconds: Sequence[float], callers: int) -> str:
    return f"{callers * N_NEW / spread(seconds).median:.1f} tokens/s"


def _memory(key: str, who: str, held: dict[str, Any]) -> Row:
    needed = held["weights"] + held["kv_cache"] + held["captured"]
    ratios = spread([peak / needed for peak in held["run_peaks"]])
    return Row(key, who, ratios, f"{spread(held['run_peaks']).median / 1e6:.0f} of {needed / 1e6:.0f} MB")


def _spoken(held: dict[str, Any]) -> str:
    size = {name: f"{value / 1e6:.1f} MB" for name, value in held.items() if isinstance(value, int)}
    return (
        f"One caller: weights {size['weights']}, KV cache {size['kv_cache']}, captured {size['captured']}; libraries "
        f"({size['libraries']}: after importing everything and running a tiny model the same way) and tokenizer "
        f"({size['tokenizer']}) are subtracted; peak while loading {size['loading_peak']}, held when loaded "
        f"{size['loaded']}; peaks by {held['measured']}."
    )
