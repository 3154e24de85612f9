"""One sublayer run again by itself with tensors inside it exchanged: what one expert adds, what is left without any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from interp.models.float64 import numerics
from interp.models.inside import uncounted, watched_functions
from interp.models.parameters import device_of, dtype_of
from interp.models.probe import Key

if TYPE_CHECKING:
    from interp.models.anatomy import Tap

Change = Callable[[Tensor], Tensor]
"""From a point's value [batch, pos, ...] to its new one."""


def with_argument(
    key: Key, new: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments with another tensor at the position or keyword `key`."""
    if isinstance(key, int):
        return (*args[:key], new, *args[key + 1 :]), kwargs
    return args, {**kwargs, str(key): new}


def pick(output: Any, key: Key) -> Tensor:
    """The tensor of a module's output that `key` names."""
    if key is None:
        return output
    return output[key] if hasattr(output, "__getitem__") else getattr(output, str(key))


def put(output: Any, key: Key, new: Tensor) -> Any:
    """The module's output with that tensor exchanged."""
    if key is None:
        return new
    if isinstance(output, tuple):
        parts = [new if i == key else part for i, part in enumerate(output)]
        return type(output)(*parts) if hasattr(output, "_fields") else tuple(parts)
    if isinstance(output, (dict, list)):
        output[key] = new  # type: ignore[index]
        return output
    changed = copy(output)
    object.__setattr__(changed, str(key), new)
    return changed


def by_position(x: Tensor, batch: int, n_pos: int) -> Tensor:
    """[batch, pos, ...], also where the module holds all prompts' positions in one axis."""
    return x.reshape(batch, n_pos, *x.shape[1:]) if x.ndim == 2 and x.shape[0] == batch * n_pos else x


@contextmanager
def writing(tap: Tap, change: Change, batch: int, n_pos: int) -> Iterator[None]:
    """Inside the context the point at `tap` has the value that `change` makes of its own."""

    def changed(x: Tensor) -> Tensor:
        with uncounted():
            shaped = by_position(x, batch, n_pos)
            return tap.write(shaped, change(tap.read(shaped)).to(shaped.dtype)).reshape(x.shape)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]):
        key = tap.key
        if isinstance(key, int):
            return (*args[:key], changed(args[key]), *args[key + 1 :]), kwargs
        return args, {**kwargs, str(key): changed(kwargs[str(key)])}

    def after(module: nn.Module, args: tuple[Any, ...], output: Any):
        return put(output, tap.key, changed(pick(output, tap.key)))

    def visit(module: nn.Module, name: str, number: int, result: Any):
        if (name, number) != tap.inside:
            return result
        return put(result, tap.key, changed(pick(result, tap.key)))

    with ExitStack() as stack:
        if tap.side == "function":
            stack.enter_context(watched_functions([tap.module], visit))
        elif tap.side == "input":
            stack.callback(tap.module.register_forward_pre_hook(before, with_kwargs=True).remove)
        else:
            stack.callback(tap.module.register_forward_hook(after).remove)
        yield


def shares(tap: Tap, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int, n_pos: int) -> Tensor:
    """[batch, pos, selected, d_model]: the module's output with one expert's weight alone, less that with none."""
    assert tap.masking is not None
    masking = tap.masking
    widths: list[int] = []

    def run(keep: int | None) -> Tensor:
        def only(weights: Tensor) -> Tensor:
            widths.append(weights.shape[-1])
            mask = torch.zeros_like(weights)
            if keep is not None:
                mask[..., keep] = weights[..., keep]
            return mask

        with writing(masking, only, batch, n_pos):
            return by_position(pick(tap.module(*args, **kwargs), tap.key), batch, n_pos).clone()

    none = run(None)
    return torch.stack([run(slot) - none for slot in range(widths[0])], dim=2)


@dataclass(frozen=True, slots=True, eq=False)
class Rerun:
    """A sublayer whose call takes one tensor."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: Key
    """Where the tensor goes among them."""
    flat: bool
    """Whether it takes [pos, d_model] instead of [batch, pos, d_model]."""
    output: Key

    def __call__(self, x: Tensor, *changes: tuple[Tap, Change]) -> Tensor:
        """[pos, d_model] for [pos, d_model], with points inside changed."""
        dtype = dtype_of(self.module)
        x = x.to(device_of(self.module), dtype)
        x = x if self.flat else x[None]
        args, kwargs = self.args, self.kwargs
        if isinstance(self.key, int):
            args = (*args[: self.key], x, *args[self.key + 1 :])
        else:
            kwargs = {**kwargs, str(self.key): x}
        with ExitStack() as stack, torch.no_grad(), numerics(dtype):
            for tap, change in changes:
                stack.enter_context(writing(tap, change, 1, x.shape[-2]))
            result = pick(self.module(*args, **kwargs), self.output)
        return result.reshape(-1, result.shape[-1])
