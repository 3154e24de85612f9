"""Edits that put given values where the model's own would stand."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from interp.edits.base import Context, Edit
from interp.edits.values import TensorLike, Values
from interp.errors import UserError
from interp.points import POINTS, Address


class _Given(Edit):
    """A new value from a tensor: one for all positions, or row p for the absolute position p."""

    portable: ClassVar[bool] = True

    @property
    def by_position(self) -> bool:
        assert self.carried is not None
        return not self.matrix and self.carried.ndim == self.axes + 1

    @cached_property
    def _operands(self) -> dict[str, Any]:
        return {"tensor": self.carried}

    @property
    def static(self) -> tuple[Any, ...]:
        return (self.by_position,)

    def compute(self, value: Tensor, context: Context) -> Tensor:
        new = self._operands["tensor"].to(value)
        if self.by_position:
            assert self.carried is not None
            new = new[context.positions.clamp(max=self.carried.shape[0] - 1)]  # rows beyond the last are not selected
        return new.expand_as(value)

    def _needs_rows(self) -> None:
        assert self.carried is not None
        fits = self.carried.ndim == (2 if self.at.head is not None else 3) if self.matrix else self.by_position
        if not fits:
            raise UserError(
                f"{type(self).__name__} takes {self.at} as it is captured, a row per position; this tensor has shape "
                f"{list(self.carried.shape)}."
            )


@dataclass(frozen=True, repr=False)
class Replace(_Given):
    """A new value: [width] for all positions, or [pos, width], whose row p is for the absolute position p.

    An attention matrix is given as it is captured, [heads, query, key], or one head of it, [query, key].
    """

    tensor: TensorLike

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(tensor=Values.of(self.tensor))

    @property
    def carried(self) -> Tensor:
        return Values.of(self.tensor).tensor


@dataclass(frozen=True, repr=False)
class Freeze(_Given):
    """The value that was recorded, [pos, ..., width] with row p for the absolute position p, as a constant.

    Nothing before the point is reached by a backward through it.
    """

    tensor: TensorLike

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(tensor=Values.of(self.tensor))
        self._needs_rows()

    @property
    def carried(self) -> Tensor:
        return Values.of(self.tensor).tensor


@dataclass(frozen=True, repr=False, init=False)
class Patch(_Given):
    """The value that another run has at the same address and the same absolute positions.

    `from_result` is that run's Result, its captures or the captured tensor; the tensor alone is kept.
    """

    from_result: TensorLike

    def __init__(self, address: Address | str, from_result: Any, positions: Any = None) -> None:
        found = _captured(from_result, Address.parse(address))
        self._set(address=address, from_result=Values.of(found), positions=positions)
        self.__post_init__()
        self._needs_rows()

    @property
    def carried(self) -> Tensor:
        return Values.of(self.from_result).tensor


def _captured(source: Any, address: Address) -> Any:
    """The tensor at `address` in a Result, a mapping of captures or a tensor."""
    source = getattr(source, "capture", source)
    if not isinstance(source, Mapping):
        return source
    if address in source:
        return source[address]
    if address.whole not in source:
        raise UserError(
            f"{address} was not captured in the run to patch from; captured: "
            f"{', '.join(map(str, source)) or 'nothing'}."
        )
    whole = source[address.whole]
    index = address.stream if address.head is None else address.head
    if index is None or (address.stream is not None and POINTS[address.name].shape[0] != "streams"):
        raise UserError(f"{address} is no part of what was captured at {address.whole}; capture it itself.")
    return whole[index] if POINTS[address.name].matrix else whole[:, index]
