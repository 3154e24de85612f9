"""A selector selects the set of positions that its definition names, in any cut of the sequence, or is refused."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interp.errors import UserError
from interp.points import ALL, Positions, Tokens

N = 14
"""Positions in the sequences below: a prompt and its continuation."""

index = st.integers(0, N - 1)
single = st.one_of(
    index,
    st.builds(range, index, st.integers(0, N), st.integers(1, 3)),
    st.builds(slice, st.none() | index, st.none() | st.integers(0, N)),
    st.sampled_from(["prompt", "generated", "last_prompt", "3", "3:7", "3:", ":5"]),
    st.sampled_from([Tokens(0), Tokens((1, 4)), Tokens((2, 3, 5)), Tokens(5)]),
)
selectors = st.one_of(single, st.lists(single, min_size=1, max_size=4), st.tuples(single, st.tuples(single, single)))
sequences = st.lists(st.integers(0, 5), min_size=N, max_size=N)


def by_definition(selector: Any, ids: list[int], n_prompt: int) -> set[int]:
    """The selected positions, written down once more from the definitions."""
    everything = list(range(N))
    match selector:
        case bool():
            raise AssertionError
        case int():
            return {selector} & set(everything)
        case range():
            return set(selector) & set(everything)
        case slice():
            return set(everything[selector])
        case "prompt":
            return set(everything[:n_prompt])
        case "generated":
            return set(everything[n_prompt:])
        case "last_prompt":
            return {n_prompt - 1}
        case str():
            start, colon, stop = selector.partition(":")
            return set(everything[int(start or 0) : int(stop) if stop else None]) if colon else {int(start)}
        case Tokens():
            return {p for p, token in enumerate(ids) if token in selector.ids}
        case _:
            return set().union(*(by_definition(part, ids, n_prompt) for part in selector))


def parsed(selector: Any) -> Positions | None:
    """None for selectors that are empty by themselves."""
    try:
        return Positions.parse(selector)
    except UserError as error:
        assert "select nothing" in str(error)
        return None


@given(selectors, sequences, st.integers(1, N))
def test_selected_is_the_set_that_the_definitions_give(selector: Any, ids: list[int], n_prompt: int) -> None:
    positions, right = parsed(selector), by_definition(selector, ids, n_prompt)
    if positions is None:
        assert right == set()
    else:
        assert {p for p, chosen in enumerate(positions.selected(0, N, n_prompt, ids)) if chosen} == right


@given(selectors, sequences, st.integers(1, N), index)
def test_a_later_cut_selects_what_the_whole_selects_there(
    selector: Any, ids: list[int], n_prompt: int, start: int
) -> None:
    if (positions := parsed(selector)) is not None:
        whole = positions.selected(0, N, n_prompt, ids)
        assert positions.selected(start, N - start, n_prompt, ids[start:]) == whole[start:]
        steps = [positions.selected(p, 1, n_prompt, [ids[p]])[0] for p in range(N)]
        assert steps == whole


@given(selectors, sequences, st.integers(1, 9), st.integers(0, 5))
def test_check_refuses_exactly_what_lies_outside_or_can_never_act(
    selector: Any, ids: list[int], n_prompt: int, new: int
) -> None:
    positions = parsed(selector)
    if positions is None:
        return
    through = n_prompt + max(new - 1, 0)
    outside = any((start if stop is None else stop - 1) >= n_prompt + new for start, stop in positions.spans)
    reached = by_definition(selector, ids, n_prompt) & set(range(through))
    # a token of the continuation is not known beforehand: any may come
    may_come = bool(positions.tokens) and through > n_prompt
    known = reached if not may_come else reached | {through - 1}
    if outside or not known:
        with pytest.raises(UserError, match="outside the sequence" if outside else "never act"):
            positions.check(ids[:n_prompt], new)
    else:
        positions.check(ids[:n_prompt], new)
        if not positions.tokens:
            assert positions.last(n_prompt, new) == max(reached)


@given(selectors)
def test_json_gives_equal_positions_back(selector: Any) -> None:
    if (positions := parsed(selector)) is not None:
        again = Positions.from_json(positions.to_json())
        assert again == positions and hash(again) == hash(positions)
        assert Positions.parse(positions) == positions and str(positions)


def test_what_selects_alike_is_equal() -> None:
    same = [(2, 3, 4), range(2, 5), "2:5", slice(2, 5), [4, "2:4"], np.array([2, 3, 4]), ("2", 3, range(3, 5))]
    assert len({Positions.parse(selector) for selector in same}) == 1
    assert Positions.parse(None) == Positions.parse("0:") == Positions.parse(slice(None)) == ALL
    assert Positions.parse(("prompt", "generated")).everywhere and not Positions.parse("1:").everywhere
    assert Positions.parse("last_prompt, generated") == Positions.parse(("generated", "last_prompt"))
    assert Tokens((3, 1, 3)) == Tokens([1, 3]) and Tokens(4) == Tokens((4,))
    assert Positions.parse(7) != Positions.parse(8)


def test_positions_do_not_change() -> None:
    with pytest.raises(AttributeError):
        Positions.parse(3).spans = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("selector", "sentence"),
    [
        (-1, "Position -1 is below 0.*'last_prompt'"),
        ((0, -3), "Position -3"),
        ("-2", "Position -2"),
        (slice(-3, None), "Position -3"),
        ((), "select nothing"),
        (range(4, 4), "select nothing"),
        ("5:5", "select nothing"),
        ("promt", "'promt' selects no positions; give an index"),
        (2.5, "2.5 selects no positions"),
        (True, "whole number"),
        ((1, None), "None stands for all"),
        (slice(2, None, 2), "without an end"),
        ("1:2:3", "selects no positions"),
    ],
)
def test_a_selector_that_means_nothing_is_refused(selector: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        Positions.parse(selector)
    assert str(error.value).endswith(".")


@pytest.mark.parametrize("ids", [(), [1.5], "12", [True]])
@pytest.mark.usefixtures("unchecked_signatures")
def test_token_ids_are_whole_numbers(ids: Any) -> None:
    with pytest.raises(UserError):
        Tokens(ids)


PROMPT = [11, 64, 2]


@pytest.mark.parametrize(
    ("selector", "new", "sentence"),
    [
        (3, 0, "Position 3 of the edit is outside the sequence of 3 tokens."),
        ("2:9", 4, "Position 7 of the edit is outside the sequence of 7 tokens."),
        ("9:", 4, "Position 9 of the edit is outside the sequence of 7 tokens."),
        ("generated", 0, "generated lies after the prompt's 3 tokens, and no new ones are asked for"),
        ("generated", 1, "lies after the 3 positions that go through the model .the last new token is chosen, not run"),
        (6, 4, "6 lies after the 6 positions that go through the model"),
        (Tokens(5), 0, "tokens 5 selects nothing in the prompt, and no new token goes through the model"),
        (Tokens(5), 1, "no new token goes through the model"),
        ((Tokens(5), "generated"), 0, "selects nothing in the prompt"),
    ],
)
def test_an_edit_that_would_never_act_is_an_error_that_says_why(selector: Any, new: int, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        Positions.parse(selector).check(PROMPT, new)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("selector", "new"),
    [(2, 0), ("2:7", 4), ("generated", 2), (5, 4), (Tokens(64), 0), (Tokens(5), 2), (("last_prompt", "generated"), 0)],
)
def test_an_edit_that_acts_is_none(selector: Any, new: int) -> None:
    Positions.parse(selector).check(PROMPT, new)


@pytest.mark.parametrize("data", [3.5, {"tokens": [1]}, [{"tokens": 3}], [{"ids": [1]}], [["x"]], ["x"], [-1]])
def test_other_json_is_refused(data: Any) -> None:
    with pytest.raises(UserError):
        Positions.from_json(data)


def test_token_ids_are_asked_for_where_they_are_needed() -> None:
    with pytest.raises(ValueError, match="2 positions need 2 token ids"):
        Positions.parse(Tokens(1)).selected(0, 2, 5)
