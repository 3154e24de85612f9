"""Which token ids a prompt or a word stands for, and how a token is shown."""

from collections.abc import Sequence

import torch
from torch import Tensor

from interp.engines.base import Engine
from interp.errors import UserError

Prompt = str | Sequence[int] | Tensor
"""Text, which gets BOS as the tokenizer's own default, or the token ids of one prompt: [pos] or [1, pos]."""


def prompt_tokens(model: Engine, prompt: Prompt) -> list[int]:
    """The prompt's token ids."""
    if isinstance(prompt, str):
        return model.to_tokens(prompt)[0].tolist()
    ids = torch.as_tensor(prompt)
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1:
        raise UserError(f"A prompt is one row of token ids; these have shape {list(ids.shape)}.")
    return ids.tolist()


def token_id(model: Engine, token: int | str) -> int:
    """The id of one token, given as itself or as text (` Paris`, with its space).

    Raises `UserError` for text that is not one token, and for an id outside the vocabulary.
    """
    if isinstance(token, int):
        if not 0 <= token < model.model.d_vocab:
            raise UserError(f"Token id {token} is outside the vocabulary of {model.model.d_vocab} tokens.")
        return token
    if model.tokenizer is None:
        raise UserError(f"{model.model.name} has no tokenizer; give {token!r} as a token id.")
    ids = list(model.tokenizer(token, add_special_tokens=False).input_ids)
    if len(ids) != 1:
        pieces = " + ".join(repr(model.tokenizer.decode([i])) for i in ids) or "nothing"
        raise UserError(f"{token!r} is {len(ids)} tokens here ({pieces}), not one; mind the space before a word.")
    return ids[0]


def token_text(model: Engine, token: int) -> str:
    """The token's text in quotes, which show its spaces; its id where there is no tokenizer."""
    return str(token) if model.tokenizer is None else repr(model.tokenizer.decode([token]))


def absolute(position: int, n_pos: int) -> int:
    """A position counted from 0; negative ones count from the end. Raises `UserError` outside the prompt."""
    if not -n_pos <= position < n_pos:
        raise UserError(f"Position {position} is outside the prompt of {n_pos} tokens.")
    return position % n_pos
