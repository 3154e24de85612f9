"""The eager engine: a model's modules as they are, read and edited by PyTorch hooks."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from interp.engines.hooks import Session
from interp.engines.local import LocalEngine

LOGGER = logging.getLogger("interp")


class EagerEngine(LocalEngine):
    """A model in this process, run by calling it."""

    name = "eager"
    _told = False

    @contextmanager
    def attached(self, session: Session) -> Iterator[None]:
        """The session's hooks in place."""
        with self._uncompiled(), session.attached(self.module):
            yield

    def forward(self, session: Session, module: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """One pass of `module`, the whole model or its trunk."""
        return module(**inputs)

    def _uncompiled(self) -> AbstractContextManager[Any]:
        """Modules that torch.compile has taken over run as they are: a compiled graph passes later hooks by."""
        compiled = any(module._compiled_call_impl is not None for module in self.module.modules())
        if compiled and not self._told:
            LOGGER.info("%s is compiled; the eager engine runs it uncompiled, where hooks act.", self.model.name)
            self._told = True
        return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
