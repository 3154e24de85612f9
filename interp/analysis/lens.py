"""The logit lens: what the model would say if each layer were its last.

    logits_l = cap( scale · W_U final_norm(x_l) )

for the stream x_l at every layer, through the real final norm, whose statistics are those of x_l itself and not the
last layer's (nostalgebraist, "interpreting GPT: the logit lens", 2020). At the last `resid_post` they are the model's.
Where an adapter stands between groups of blocks, x_l goes through those behind layer l first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.analysis.table import table
from interp.analysis.tokens import Prompt, absolute, prompt_tokens, token_text
from interp.engines.base import Request
from interp.engines.local import LocalEngine
from interp.errors import UserError
from interp.models.anatomy import Refusal
from interp.points import POINTS, Address


@dataclass(frozen=True, eq=False)
class LogitLens:
    """The most probable next tokens by layer and position."""

    point: str
    layers: tuple[int, ...]
    positions: tuple[int, ...]
    """Counted from 0."""
    prompt: tuple[str, ...]
    """The prompt's tokens at `positions`, quoted."""
    token_ids: Int[Tensor, "layers pos k"]
    """Most probable first."""
    texts: tuple[tuple[tuple[str, ...], ...], ...]
    """[layer][pos][k]: these tokens, quoted; their ids where there is no tokenizer."""
    probabilities: Float[Tensor, "layers pos k"]
    """softmax of the logits."""
    softcap: float | None
    """c of the final c·tanh(z/c), through which logits and probabilities have gone; None where the model has none."""
    logits: Float[Tensor, "layers pos d_vocab"] | None
    """If asked: after scale and cap."""

    def __str__(self) -> str:
        cap = "" if self.softcap is None else f", after the cap of {self.softcap:g}"
        header = [self.point, *(f"{p} {text}" for p, text in zip(self.positions, self.prompt, strict=True))]
        rows = [
            [str(layer), *(f"{texts[0]} {float(p[0]):.0%}" for texts, p in zip(of_layer, shares, strict=True))]
            for layer, of_layer, shares in zip(self.layers, self.texts, self.probabilities, strict=True)
        ]
        return table(f"Most probable next token by layer and position{cap}", header, rows)


def logit_lens(
    model: LocalEngine,
    prompt: Prompt,
    top_k: int = 5,
    layers: Sequence[int] | None = None,
    point: str = "resid_post",
    *,
    positions: Sequence[int] | None = None,
    return_logits: bool = False,
) -> LogitLens:
    """Top `top_k` next tokens at `point` of each layer, all layers and positions where None.

    `point` is any that is d_model wide: the stream at `resid_pre`, `resid_mid` or `resid_post`, or one contribution;
    `resid_streams` on a trunk of several streams. Logits are kept with `return_logits` alone: they take layers ×
    positions × d_vocab numbers. Raises `UserError` for a point of another width, a layer, position or
    `top_k` that is not there; `PointRefused` where the model lacks the point or a linear head.
    """
    stacked = point == "resid_streams" and model.model.n_streams > 1
    if not stacked and (point not in POINTS or not POINTS[point].block_level):
        raise UserError(f"A lens reads a point that is d_model wide and exists in every layer; {point!r} is none.")
    if not 1 <= top_k <= model.model.d_vocab:
        raise UserError(f"top_k counts tokens, 1 to {model.model.d_vocab}; it cannot be {top_k}.")
    tokens = prompt_tokens(model, prompt)
    chosen = [absolute(p, len(tokens)) for p in (range(len(tokens)) if positions is None else positions)]
    addresses = [Address(point, layer) for layer in (range(model.model.n_layers) if layers is None else layers)]
    if not chosen or not addresses:
        raise UserError("A lens needs at least one layer and one position.")
    (result,) = model.run([Request(tokens, capture=addresses)])
    ids, probabilities, kept = [], [], []
    for address in addresses:
        logits = model.unembed(result.capture[address][chosen], address.layer)
        best = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1).topk(top_k)
        ids.append(best.indices)
        probabilities.append(best.values)
        kept += [logits] if return_logits else []
    head = model.anatomy.head
    return LogitLens(
        point=point,
        layers=tuple(address.layer for address in addresses if address.layer is not None),
        positions=tuple(chosen),
        prompt=tuple(token_text(model, tokens[p]) for p in chosen),
        token_ids=torch.stack(ids),
        texts=tuple(
            tuple(tuple(token_text(model, t) for t in of_position) for of_position in of_layer.tolist())
            for of_layer in ids
        ),
        probabilities=torch.stack(probabilities),
        softcap=None if isinstance(head, Refusal) else head.cap,
        logits=torch.stack(kept) if kept else None,
    )
