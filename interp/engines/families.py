"""Which families are proven: a tiny random model of every causal-LM type, every proof in true float64, one table."""

import multiprocessing
import os
import queue
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from interp.points import POINTS, STREAM_POINTS, Address

SECONDS = 120
"""After which a type is given up."""
LISTED = [name for name in POINTS if name != "adapter_out"]
"""Points that a type of transformers may have: the blocks of none are two groups with an adapter between them."""


@dataclass(frozen=True)
class Verdict:
    """What the proofs say about one type."""

    family: str
    status: str
    """`proven`, `not proven`, `not causal` or `not built`."""
    reason: str = ""
    """Why it is not proven; empty where it is."""
    served: tuple[str, ...] = ()
    """Points that at least one layer serves."""
    partly: dict[str, str] = field(default_factory=dict)
    """Of those, the ones that some layers refuse: which layers, and why."""
    refused: dict[str, str] = field(default_factory=dict)
    """Points that no layer serves, and why (the first layer's reason)."""
    claims: int = 0
    worst: float = 0.0
    """Largest difference among the claims that hold, in units of rounding."""
    worst_equation: str = ""


def types() -> list[str]:
    """Every model type of transformers' causal-LM mapping."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def families() -> list[str]:
    """Every type, each followed by its other wirings."""
    from interp.models.tiny import VARIANTS

    return sorted({*types(), *VARIANTS})


def examine(family: str) -> Verdict:
    """Build a tiny model of one type, or of another wiring of it, and run every proof."""
    import torch

    from interp.engines.doctor import refuse_unproven
    from interp.engines.load import wrap
    from interp.models.tiny import tiny_model

    try:
        model = tiny_model(family, torch.float64)
    except Exception as error:  # a config may raise anything
        return Verdict(family, "not built", _line(error))
    try:
        if not _causal(model):
            return Verdict(family, "not causal", "earlier positions see later ones")
        engine = wrap(model, name=family, prove=False)
        claims = refuse_unproven(engine)
    except Exception as error:  # so may a model that has never been run this way
        return Verdict(family, "not proven", _line(error))
    n_layers = engine.model.n_layers
    served, partly, refused = [], {}, {}
    for point in (POINTS[name] for name in LISTED):
        stream = 0 if engine.model.n_streams > 1 and point.name in STREAM_POINTS else None
        layers = range(n_layers) if point.per_layer else [None]
        supports = [engine.support(Address(point.name, layer, stream=stream)) for layer in layers]
        without = [layer for layer, support in zip(layers, supports, strict=True) if not support.readable]
        if len(without) < len(supports):
            served.append(point.name)
        else:
            refused[point.name] = supports[0].reason
        if 0 < len(without) < len(supports):
            partly[point.name] = f"not at {', '.join(map(str, without))}: {supports[without[0] or 0].reason}"
    failed = [c for c in claims if c.proof in ("P1", "P2", "P4") and not c.holds]
    checked = {c.layer for c in claims if c.proof == "P1"}
    holding = max((c for c in claims if c.holds), key=lambda c: c.difference, default=None)
    reason = ""
    if failed:
        worst = max(failed, key=lambda c: c.difference)
        reason = (
            f"{worst.equation} fails at layer {worst.layer}" if worst.layer is not None else f"{worst.equation} fails"
        )
    elif checked != set(range(n_layers)):
        reason = f"what layer {min(set(range(n_layers)) - checked)} adds to its stream is not resolved"
    elif not any(c.proof == "P4" for c in claims):
        reason = "the head is not resolved"
    return Verdict(
        family,
        "proven" if not reason else "not proven",
        reason,
        tuple(served),
        partly,
        refused,
        len(claims),
        0.0 if holding is None else holding.difference,
        "" if holding is None else holding.equation,
    )


def examine_all(
    chosen: Sequence[str], jobs: int | None = None, progress: Callable[[int, int], None] = lambda *_: None
) -> list[Verdict]:
    """One Verdict per type, in order; each runs in a process of its own, which a crash or a hang cannot outlive."""
    verdicts = []
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        for verdict in pool.map(_alone, chosen):
            verdicts.append(verdict)
            progress(len(verdicts), len(chosen))
    return verdicts


def _alone(family: str) -> Verdict:
    context: Any = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
    results = context.Queue()
    process = context.Process(target=_work, args=(family, results), daemon=True)
    process.start()
    try:
        return results.get(timeout=SECONDS)
    except queue.Empty:
        return Verdict(family, "not proven", f"took more than {SECONDS} s, or crashed")
    finally:
        process.kill()
        process.join()


def _work(family: str, results: Any) -> None:
    import torch

    torch.set_num_threads(1)
    results.put(examine(family))


def _causal(model: Any) -> bool:
    """Whether the first position's logits ignore the last token."""
    import torch

    from interp.models.float64 import numerics

    tokens = torch.tensor([[5, 7, 11, 13]])
    other = torch.tensor([[5, 7, 11, 17]])
    with torch.no_grad(), numerics(torch.float64):
        first, second = (model(input_ids=ids, use_cache=False).logits[0, 0] for ids in (tokens, other))
    return bool((first - second).abs().amax() <= 1e-9 * first.abs().amax())


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]


