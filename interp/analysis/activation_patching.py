"""Activation patching: put one prompt's activations into a run of another, one place after the other, and measure.

Where clean activations, put into a run of the corrupted prompt, bring back the clean answer, they are enough for it
(denoising); where corrupted ones destroy it in a clean run, the clean ones were needed (noising). Vig et al. 2020,
arXiv:2004.12265; Meng et al. 2022, arXiv:2202.05262; Heimersheim and Nanda 2024, arXiv:2404.15255.
"""

from typing import NamedTuple

from rich.console import Console
from rich.progress import track
from torch import Tensor

from interp.analysis.metrics import Metric, number
from interp.analysis.sweep import Patching, Points, Positions, check_difference, empty, result_of, sweep
from interp.analysis.tokens import Prompt
from interp.edits import Replace
from interp.engines.base import Engine, Request
from interp.errors import UserError
from interp.points import POINTS, Address


class _Cell(NamedTuple):
    """One patched run."""

    row: int
    column: int
    edit: Replace


def activation_patching(
    model: Engine,
    clean: Prompt,
    corrupted: Prompt,
    points: Points,
    metric: Metric,
    *,
    positions: Positions | None = None,
    heads: bool = False,
    noising: bool = False,
    batch_size: int = 16,
    progress: bool | None = None,
) -> Patching:
    """The metric of every patched run: [layers, positions] for one point's name, more rows for more points.

    Rows are `points`: a name stands for all layers that can be written there. Columns are `positions`, each by itself,
    all where None; with `heads`, they are the point's heads (`z`), each patched at all of `positions` together. Clean
    activations go into the corrupted run, with `noising` the other way round. `batch_size` patched copies of the prompt
    run in one forward pass. A bar shows progress on a terminal, or as `progress` says.

    Raises `UserError` for prompts of unequal length, positions outside of them, a metric that both prompts share, and
    what the engine raises; `PointRefused` for a point that cannot be written.
    """
    if batch_size < 1:
        raise UserError(f"batch_size counts patched runs in one forward pass; {batch_size} is below 1.")
    plan = sweep(model, clean, corrupted, points, metric, positions, heads)
    target, source = (plan.clean, plan.corrupted) if noising else (plan.corrupted, plan.clean)
    wanted = [Request(target, return_logits=True), Request(source, capture=plan.rows, return_logits=True)]
    before, given = model.run(wanted)
    here, there = (number(plan.measure(_logits(result.logits))) for result in (before, given))
    values = (here, there) if noising else (there, here)
    check_difference(*values)
    patches = [given.capture[row] for row in plan.rows]
    widths = [
        plan.n_heads(patch, row) if heads else len(plan.groups) for row, patch in zip(plan.rows, patches, strict=True)
    ]
    grid = empty(len(plan.rows), max(widths))
    cells = [
        _Cell(i, j, _patch(row, patches[i], j if heads else None, plan.groups[0 if heads else j]))
        for i, row in enumerate(plan.rows)
        for j in range(widths[i])
    ]
    screen = Console(stderr=True)
    shown = screen.is_terminal if progress is None else progress
    batches = [cells[start : start + batch_size] for start in range(0, len(cells), batch_size)]
    for batch in track(batches, "activation patching", console=screen, disable=not shown):
        patched = model.run([Request(target, edits=[cell.edit], return_logits=True) for cell in batch])
        for cell, result in zip(batch, patched, strict=True):
            grid[cell.row, cell.column] = number(plan.measure(_logits(result.logits)))
    return result_of(plan, grid, *values, noising)


def _patch(row: Address, value: Tensor, head: int | None, positions: tuple[int, ...]) -> Replace:
    """The edit that puts the captured `value` of the whole row, or one head of it, at `positions`."""
    if head is None:
        return Replace(row, value, positions=positions)
    one = value[head] if POINTS[row.name].matrix else value[:, head]
    return Replace(Address(row.name, row.layer, head=head), one, positions=positions)


def _logits(logits: Tensor | None) -> Tensor:
    assert logits is not None
    return logits
