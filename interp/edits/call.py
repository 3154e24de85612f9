"""An edit that calls a Python function, on the eager engine alone."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from interp.edits.base import Edit
from interp.errors import UserError


@dataclass(frozen=True, repr=False)
class Call(Edit):
    """fn(x), of the same shape: x is [pos, ..., width] of one prompt, in a cached step the one row of that step."""

    fn: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.fn):
            raise UserError(f"Call takes a function of a tensor, not {self.fn!r}.")

    def change(self, value: Tensor, positions: Tensor) -> Tensor:
        new = self.fn(value)
        if not isinstance(new, Tensor) or new.shape != value.shape:
            got = f"a tensor of shape {list(new.shape)}" if isinstance(new, Tensor) else f"{type(new).__name__}"
            raise UserError(
                f"The function called at {self.at} returns {got}; it must return shape {list(value.shape)}."
            )
        return new
