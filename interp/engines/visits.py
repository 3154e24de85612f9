"""What is to happen where a forward pass calls a module: one list, for every engine to carry out in its own way."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle


class Visit(NamedTuple):
    """One tensor of one module's call to read, and perhaps to exchange."""

    module: nn.Module
    side: Literal["input", "output"]
    hook: Callable[..., Any]
    """As PyTorch calls it, (module, args, kwargs) before the module runs and (module, args, output) afterwards; it
    gives what goes on instead, (args, kwargs) or the output, or None for what is there."""

    def register(self) -> RemovableHandle:
        """As a hook of PyTorch."""
        if self.side == "input":
            return self.module.register_forward_pre_hook(self.hook, with_kwargs=True)
        return self.module.register_forward_hook(self.hook)


__all__ = ["Visit"]