def page(verdicts: Sequence[Verdict]) -> str:
    """`docs/families.md`."""
    import importlib.metadata

    proven = [v for v in verdicts if v.status == "proven"]
    known = set(types())
    of_types, others = [v for v in proven if v.family in known], [v for v in verdicts if v.family not in known]
    reasons = _numbered(proven)
    lines = [
        "# Families",
        "",
        f"A tiny random model of each of the {len(verdicts) - len(others)} causal-LM types of transformers "
        f"{importlib.metadata.version('transformers')}, and of {len(others)} other wirings of some of them, every "
        f"proof in true float64. {len(of_types)} types are proven: P1, P2 and P4 hold on every layer, and every point "
        "that is served has an equation of its own that holds.",
        "",
        f"`make families` writes this page anew. Of the {len(LISTED)} points, each row says how many are served, and "
        "which are refused by the number of the reason (listed below); `some` are those that only some layers have. "
        "The difference is the largest among all claims, in units of rounding: epsilon times the summands' magnitude.",
        "",
        "| family | served | largest difference | at | refused | some |",
        "|---|---|---|---|---|---|",
    ]
    for v in proven:
        refused = _by_reason({point: str(reasons[reason]) for point, reason in v.refused.items()})
        partly = "; ".join(f"{points} {where}" for where, points in _grouped(v.partly).items())
        lines.append(
            f"| {v.family} | {len(v.served)} | {v.worst:.2g} | {_cell(v.worst_equation)} "
            f"| {refused} | {_cell(partly)} |"
        )
    lines += ["", "## Why a point is refused", ""]
    lines += [f"{number}. {reason}" for reason, number in reasons.items()]
    for status, title in (("not proven", "Not proven"), ("not causal", "Not causal"), ("not built", "Not built")):
        rows = [v for v in verdicts if v.status == status]
        if rows:
            lines += ["", f"## {title}", "", "| family | reason |", "|---|---|"]
            lines += [f"| {v.family} | {_cell(v.reason)} |" for v in rows]
    lines += ["", "## Points", "", "| point | families that serve it | refused in |", "|---|---|---|"]
    for point in LISTED:
        n = sum(point in v.served for v in of_types)
        lines.append(f"| `{point}` | {n} | {len(of_types) - n} |")
    return "\n".join(lines) + "\n"


def _numbered(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """Every reason, the most frequent first."""
    counts = Counter(reason for v in verdicts for reason in v.refused.values())
    return {reason: i for i, (reason, _) in enumerate(sorted(counts.items(), key=lambda c: (-c[1], c[0])), 1)}


def _grouped(by_point: dict[str, str]) -> dict[str, str]:
    """Points with the same text, in the table's order, joined: by text."""
    groups: dict[str, list[str]] = {}
    for point, text in by_point.items():
        groups.setdefault(text, []).append(point)
    return {text: ", ".join(points) for text, points in groups.items()}


def _by_reason(numbers: dict[str, str]) -> str:
    return "; ".join(f"{number}: {points}" for number, points in _grouped(numbers).items())


def _cell(text: str) -> str:
    return text.replace("|", "/")
