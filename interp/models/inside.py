"""Tensors that a module makes inside itself by calling torch functions: seen, and exchanged, where they arise.

A router that scores, selects and weighs in one module passes none of its steps through a module of its own.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

FUNCTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "linear": (nn.functional.linear, torch.matmul, Tensor.matmul, torch.mm, Tensor.mm, Tensor.__matmul__),
    "softmax": (torch.softmax, nn.functional.softmax, Tensor.softmax),
    "sigmoid": (torch.sigmoid, nn.functional.sigmoid, Tensor.sigmoid),
    "topk": (torch.topk, Tensor.topk),
    "gather": (torch.gather, Tensor.gather),
    "div": (torch.div, Tensor.div, Tensor.div_, Tensor.__truediv__, Tensor.__itruediv__),
    "mul": (torch.mul, Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__),
}
_NAMES = {function: name for name, functions in FUNCTIONS.items() for function in functions}


class Inside(NamedTuple):
    """One function call inside a module."""

    function: str
    """A name in `FUNCTIONS`."""
    number: int
    """How many calls of that function came before it during the module's call."""

    def __str__(self) -> str:
        return f"result of {self.function} {self.number}"


_uncounted: ContextVar[bool] = ContextVar("uncounted_functions", default=False)


@contextmanager
def uncounted() -> Iterator[None]:
    """Inside the context functions are called by us, reading or changing a tensor, and not by the module that runs."""
    token = _uncounted.set(True)
    try:
        yield
    finally:
        _uncounted.reset(token)


Visit = Callable[[nn.Module, str, int, Any], Any]
"""Takes the module, the function's name, its number and its result; gives the result to go on with."""


class _Watch(TorchFunctionMode):
    def __init__(self, visit: Visit) -> None:
        super().__init__()
        self.visit = visit
        self.running: list[tuple[nn.Module, Counter[str]]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = _NAMES.get(func) if self.running and not _uncounted.get() else None
        if name is not None:
            for module, counts in reversed(self.running):
                counts[name] += 1
                result = self.visit(module, name, counts[name] - 1, result)
        return result


@contextmanager
def watched_functions(modules: Collection[nn.Module], visit: Visit) -> Iterator[None]:
    """Show `visit` every call of a function in `FUNCTIONS` that one of the modules makes while it runs."""
    with _Watch(visit) as mode:
        handles = []
        for module in modules:
            before = module.register_forward_pre_hook(lambda m, args: mode.running.append((m, Counter())))
            after = module.register_forward_hook(lambda m, args, output: mode.running.pop() and None, always_call=True)
            handles += [before, after]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
