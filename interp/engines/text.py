"""New tokens as text, while they come: stop texts, and what can be shown before the next token is known."""

from collections.abc import Sequence
from typing import Any

UNFINISHED = "�"
"""What a tokenizer puts where the bytes of a character are not complete yet."""


class Text:
    """The text of one request's new tokens. Without a tokenizer it stays empty."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens: list[int] = []
        self._end: int | None = None
        self._taken = 0

    def add(self, token: int) -> bool:
        """Append a token; whether a stop text is complete."""
        self._tokens.append(token)
        if self._stop:
            text = self._decode()
            found = [text.find(stop) for stop in self._stop if stop in text]
            self._end = min(found) if found else None
        return self._end is not None

    @property
    def whole(self) -> str:
        """All of it, up to a stop text."""
        return self._decode()[: self._end]

    def take(self, *, final: bool) -> str:
        """What can be shown beyond what was taken before: not an unfinished character, nor what may begin a stop text.

        With `final`, everything.
        """
        if self._tokenizer is None:
            return ""
        text = self.whole
        end = len(text)
        if not final:
            end = len(text.rstrip(UNFINISHED))
            end = min([end, *(start for stop in self._stop if (start := _begins(text[:end], stop)) is not None)])
        shown = text[self._taken : end]
        self._taken = max(self._taken, end)
        return shown

    def _decode(self) -> str:
        return self._tokenizer.decode(self._tokens) if self._tokenizer is not None else ""


def _begins(text: str, stop: str) -> int | None:
    """Where the end of `text` could be the beginning of `stop`."""
    for start in range(max(0, len(text) - len(stop) + 1), len(text)):
        if stop.startswith(text[start:]):
            return start
    return None
