"""interp: names every place inside a transformer, proves the name, and carries the tensor to circuits."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interp import edits
    from interp.dictionaries import SparseAutoencoder, Transcoder
    from interp.engines.base import Request, Result
    from interp.engines.cache import run_with_cache
    from interp.engines.hooked_split_llama import HookedSplitLlama
    from interp.engines.load import load_model, wrap
    from interp.engines.steering import steer
    from interp.points import Address

__version__ = "0.1.0"

_HOME = {
    "Address": "interp.points",
    "HookedSplitLlama": "interp.engines.hooked_split_llama",
    "Request": "interp.engines.base",
    "Result": "interp.engines.base",
    "SparseAutoencoder": "interp.dictionaries",
    "Transcoder": "interp.dictionaries",
    "load_model": "interp.engines.load",
    "run_with_cache": "interp.engines.cache",
    "steer": "interp.engines.steering",
    "wrap": "interp.engines.load",
}

__all__ = [
    "Address",
    "HookedSplitLlama",
    "Request",
    "Result",
    "SparseAutoencoder",
    "Transcoder",
    "edits",
    "load_model",
    "run_with_cache",
    "steer",
    "wrap",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used, so that `import interp` costs next to nothing."""
    if name == "edits":
        return importlib.import_module("interp.edits")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'interp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
