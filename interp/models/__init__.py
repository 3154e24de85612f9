"""Models: which module plays which role, and the architectures that users register themselves."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interp.models.architectures import register
    from interp.models.saved import save
    from interp.models.split_llama import SplitLlama, SplitLlamaConfig

_HOME = {
    "SplitLlama": "interp.models.split_llama",
    "SplitLlamaConfig": "interp.models.split_llama",
    "register": "interp.models.architectures",
    "save": "interp.models.saved",
}

__all__ = ["SplitLlama", "SplitLlamaConfig", "register", "save"]


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'interp.models' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
