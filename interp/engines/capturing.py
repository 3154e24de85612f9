"""What one batch of requests captures: a buffer per point, [batch, column, ...], filled pass by pass.

Between two matrix products of a model the processor's caches hold weights, so that Python and the allocator cost ten
times there what they cost in a loop. Buffers and the part of each that a pass fills are therefore made before the pass.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from interp.engines.capture_memory import CaptureMemory
from interp.engines.editing import held, select
from interp.errors import InterpError
from interp.points import POINTS, Address


class Buffer:
    """One point's."""

    __slots__ = ("address", "filled", "part", "whole")

    def __init__(self, address: Address) -> None:
        self.address = address
        self.whole: Tensor | None = None
        self.part: Tensor | None = None
        """What this pass fills of it, [batch, pos, ...]."""
        self.filled = 0
        """By how many passes."""


class Capturing:
    """The buffers of one batch, in `memory`."""

    def __init__(self, addresses: Iterable[Address], memory: CaptureMemory) -> None:
        self.buffers = {address: Buffer(address) for address in addresses}
        self._memory, self._device = memory, torch.device("cpu")
        self._n_columns, self._n_passes = 0, 0
        self._columns = slice(0, 0)

    def start(self, n_rows: int, n_columns: int, device: torch.device) -> None:
        """Before the first pass: room for all of them, at the points whose shape an earlier run has found."""
        self._n_columns, self._device = n_columns, device
        for address, buffer in self.buffers.items():
            if address in self._memory.found:
                shape, dtype = self._memory.found[address]
                buffer.whole = self._memory.empty((n_rows, n_columns, *shape), dtype, device)

    def begin(self, columns: slice) -> None:
        """Before each pass, of these columns."""
        self._n_passes += 1
        self._columns = columns
        every = columns == slice(0, self._n_columns)
        for buffer in self.buffers.values():
            buffer.part = buffer.whole if every or buffer.whole is None else buffer.whole[:, columns]

    def put(self, buffer: Buffer, value: Tensor) -> None:
        """Copy what this pass has at a point."""
        buffer.filled += 1
        part = buffer.part
        if part is not None and part.shape == value.shape and part.dtype == value.dtype:
            part.copy_(value)
        else:
            self._make(buffer, value)

    def _make(self, buffer: Buffer, value: Tensor) -> None:
        """A buffer for a shape that no run has had at this point."""
        if POINTS[buffer.address.name].matrix or value.shape[1] == self._n_columns:
            buffer.whole = self._memory.empty(value.shape, value.dtype, self._device).copy_(value)
        else:
            if buffer.whole is None or buffer.filled == 1:
                shape = len(value), self._n_columns, *value.shape[2:]
                buffer.whole = self._memory.empty(shape, value.dtype, self._device)
            buffer.whole[:, self._columns] = value
        if not POINTS[buffer.address.name].matrix:
            self._memory.found[buffer.address] = value.shape[2:], value.dtype

    def rows(self, address: Address, row: int, columns: slice) -> Tensor:
        """One request's rows at `address`; raises `InterpError` where the point's module did not run."""
        buffer = self.buffers[held(address)]
        if buffer.whole is None or buffer.filled != self._n_passes:
            raise InterpError(f"{address}: the module that holds it did not run once in every pass.")
        if POINTS[address.name].matrix:
            return select(buffer.whole[row, :, columns, columns], address)
        return select(buffer.whole[row, columns], address)


__all__ = ["Buffer", "Capturing"]
