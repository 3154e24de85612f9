"""Direct logit attribution: how much each layer and head adds to a logit by itself, on the shortest way to it.

The last stream is the sum of everything that was written to it, and with the final norm's denominator s of this very
run held fixed, a logit before its cap is linear in that sum. For token t, with W_U, b_U and factor k of the head,

    z_t = k · (W_U,t · (gain · (x - mean x) / s + bias) + b_U,t)        x = embeddings + Σ contributions

(the mean for LayerNorm alone), so a contribution c adds d · c, where d is the gradient of z_t with s fixed; for a
difference of two tokens, the difference of two such d. Heads: attn_out_post = m · post_norm(Σ_h head_out_h + b_O),
linear as well with the post-norm's denominator of this run fixed. Biases on the way are rows of their own; an MLP's own
is part of its mlp_out_post. The sum is z and not the logit: where a cap c follows, logit = c · tanh(z / c). (Elhage et
al. 2021, "A Mathematical Framework for Transformer Circuits"; Wang et al. 2022, arXiv:2211.00593.)
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from interp.analysis.frozen_trunk import Contribution, FrozenTrunk, wide
from interp.analysis.table import table
from interp.analysis.tokens import Prompt, absolute, prompt_tokens, token_id, token_text
from interp.engines.base import Request
from interp.engines.local import LocalEngine
from interp.points import Address


@dataclass(frozen=True)
class LogitAttribution:
    """A logit, or the difference of two, as a sum."""

    token: int
    minus: int | None
    """The token whose logit is subtracted, if any."""
    name: str
    """What is explained, in words."""
    position: int
    """Counted from 0."""
    rows: tuple[Contribution, ...]
    """In the order in which they are written to the stream."""
    before_cap: float
    """The model's own value after the head's factor and before its cap; the rows sum to it."""
    logit: float
    """The model's own logit, or difference of logits: after the cap."""
    softcap: float | None
    """c of c·tanh(z/c); None where there is no cap, and `logit` is `before_cap`."""
    unsplit: dict[int, str] = field(default_factory=dict)
    """Layers whose heads were asked for but are no addends here, and why; such a layer has one row."""

    @property
    def total(self) -> float:
        """Sum of the rows."""
        return sum(row.value for row in self.rows)

    @property
    def error(self) -> float:
        """What the rows miss of `before_cap`: rounding, in the model's dtype."""
        return self.total - self.before_cap

    def __getitem__(self, source: str) -> float:
        for row in self.rows:
            if row.source == source:
                return row.value
        raise KeyError(f"{source!r} is no row; rows: {', '.join(row.source for row in self.rows)}")

    @property
    def per_layer(self) -> Tensor:
        """[n_layers]: the sum of each layer's rows."""
        sums = torch.zeros(self._n_layers, dtype=torch.float64)
        for row in self.rows:
            if row.layer is not None:
                sums[row.layer] += row.value
        return sums

    @property
    def per_head(self) -> Tensor:
        """[n_layers, n_heads]; NaN where a layer has no rows of single heads."""
        found = [row for row in self.rows if row.layer is not None and row.head is not None]
        n_heads = 1 + max((row.head for row in found if row.head is not None), default=-1)
        grid = torch.full((self._n_layers, n_heads), torch.nan, dtype=torch.float64)
        for row in found:
            grid[row.layer, row.head] = row.value
        return grid

    @property
    def _n_layers(self) -> int:
        return 1 + max((row.layer for row in self.rows if row.layer is not None), default=-1)

    def largest(self, n: int = 10) -> list[Contribution]:
        """The `n` rows of the largest size."""
        return sorted(self.rows, key=lambda row: -abs(row.value))[:n]

    def __str__(self) -> str:
        shown = self.largest(20)
        rows = [[row.source, f"{row.value:+.4f}"] for row in shown]
        rest = self.total - sum(row.value for row in shown)
        if len(shown) < len(self.rows):
            rows.append([f"{len(self.rows) - len(shown)} smaller rows", f"{rest:+.4f}"])
        rows += [["sum", f"{self.total:+.4f}"], ["error", f"{self.error:+.1e}"]]
        if self.softcap is not None:
            rows.append([f"after the cap of {self.softcap:g}", f"{self.logit:+.4f}"])
        rows += [[f"layer {layer} as one row", reason] for layer, reason in self.unsplit.items()]
        return table(f"{self.name} at position {self.position}", ["source", "adds"], rows)


def direct_logit_attribution(
    model: LocalEngine,
    prompt: Prompt,
    token: int | str,
    minus: int | str | None = None,
    *,
    position: int = -1,
    heads: bool = False,
) -> LogitAttribution:
    """Everything that was added to the stream at `position` by what it adds to the logit of `token`.

    With `minus`, to the difference of two logits. With `heads`, attention's contribution is split into its heads and
    biases; where heads are no addends, the layer stays one row and `unsplit` says why. Sums are made in float64
    whatever the model's dtype. Raises `PointRefused` where the trunk or the head is not linear with its norms'
    denominators fixed, `UserError` for text that is not one token and a position outside the prompt.
    """
    tokens = prompt_tokens(model, prompt)
    at = absolute(position, len(tokens))
    wanted, other = token_id(model, token), None if minus is None else token_id(model, minus)
    trunk = FrozenTrunk(model, heads)
    (result,) = model.run([Request(tokens, capture=trunk.points)])
    values = {address: wide(tensor[at]) for address, tensor in result.capture.items()}

    def difference(of: Tensor) -> Tensor:
        return of[wanted] if other is None else of[wanted] - of[other]

    rows, name = trunk.rows(difference, values), f"logit of {token_text(model, wanted)}"
    return LogitAttribution(
        token=wanted,
        minus=other,
        name=name if other is None else f"{name} minus {token_text(model, other)}",
        position=at,
        rows=tuple(rows),
        before_cap=float(difference(values[Address("lm_head")]) * trunk.head.scale),
        logit=float(difference(values[Address("logits")])),
        softcap=trunk.head.cap,
        unsplit=trunk.unsplit,
    )
