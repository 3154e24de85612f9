"""What the first residual stream is made of on one prompt: the token embedding and, where learned, the positions."""

from torch import Tensor

from interp.models.anatomy import Start


def start_terms(start: Start, embeddings: Tensor, first: Tensor) -> tuple[tuple[str, Tensor], ...]:
    """Addends of `resid_pre.0` by kind (`token`, `position`), each [pos, d_model]; they sum to `first`.

    `embeddings` is that point's tensor. A start that goes through a norm is no sum: one term, all of it under `token`.
    """
    if start.norm is not None or not any(term.kind == "position" for term in start.terms):
        return (("token", first),)
    term = next(term for term in start.terms if term.kind == "token")
    token = embeddings
    if term.via is not None:
        token = token @ term.via.weight.T.to(token)
        token = token if term.via.bias is None else token + term.via.bias.to(token)
    for step in term.tap.steps:
        token = step.read(token)
    return ("token", token), ("position", first - token)
