"""How documents become rows of tokens: BOS first where the tokenizer puts one, no row across two documents."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from interp.errors import UserError

SHORTEST_ROW = 8
"""A document's last row is dropped when it has fewer tokens: a model's first few positions are not like the others."""


class Row(NamedTuple):
    """One sequence for the model."""

    tokens: list[int]
    """Token ids, the prefix (BOS) included; at most context_len."""
    document: int
    """Index of the document that it was cut from."""


@dataclass(frozen=True)
class TokenRows:
    """Training and held-out rows, cut from disjoint documents."""

    train: list[Row]
    held_out: list[Row]
    prefix: list[int]
    """Tokens that begin every row: what the tokenizer itself puts before a text, usually BOS or nothing."""


def cut_rows(
    documents: Sequence[str],
    tokenizer: Any,
    *,
    context_len: int,
    train_tokens: int,
    held_out_tokens: int,
    seed: int = 0,
) -> TokenRows:
    """Rows of up to `context_len` tokens from whole documents, taken in a shuffled order until each part has enough.

    Held-out documents are taken first; a corpus too small for both gives a tenth of itself to the held-out part.
    Token counts are those of the text, the prefix not counted. Raises `UserError` where fewer than two documents
    hold a row.
    """
    prefix = prefix_tokens(tokenizer)
    width = context_len - len(prefix)
    if width < SHORTEST_ROW:
        raise UserError(
            f"context_len = {context_len} leaves {width} tokens per row; use at least {SHORTEST_ROW + len(prefix)}."
        )
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)
    encoded: list[list[Row]] = []
    n_tokens = 0
    for start in range(0, len(order), 64):
        some = order[start : start + 64]
        for document, ids in zip(some, _encode([documents[i] for i in some], tokenizer), strict=True):
            if rows := _cut(ids, document, prefix, width):
                encoded.append(rows)
                n_tokens += sum(len(row.tokens) - len(prefix) for row in rows)
        if n_tokens >= train_tokens + held_out_tokens:
            break
    if len(encoded) < 2:
        raise UserError(
            f"The text is too short: training and evaluation need two documents of at least {SHORTEST_ROW} tokens "
            f"(separated by two empty lines in a .txt file), found {len(encoded)}."
        )
    if n_tokens < train_tokens + held_out_tokens:
        held_out_tokens = min(held_out_tokens, n_tokens // 10)
    held_out, rest = _take(encoded, held_out_tokens, len(prefix), leave=1)
    train, _ = _take(rest, train_tokens, len(prefix), leave=0)
    return TokenRows(train, held_out, prefix)


def prefix_tokens(tokenizer: Any) -> list[int]:
    """The tokens that `tokenizer` puts before a text by default."""
    with_special, plain = tokenizer("a").input_ids, tokenizer("a", add_special_tokens=False).input_ids
    starts = range(len(with_special) - len(plain) + 1)
    return with_special[: next((i for i in starts if with_special[i : i + len(plain)] == plain), 0)]


def _encode(texts: list[str], tokenizer: Any) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, verbose=False).input_ids


def _cut(ids: list[int], document: int, prefix: list[int], width: int) -> list[Row]:
    pieces = (ids[i : i + width] for i in range(0, len(ids), width))
    return [Row(prefix + piece, document) for piece in pieces if len(piece) >= SHORTEST_ROW]


def _take(documents: list[list[Row]], n_tokens: int, n_prefix: int, leave: int) -> tuple[list[Row], list[list[Row]]]:
    """Whole documents until `n_tokens` are reached (at least one, at most all but `leave`), and what is left."""
    taken: list[Row] = []
    counted = used = 0
    while used < len(documents) - leave and (used == 0 or counted < n_tokens):
        taken += documents[used]
        counted += sum(len(row.tokens) - n_prefix for row in documents[used])
        used += 1
    return taken, documents[used:]
