"""`python -m benchmarks.profile [N]`: where generation with a captured point spends its time, by operation.

Shares of what N runs take (three by default), for one caller and for eight; what no operation accounts for is Python.
"""

import sys
import time

from torch.profiler import ProfilerActivity, profile

from benchmarks.generate import CALLERS, MODEL, N_NEW, N_PROMPT, POINT
from benchmarks.prompts import prompts
from interp import Request, load_model
from interp.engines.eager import EagerEngine

N_ENTRIES = 8


def main(arguments: list[str]) -> int:
    """Print the two tables."""
    n_runs = int(arguments[0]) if arguments else 3
    engine = load_model(MODEL, device="cpu", dtype="float32")
    texts = prompts(engine.tokenizer, CALLERS, N_PROMPT)
    for callers in (1, CALLERS):
        requests = [Request(ids, [POINT], max_new_tokens=N_NEW) for ids in texts[:callers]]
        for line in entries(engine, requests, n_runs):
            print(line)
    return 0


def entries(engine: EagerEngine, requests: list[Request], n_runs: int) -> list[str]:
    """The operations that take most, with their share of all time that passed and their number of calls per run."""
    engine.run(requests)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        began = time.perf_counter()
        for _ in range(n_runs):
            engine.run(requests)
        passed = time.perf_counter() - began
    operations = sorted(profiled.key_averages(), key=lambda event: -event.self_cpu_time_total)
    accounted = sum(event.self_cpu_time_total for event in operations) / 1e6
    lines = [f"{len(requests)} callers: {passed / n_runs:.2f} s a run under the profiler"]
    for event in operations[:N_ENTRIES]:
        share = event.self_cpu_time_total / 1e6 / passed
        lines.append(f"  {share:6.1%}  {event.key}, {event.count // n_runs} calls")
    rest = sum(event.self_cpu_time_total for event in operations[N_ENTRIES:]) / 1e6
    return [
        *lines,
        f"  {rest / passed:6.1%}  other operations",
        f"  {1 - accounted / passed:6.1%}  Python between them",
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
