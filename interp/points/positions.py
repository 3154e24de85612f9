"""Which positions of a sequence an edit acts on: indices, ranges, parts of the prompt, token ids, and unions of them.

Positions are absolute: they count from 0 at the prompt's first token and go on through the new tokens, in one full pass
as in every step of a cached one.
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from interp.errors import UserError

NAMES = ("prompt", "generated", "last_prompt")
FORMS = "an index, a range, 'prompt', 'generated', 'last_prompt', '3:7', '3:', Tokens((id, ...)), or a tuple of these"


@dataclass(frozen=True)
class Tokens:
    """The positions at which one of these token ids stands: `Tokens((464, 12))`, or `Tokens(464)`."""

    ids: tuple[int, ...]

    def __init__(self, ids: Iterable[int] | int) -> None:
        given = [ids] if isinstance(ids, int) else ids
        object.__setattr__(self, "ids", tuple(sorted({_index(i, "A token id") for i in given})))
        if not self.ids:
            raise UserError("Tokens without an id selects nothing; give at least one token id.")


@dataclass(frozen=True)
class Positions:
    """A union of selectors in normal form: two that select alike by construction are equal and hash alike."""

    spans: tuple[tuple[int, int | None], ...] = ()
    """[start, stop) in order, apart from each other; None is no end."""
    names: tuple[str, ...] = ()
    """`prompt` (all of it), `last_prompt` (its last token), `generated` (everything after it)."""
    tokens: tuple[int, ...] = ()
    """Token ids."""

    @classmethod
    def parse(cls, selector: Any) -> "Positions":
        """The positions that `selector` means, all where None; raises `UserError` for what is no selector."""
        parts = list(_parts(selector))
        if not parts:
            raise UserError(f"These positions select nothing: {selector!r}; give {FORMS}, or None for all.")
        names = {p for p in parts if isinstance(p, str)}
        ids = {i for p in parts if isinstance(p, Tokens) for i in p.ids}
        spans = [p for p in parts if isinstance(p, tuple)]
        return cls(_merged(spans), tuple(n for n in NAMES if n in names), tuple(sorted(ids)))

    @property
    def everywhere(self) -> bool:
        """Whether every position is selected, whatever the sequence."""
        return self.spans == ((0, None),) or {"prompt", "generated"} <= set(self.names)

    def selected(self, start: int, n: int, n_prompt: int, ids: Sequence[int] = ()) -> list[bool]:
        """Which of the positions start ... start + n - 1 are selected; `ids` are the n tokens there, for `Tokens`."""
        if self.tokens and len(ids) != n:
            raise ValueError(f"{n} positions need {n} token ids; got {len(ids)}.")
        return [self._has(start + i, n_prompt) or (bool(self.tokens) and ids[i] in self.tokens) for i in range(n)]

    def last(self, n_prompt: int, max_new_tokens: int) -> int:
        """The last position that can be selected among those that go through the model; -1 where there is none.

        The last new token is chosen and not run: max(prompt + new - 1, prompt) positions go through the model.
        """
        through = n_prompt + max(max_new_tokens - 1, 0)
        if self.tokens and through > n_prompt:
            return through - 1
        return next((p for p in reversed(range(through)) if self._has(p, n_prompt) or self.tokens), -1)

    def check(self, prompt_ids: Sequence[int], max_new_tokens: int, what: str = "the edit") -> None:
        """Raises `UserError` where an index lies outside the sequence or where no position can ever be selected."""
        n_prompt = len(prompt_ids)
        length = n_prompt + max_new_tokens
        through = n_prompt + max(max_new_tokens - 1, 0)
        for start, stop in self.spans:
            if (start if stop is None else stop - 1) >= length:
                raise UserError(f"Position {max(start, length)} of {what} is outside the sequence of {length} tokens.")
        acts = any(self.selected(0, n_prompt, n_prompt, prompt_ids))
        acts = acts or any(self._has(p, n_prompt) or bool(self.tokens) for p in range(n_prompt, through))
        if not acts:
            raise UserError(f"{what[:1].upper()}{what[1:]} would never act: {self._why(n_prompt, max_new_tokens)}.")

    def _why(self, n_prompt: int, max_new_tokens: int) -> str:
        if self.tokens:
            return f"{self} selects nothing in the prompt, and no new token goes through the model"
        if max_new_tokens == 0:
            return f"{self} lies after the prompt's {n_prompt} tokens, and no new ones are asked for"
        return (
            f"{self} lies after the {n_prompt + max_new_tokens - 1} positions that go through the model "
            "(the last new token is chosen, not run); ask for more new tokens"
        )

    def _has(self, position: int, n_prompt: int) -> bool:
        return (
            any(start <= position and (stop is None or position < stop) for start, stop in self.spans)
            or ("prompt" in self.names and position < n_prompt)
            or ("last_prompt" in self.names and position == n_prompt - 1)
            or ("generated" in self.names and position >= n_prompt)
        )

    def __str__(self) -> str:
        if self.spans == ((0, None),):
            return "all"
        spans = [_span_text(start, stop) for start, stop in self.spans]
        tokens = [f"tokens {'|'.join(map(str, self.tokens))}"] if self.tokens else []
        return ",".join([*spans, *self.names, *tokens])

    def to_json(self) -> list[Any] | None:
        """What JSON can hold: None for all, else a list of texts and {"tokens": [...]}; `from_json` reads it back."""
        if self == ALL:
            return None
        texts = [*(_span_text(start, stop) for start, stop in self.spans), *self.names]
        return [*texts, *([{"tokens": list(self.tokens)}] if self.tokens else [])]

    @classmethod
    def from_json(cls, data: Any) -> "Positions":
        """The positions that `to_json` wrote; also a single text or index. Raises `UserError` on anything else."""
        if data is None or isinstance(data, (int, str)):
            return cls.parse(data)
        if not isinstance(data, list):
            raise UserError(f"Positions are null, a text, an index or a list of these, not {data!r}.")
        return cls.parse([_part_from_json(part) for part in data])


def _part_from_json(part: Any) -> Any:
    if isinstance(part, dict):
        if set(part) != {"tokens"} or not isinstance(part["tokens"], list):
            raise UserError(f'A position given as an object is {{"tokens": [ids]}}, not {part!r}.')
        return Tokens(part["tokens"])
    return part


def _parts(selector: Any) -> Iterator[tuple[int, int | None] | str | Tokens]:
    """Spans, names and tokens of a selector."""
    if selector is None:
        yield 0, None
    elif isinstance(selector, Positions):
        yield from (*selector.spans, *selector.names, *([Tokens(selector.tokens)] if selector.tokens else []))
    elif isinstance(selector, Tokens):
        yield selector
    elif isinstance(selector, str):
        for text in selector.split(","):
            yield from _parts_of_text(text.strip())
    elif isinstance(selector, slice):
        yield from _parts_of_slice(selector)
    elif isinstance(selector, range):
        yield from ((i, i + 1) for i in map(_position, selector))
    elif hasattr(selector, "__index__") and getattr(selector, "ndim", 0) == 0:
        index = _position(selector)
        yield index, index + 1
    elif isinstance(selector, Iterable):
        for part in selector:
            if part is None:
                raise UserError(f"None stands for all positions and cannot be one of several; give {FORMS}.")
            yield from _parts(part)
    else:
        raise UserError(f"{selector!r} selects no positions; give {FORMS}.")


def _parts_of_text(text: str) -> Iterator[tuple[int, int | None] | str]:
    if text in NAMES:
        yield text
        return
    start, colon, stop = text.partition(":")
    try:
        if not colon:
            yield from _parts(int(text))  # type: ignore[misc]
            return
        ends = slice(int(start) if start.strip() else None, int(stop) if stop.strip() else None)
    except ValueError:
        raise UserError(f"{text!r} selects no positions; give {FORMS}.") from None
    yield from _parts_of_slice(ends)


def _parts_of_slice(ends: slice) -> Iterator[tuple[int, int | None]]:
    start = 0 if ends.start is None else _position(ends.start)
    step = 1 if ends.step is None else _index(ends.step, "A step")
    if ends.stop is None:
        if step != 1:
            raise UserError(f"A slice of positions without an end has step 1, not {step}; give its end.")
        yield start, None
    else:
        yield from ((i, i + 1) for i in range(start, _position(ends.stop), step))


def _index(value: Any, what: str) -> int:
    if isinstance(value, bool):
        raise UserError(f"{what} is a whole number, not {value!r}.")
    try:
        return operator.index(value)
    except TypeError:
        raise UserError(f"{what} is a whole number, not {value!r}.") from None


def _position(value: Any) -> int:
    index = _index(value, "A position")
    if index < 0:
        raise UserError(
            f"Position {index} is below 0: positions count from 0 through the whole sequence; "
            "write 'last_prompt' for the prompt's last token."
        )
    return index


def _merged(spans: Iterable[tuple[int, int | None]]) -> tuple[tuple[int, int | None], ...]:
    merged: list[tuple[int, int | None]] = []
    for start, stop in sorted(spans, key=lambda span: span[0]):
        if not merged or (merged[-1][1] is not None and start > merged[-1][1]):
            merged.append((start, stop))
            continue
        first, end = merged[-1]
        merged[-1] = (first, None if end is None or stop is None else max(end, stop))
    return tuple(merged)


def _span_text(start: int, stop: int | None) -> str:
    return f"{start}:" if stop is None else str(start) if stop == start + 1 else f"{start}:{stop}"


ALL = Positions(((0, None),))
"""Every position."""
