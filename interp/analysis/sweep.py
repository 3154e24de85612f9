"""The grid of a patching experiment: which points, at which positions or heads; and what was found there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from interp.analysis.metrics import Metric, measure
from interp.analysis.table import table
from interp.analysis.tokens import Prompt, absolute, prompt_tokens, token_text
from interp.engines.base import Engine
from interp.errors import PointRefused, UserError
from interp.points import POINTS, Address

Points = Sequence[Address | str] | Address | str
"""Point names, which stand for every layer that can be written there (`resid_post`), or single addresses."""
Positions = Sequence[int | Sequence[int]]
"""Each entry is patched by itself: one position, or several together (`[range(2, 5)]`); -1 is the last."""


class Patch(NamedTuple):
    """One cell of a sweep."""

    at: Address
    """With its head, where heads were patched."""
    column: str
    effect: float
    recovered: float


@dataclass(frozen=True, eq=False)
class Patching:
    """What a metric becomes when activations of one prompt are put into a run of the other."""

    rows: tuple[Address, ...]
    columns: tuple[str, ...]
    """Positions with the corrupted prompt's tokens, or heads."""
    metric: Float[Tensor, "rows columns"]
    """The patched runs' values, as measured or as estimated; NaN where a layer has fewer heads than others. float64."""
    clean: float
    """The metric on the clean prompt."""
    corrupted: float
    heads: bool
    """Whether columns are heads."""
    noising: bool
    """False: clean activations were put into the corrupted run. True: corrupted ones into the clean run."""

    @property
    def effect(self) -> Float[Tensor, "rows columns"]:
        """How far each patch moves the metric from the run that it was put into."""
        return self.metric - (self.clean if self.noising else self.corrupted)

    @property
    def recovered(self) -> Float[Tensor, "rows columns"]:
        """(metric - corrupted) / (clean - corrupted): 0 as on the corrupted prompt, 1 as on the clean one."""
        return (self.metric - self.corrupted) / (self.clean - self.corrupted)

    def __getitem__(self, name: str) -> "Patching":
        """The rows of one point."""
        kept = [i for i, row in enumerate(self.rows) if name in (row.name, str(row))]
        if not kept:
            raise KeyError(f"{name!r} was not patched; patched: {', '.join(sorted({row.name for row in self.rows}))}")
        return replace(self, rows=tuple(self.rows[i] for i in kept), metric=self.metric[kept])

    def largest(self, n: int = 10) -> list[Patch]:
        """The `n` patches that move the metric most."""
        size = self.effect.abs().nan_to_num(nan=-1.0).flatten()
        order = size.argsort(descending=True)[: min(n, int((size >= 0).sum()))].tolist()
        cells = [divmod(i, len(self.columns)) for i in order]
        return [
            Patch(self._at(i, j), self.columns[j], float(self.effect[i, j]), float(self.recovered[i, j]))
            for i, j in cells
        ]

    def _at(self, i: int, j: int) -> Address:
        return replace(self.rows[i], head=j) if self.heads else self.rows[i]

    def __str__(self) -> str:
        what = "corrupted into clean" if self.noising else "clean into corrupted"
        title = f"Share recovered, {what}; metric: clean {self.clean:+.4f}, corrupted {self.corrupted:+.4f}"
        rows = [
            [str(row), *("" if value != value else f"{value:+z.2f}" for value in values)]
            for row, values in zip(self.rows, self.recovered.tolist(), strict=True)
        ]
        return table(title, ["patched at", *self.columns], rows)


@dataclass(frozen=True)
class Sweep:
    """Two prompts, the places at which they are compared, and the measure."""

    clean: list[int]
    corrupted: list[int]
    rows: tuple[Address, ...]
    groups: tuple[tuple[int, ...], ...]
    """Positions that are patched together: one group per column, or one for all heads."""
    heads: bool
    columns: tuple[str, ...]
    measure: Callable[[Tensor], Tensor | float]

    def n_heads(self, tensor: Tensor, row: Address) -> int:
        """Heads in a captured tensor."""
        return tensor.shape[0 if POINTS[row.name].matrix else 1]


def sweep(
    model: Engine,
    clean: Prompt,
    corrupted: Prompt,
    points: Points,
    metric: Metric,
    positions: Positions | None,
    heads: bool,
) -> Sweep:
    """The experiment with every mistake found before a model runs.

    Raises `UserError` for prompts that are the same or of unequal length, positions outside of them, points without
    heads where heads are asked for; `PointRefused` for a point that cannot be written.
    """
    one, other = prompt_tokens(model, clean), prompt_tokens(model, corrupted)
    if len(one) != len(other):
        raise UserError(
            f"Patching compares position by position, but the clean prompt has {len(one)} tokens and the corrupted one "
            f"{len(other)}: choose words that are as many tokens long."
        )
    if one == other:
        raise UserError("The clean and the corrupted prompt are the same: there is nothing that a patch could recover.")
    rows = _rows(model, [points] if isinstance(points, (str, Address)) else points, heads)
    chosen = list(range(len(other))) if positions is None else list(positions)
    asked = [[entry] if isinstance(entry, int) else list(entry) for entry in chosen]
    groups = tuple(tuple(absolute(p, len(other)) for p in group) for group in asked)
    if not groups or not all(groups):
        raise UserError("Patching needs at least one position; leave `positions` out for all of them.")
    if heads:
        groups = (tuple(sorted({p for group in groups for p in group})),)
    names = tuple(" ".join(f"{p} {token_text(model, other[p])}" for p in group) for group in groups)
    return Sweep(one, other, rows, groups, heads, () if heads else names, measure(model, metric))


def _rows(model: Engine, points: Sequence[Address | str], heads: bool) -> tuple[Address, ...]:
    rows: list[Address] = []
    for point in points:
        if isinstance(point, str) and point in POINTS and POINTS[point].per_layer:
            layers = [Address(point, layer) for layer in range(model.model.n_layers)]
            found = [address for address in layers if model.support(address).writable]
            if not found:
                raise PointRefused(f"{point} can be written in no layer: {model.support(layers[0]).reason}.")
            rows += found
        else:
            rows.append(Address.parse(point))
            if not (support := model.support(rows[-1])).writable:
                raise PointRefused(f"{rows[-1]} cannot be patched: {support.reason}.")
    for row in rows if heads else ():
        if not POINTS[row.name].has_heads:
            raise UserError(f"heads=True patches one head after the other, but {row} has none; heads are at z.")
        if row.head is not None:
            raise UserError(f"heads=True patches one head after the other; give {row.whole}, not {row}.")
    if not rows:
        raise UserError("Patching needs at least one point.")
    return tuple(rows)


def result_of(sweep: Sweep, metric: Tensor, clean: float, corrupted: float, noising: bool) -> Patching:
    """The experiment's result; `metric` is [rows, columns]."""
    columns = tuple(f"head {h}" for h in range(metric.shape[1])) if sweep.heads else sweep.columns
    return Patching(sweep.rows, columns, metric, clean, corrupted, sweep.heads, noising)


def check_difference(clean: float, corrupted: float) -> None:
    """Raises `UserError` where both prompts give one value: then there is nothing to recover."""
    if clean == corrupted:
        raise UserError(f"The metric is {clean:g} on both prompts, so there is nothing that a patch could recover.")


def empty(n_rows: int, n_columns: int) -> Float[Tensor, "rows columns"]:
    """A grid of NaN."""
    return torch.full((n_rows, n_columns), torch.nan, dtype=torch.float64)
