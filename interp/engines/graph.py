"""Captured tensors that stay on the autograd path of their pass: it goes on with them, so a backward reaches them.

The graph begins at the token embedding and holds no parameters. Each request's part of a tensor is a node of its own;
where a caller wants one tensor for all rows, that one is a node before them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from interp.engines.batching import stacked, unstacked
from interp.engines.visits import Visit
from interp.models.anatomy import Tap
from interp.models.rerun import pick, put, with_argument
from interp.points import POINTS, Address


class Graph:
    """Of one pass; `keep` ([batch, pos], True at real tokens) asks for one tensor of all rows at each address."""

    def __init__(self, root: Tap, keep: Tensor | None = None) -> None:
        self._root, self._keep = root, keep
        self._parts: dict[tuple[Address, int], Tensor] = {}
        self.stacked: dict[Address, Tensor] = {}

    @property
    def beginning(self) -> Visit:
        """Makes what leaves the root a leaf."""
        if self._root.side == "input":
            return Visit(self._root.module, "input", self._before)
        return Visit(self._root.module, "output", self._after)

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        return put(output, self._root.key, _leaf(pick(output, self._root.key)))

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = self._root.key
        given = args[key] if isinstance(key, int) else kwargs[str(key)]
        return with_argument(key, _leaf(given), args, kwargs)

    def pass_through(self, readers: Sequence[tuple[int, Address]], value: Tensor, spans: Sequence[slice]) -> Tensor:
        """The tensor [batch, ...] to go on with: the same values, every reader's part taken from its own node."""
        for address in dict.fromkeys(address for _, address in readers):
            rows = [row for row, asked in readers if asked == address]
            parts = [value[_part(address, row, spans[row])].clone() for row in rows]
            if self._keep is not None:
                whole = self.stacked[address] = stacked(parts, address, self._keep)
                parts = unstacked(whole, address, self._keep)
            value = value.clone()
            for row, part in zip(rows, parts, strict=True):
                self._parts[address, row] = part
                value[_part(address, row, spans[row])] = part
        return value

    def rows(self, address: Address, row: int) -> Tensor:
        """What `row` asked for; raises `KeyError` where its module did not run."""
        return self._parts[address, row]


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_().clone()


def _part(address: Address, row: int, span: slice) -> tuple[Any, ...]:
    one = address.head if address.stream is None else address.stream
    if POINTS[address.name].matrix:
        return row, slice(None) if one is None else one, span, span
    return (row, span) if one is None else (row, span, one)


@contextmanager
def without_parameters(module: nn.Module) -> Iterator[None]:
    """Gradients are recorded, and no parameter takes part."""
    learned = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        for parameter in learned:
            parameter.requires_grad_(False)
        with torch.enable_grad():
            yield
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)
