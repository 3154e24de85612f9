"""Attribution patching: every patch of a sweep estimated at once, from one forward and one backward pass per pair.

To first order, putting x' for x changes the metric m by  ∇m(x) · (x' - x),  the gradient taken in the run that is
patched (Nanda 2023, "Attribution Patching"; Syed et al. 2023, arXiv:2310.10348). The estimate is exact where the metric
is linear in the activation, and its error grows with the square of the difference: measure what matters with
`activation_patching`.
"""

import torch
from torch import Tensor

from interp.analysis.metrics import Metric, number
from interp.analysis.sweep import Patching, Points, Positions, check_difference, empty, result_of, sweep
from interp.analysis.tokens import Prompt
from interp.engines.cache import run_with_cache
from interp.engines.local import LocalEngine
from interp.errors import UserError
from interp.points import POINTS, Address


def attribution_patching(
    model: LocalEngine,
    clean: Prompt,
    corrupted: Prompt,
    points: Points,
    metric: Metric,
    *,
    positions: Positions | None = None,
    heads: bool = False,
    noising: bool = False,
) -> Patching:
    """What `activation_patching` with the same arguments would give, to first order: its `metric` is an estimate.

    The metric must be differentiable in the logits. Raises what `activation_patching` raises, and `UserError` for a
    metric through which no gradient comes.
    """
    plan = sweep(model, clean, corrupted, points, metric, positions, heads)
    target, source = (plan.clean, plan.corrupted) if noising else (plan.corrupted, plan.clean)
    given = run_with_cache(model, torch.tensor([source]), [*plan.rows, "logits"])
    cache = run_with_cache(model, torch.tensor([target]), [*plan.rows, "logits"], grad=True)
    base = plan.measure(cache["logits"][0])
    if not isinstance(base, Tensor) or not base.requires_grad:
        raise UserError("No gradient comes through this metric: compute it from the logits with torch alone.")
    here, there = number(base.detach()), number(plan.measure(given["logits"][0]))
    values = (here, there) if noising else (there, here)
    check_difference(*values)
    gradients = torch.autograd.grad(base.squeeze(), [cache[row] for row in plan.rows])
    estimates = []
    for row, gradient in zip(plan.rows, gradients, strict=True):
        x, y = cache[row].detach()[0], given[row][0]
        difference = torch.where(x == y, torch.zeros_like(x), y - x)  # a mask's -inf less itself would be no number
        estimates.append(_by_place(row, gradient[0] * difference, heads))
    grid = empty(len(estimates), max(e.shape[1] for e in estimates) if heads else len(plan.groups))
    for i, estimate in enumerate(estimates):
        if heads:
            grid[i, : estimate.shape[1]] = estimate[list(plan.groups[0])].sum(0)
        else:
            for j, group in enumerate(plan.groups):
                grid[i, j] = estimate[list(group)].sum()
    return result_of(plan, here + grid, *values, noising)


def _by_place(row: Address, product: Tensor, heads: bool) -> Tensor:
    """[pos] or, with `heads`, [pos, heads]: the sum over all other axes of [pos, ...] or [heads, query, key]."""
    product = product.to("cpu", torch.float64)
    if POINTS[row.name].matrix and row.head is None:
        product = product.transpose(0, 1)
    return product.flatten(2 if heads else 1).sum(-1)
