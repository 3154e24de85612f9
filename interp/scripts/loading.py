"""How a command loads the model that it is given: the flags that all of them share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interp.scripts.console import say

if TYPE_CHECKING:
    from interp.engines.eager import EagerEngine


@dataclass(kw_only=True)
class Loading:
    """Flags of every command that takes a model."""

    device: str | None = None
    """cuda, mps or cpu; the best one that is there if left out."""
    dtype: str | None = None
    """float32, bfloat16, float16 or float64; the checkpoint's own if left out."""
    random_init: bool = False
    """Draw weights that no file holds at random without a word; a directory with a config alone is then a model too."""

    def load(self, model: str, *, report: Callable[[str], None] = say, **options: Any) -> "EagerEngine":
        """The model's engine; `options` are further arguments of `load_model`."""
        from interp.engines.load import load_model

        given = {"device": self.device, "dtype": self.dtype, "random_init": self.random_init}
        return load_model(model, report=report, **given, **options)
