"""Memory for captured tensors that is lent again once nobody holds it any more.

On the CPU a fresh tensor costs more by the page faults of its first write than by the copy that fills it: all
block-level points of a model of 30 layers are 20,000 faults a pass, which the next run of these shapes need not have.

Memory is lent as the buffer of a storage of its own and comes back when that storage ends, which is when no tensor,
slice, NumPy array or autograd graph over it is left. It is mapped apart from the heap, whose layout decides how often
the allocator returns the model's own temporaries to the system and faults them in anew.
"""

import weakref
from collections import Counter, deque
from collections.abc import Sequence
from math import prod
from mmap import ACCESS_COPY, mmap

import numpy as np
import torch
from torch import Tensor

from interp.points import Address

SMALL = 64 * 1024
"""Bytes below which the allocator has memory at hand that was written before."""
RUNS = 4
"""Memory that none of so many runs has taken is freed, so that large runs may alternate with small ones."""


class _Loan(np.ndarray):
    """Memory under one storage, which alone holds this object."""

    home: "weakref.ref[CaptureMemory]"

    def __del__(self) -> None:
        home = self.home()
        if home is not None and isinstance(self.base, np.ndarray):
            home._take_back(self.nbytes, self.base)


class CaptureMemory:
    """What one engine's runs capture into; safe to use from several threads.

    At most as much waits as the largest of the last `RUNS` runs has taken.
    """

    def __init__(self) -> None:
        # A deque drops its oldest entry when it is full, and every step on it is atomic: tensors end in any thread, at
        # any time, also in the middle of a method of this class.
        self._spare: dict[int, deque[np.ndarray]] = {}
        self._taken: Counter[int] = Counter()
        self._runs: deque[Counter[int]] = deque(maxlen=RUNS)
        self._limit = 0
        self.found: dict[Address, tuple[Sequence[int], torch.dtype]] = {}
        """Shape per token and dtype of every point that has been captured."""
        self._reference: weakref.ref[CaptureMemory] = weakref.ref(self)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A contiguous tensor that shares its storage with nothing; its values are arbitrary."""
        size = prod(shape) * dtype.itemsize
        if device.type != "cpu" or size < SMALL:
            return torch.empty(shape, dtype=dtype, device=device)
        self._taken[size] += 1
        memory = self._find(size)
        loan = memory.view(_Loan)
        loan.home = self._reference
        return torch.frombuffer(loan, dtype=dtype).view(shape)

    def settle(self) -> None:
        """After a run: free what the last runs did not take."""
        taken, self._taken = self._taken, Counter()
        self._runs.append(taken)
        runs = list(self._runs)
        room = {size: max(run[size] for run in runs) for run in runs for size in run}
        self._limit = max(_bytes(run) for run in runs)
        before, self._spare = self._spare, {size: deque(maxlen=number) for size, number in room.items()}
        for size, spare in before.items():
            while (memory := _pop(spare)) is not None:
                self._take_back(size, memory)

    def free(self) -> None:
        """Free everything that waits; what is lent is freed when its holders are gone."""
        self._spare = {}
        self._runs.clear()

    @property
    def waiting(self) -> int:
        """Bytes that wait to be lent."""
        return sum(size * len(spare) for size, spare in self._spare.items())

    def _find(self, size: int) -> np.ndarray:
        memory = _pop(self._spare.get(size))
        if memory is not None:
            return memory
        # This run captures other shapes than earlier ones: as much as it needs goes, so that never both are held.
        missing = size
        for other, spare in self._spare.items():
            while missing > 0 and _pop(spare) is not None:
                missing -= other
        return np.frombuffer(mmap(-1, size, access=ACCESS_COPY), dtype=np.uint8)

    def _take_back(self, size: int, memory: np.ndarray) -> None:
        spare = self._spare.get(size)
        if spare is not None and self.waiting + size <= self._limit:
            spare.append(memory)


def _bytes(taken: "Counter[int]") -> int:
    return sum(size * number for size, number in taken.items())


def _pop(spare: "deque[np.ndarray] | None") -> np.ndarray | None:
    try:
        return spare.pop() if spare is not None else None
    except IndexError:
        return None


__all__ = ["CaptureMemory"]
