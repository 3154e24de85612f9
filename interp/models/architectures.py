"""Custom architectures: which class reads a directory whose `config.json` is none of transformers'.

A class is registered under a name. A directory names it in its `config.json` ("architecture"), or is recognised by
other keys. `load_model`, and with it every command, then takes the directory like any checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from interp.models.anatomy import Anatomy

Report = Callable[[str], None]
"""Hears, in one line, what a user should know of a load."""
Config = Mapping[str, Any]
"""What a directory's `config.json` holds."""

BUILT_IN = {"split_llama": "interp.models.split_llama"}
"""By name, the module that registers it when it is imported."""


@dataclass(frozen=True)
class Architecture:
    """One registered class."""

    name: str
    kind: type[nn.Module]
    load: Callable[[Path, Config, torch.dtype, Report], nn.Module]
    """From the folder, its `config.json`, the dtype: the module, on the CPU, with its weights. `UserError` if it can't;
    what was initialised randomly, for want of weights, is reported."""
    anatomy: Callable[[nn.Module], Anatomy] | None
    """Writes the Anatomy by hand; None where it is resolved from a run."""
    parts: Callable[[Path, Config], Sequence[Path]]
    """Further checkpoint folders that the weights come from. The first states dtype and tokenizer where the folder
    itself does not."""
    recognises: Callable[[Config], bool]
    """Whether a `config.json` that names no architecture is one of this kind."""


REGISTERED: dict[str, Architecture] = {}
