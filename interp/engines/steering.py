"""Edits that hold for every run of an engine inside a context."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from interp.edits import Edit
from interp.engines.base import Request
from interp.engines.edit_checks import check_place
from interp.errors import UserError

_STEERING: ContextVar[tuple[tuple[Any, tuple[Edit, ...]], ...]] = ContextVar("steering", default=())
"""Engines and their edits, outer contexts first: of this thread or task alone."""


@contextmanager
def steer(model: Any, edits: Sequence[Edit] | Edit) -> Iterator[None]:
    """Inside the context every `model.run`, and what is built on it, applies `edits` before the request's own.

    Contexts nest, the outer one's edits first; other engines and threads are not steered, and nothing stays behind.
    Raises `UserError` or `PointRefused` at once for a point that cannot be written or a tensor of another width;
    whether positions fit is seen with each prompt.
    """
    chosen = (edits,) if isinstance(edits, Edit) else tuple(edits)
    for edit in chosen:
        if not isinstance(edit, Edit):
            raise UserError(f"steer takes edits, not a {type(edit).__name__}.")
        check_place(model.anatomy, model.model, edit)
    token = _STEERING.set((*_STEERING.get(), (model, chosen)))
    try:
        yield
    finally:
        _STEERING.reset(token)


def steered(model: Any, request: Request) -> Request:
    """`request` with the edits of the contexts around it before its own."""
    outer = [edit for engine, edits in _STEERING.get() if engine is model for edit in edits]
    return dataclasses.replace(request, edits=(*outer, *request.edits)) if outer else request
