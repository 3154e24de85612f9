"""Rows begin as the tokenizer says, never cross a document, and no document is in both parts."""

from itertools import pairwise

import pytest

from interp.errors import UserError
from interp.training.tokens import SHORTEST_ROW, cut_rows, prefix_tokens

from .conftest import BOS, tiny_tokenizer


def test_rows_put_together_are_the_documents(documents: list[str]) -> None:
    tokenizer = tiny_tokenizer()
    rows = cut_rows(documents, tokenizer, context_len=17, train_tokens=10**9, held_out_tokens=300, seed=3)
    assert rows.prefix == [BOS]
    for part in (rows.train, rows.held_out):
        seen: dict[int, list[int]] = {}
        for row in part:
            assert row.tokens[0] == BOS
            assert SHORTEST_ROW < len(row.tokens) <= 17
            seen.setdefault(row.document, []).extend(row.tokens[1:])
        for document, ids in seen.items():
            whole = tokenizer(documents[document], add_special_tokens=False).input_ids
            assert whole[: len(ids)] == ids
            assert len(whole) - len(ids) < SHORTEST_ROW


def test_parts_are_disjoint_whole_documents_and_large_enough(documents: list[str]) -> None:
    rows = cut_rows(documents, tiny_tokenizer(), context_len=17, train_tokens=900, held_out_tokens=300, seed=3)
    train, held_out = ({row.document for row in part} for part in (rows.train, rows.held_out))
    assert not train & held_out
    assert 900 <= sum(len(row.tokens) - 1 for row in rows.train) < 900 + 60
    assert 300 <= sum(len(row.tokens) - 1 for row in rows.held_out) < 300 + 60


def test_one_seed_gives_one_choice(documents: list[str]) -> None:
    def chosen(seed: int) -> list[list[int]]:
        rows = cut_rows(documents, tiny_tokenizer(), context_len=17, train_tokens=500, held_out_tokens=99, seed=seed)
        return [row.tokens for row in rows.train]

    assert chosen(1) == chosen(1)
    assert chosen(1) != chosen(2)


def test_a_small_corpus_keeps_most_for_training(documents: list[str]) -> None:
    rows = cut_rows(documents[:20], tiny_tokenizer(), context_len=17, train_tokens=10**6, held_out_tokens=10**6)
    held_out = sum(len(row.tokens) for row in rows.held_out)
    train = sum(len(row.tokens) for row in rows.train)
    assert 0 < held_out < 0.3 * train


def test_without_bos_rows_have_no_prefix(documents: list[str]) -> None:
    tokenizer = tiny_tokenizer(bos=False)
    assert prefix_tokens(tokenizer) == []
    rows = cut_rows(documents, tokenizer, context_len=16, train_tokens=100, held_out_tokens=50)
    first = {row.document: row for row in reversed(rows.train)}
    assert all(tokenizer(documents[d]).input_ids[: len(row.tokens)] == row.tokens for d, row in first.items())


def test_rows_of_a_document_follow_each_other(documents: list[str]) -> None:
    rows = cut_rows(documents, tiny_tokenizer(), context_len=17, train_tokens=900, held_out_tokens=300)
    changes = sum(a.document != b.document for a, b in pairwise(rows.train))
    assert changes == len({row.document for row in rows.train}) - 1


def test_too_little_text_is_refused() -> None:
    with pytest.raises(UserError, match="too short"):
        cut_rows(["w1 w2 w3", "w1 " * 30], tiny_tokenizer(), context_len=16, train_tokens=100, held_out_tokens=10)
    with pytest.raises(UserError, match="context_len = 4"):
        cut_rows(["w1 " * 30] * 3, tiny_tokenizer(), context_len=4, train_tokens=100, held_out_tokens=10)
