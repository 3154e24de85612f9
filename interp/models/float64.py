"""Float64 that is float64 inside: the casts to float32 that models contain become casts to float64.

Norms and eager softmax of transformers cast to float32 whatever the model's dtype, which costs a float64 model nine
digits; reference runs lift those casts.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _Lift(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is Tensor.float:
            return args[0].to(torch.float64)
        if func in (Tensor.to, Tensor.type) or "dtype" in kwargs:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


@contextmanager
def true_float64() -> Iterator[Any]:
    """Inside the context nothing is cast down to float32."""
    with _Lift():
        yield


def numerics(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """What a model of `dtype` runs in: `true_float64` for float64, nothing for the rest."""
    return true_float64() if dtype == torch.float64 else nullcontext()
