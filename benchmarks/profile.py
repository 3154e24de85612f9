"""`python -m benchmarks.profile`: where generation with a captured point spends its time, by operation.

Shares of what a few runs take, for one caller and for eight; what no operation accounts for is Python.
"""

import time

from torch.profiler import ProfilerActivity, profile

from benchmarks.generate import CALLERS, MODEL, N_NEW, N_PROMPT, POINT
from benchmarks.prompts import prompts
from interp import Request, load_model
from interp.engines.eager import EagerEngine

N_RUNS, N_ENTRIES = 3, 8


def main() -> None:
    """Print the two tables."""
    engine = load_model(MODEL, device="cpu", dtype="float32")
    texts = prompts(engine.tokenizer, CALLERS, N_PROMPT)
    for callers in (1, CALLERS):
        requests = [Request(ids, [POINT], max_new_tokens=N_NEW) for ids in texts[:callers]]
        print("\n".join(entries(engine, requests)))


def entries(engine: EagerEngine, requests: list[Request]) -> list[str]:
    """The operations that take most, with their share of all time that passed and their number of calls per run."""
    engine.run(requests)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        began = time.perf_counter()
        for _ in range(N_RUNS):
            engine.run(requests)
        passed = time.perf_counter() - began
    seconds = {event.key: event.self_cpu_time_total / 1e6 for event in profiled.key_averages()}
    calls = {event.key: event.count // N_RUNS for event in profiled.key_averages()}
    most = sorted(seconds, key=seconds.__getitem__, reverse=True)[:N_ENTRIES]
    shares = {f"{key}, {calls[key]} calls": seconds[key] for key in most}
    shares["other operations"] = sum(seconds.values()) - sum(shares.values())
    shares["Python between them"] = passed - sum(seconds.values())
    return [
        f"{len(requests)} callers: {passed / N_RUNS:.2f} s a run under the profiler",
        *(f"  {taken / passed:6.1%}  {what}" for what, taken in shares.items()),
    ]


if __name__ == "__main__":
    main()
