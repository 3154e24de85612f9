"""Custom architectures: which class reads a directory whose `config.json` is none of transformers'.

A class is registered under a name. A directory names it in its `config.json` ("architecture"), or is recognised by
other keys. `load_model`, and with it every command, then takes the directory like any checkpoint.
"""

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from interp.errors import UserError
from interp.models.anatomy import Anatomy

Report = Callable[[str], None]
"""Hears, in one line, what a user should know of a load."""
Config = Mapping[str, Any]
"""What a directory's `config.json` holds."""

BUILT_IN = {"split_llama": "interp.models.split_llama"}
"""By name, the module that registers it when it is imported."""
ENTRY_POINTS = "interp.architectures"
"""Group in which an installed package names, by architecture, the module that registers it."""
OWN_KEYS = ("architecture", "registered_by", "dtype")
"""Keys of `config.json` that are ours and no argument of a class."""


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
    registered_by: str = ""
    """The module whose import registers it; empty where that is the class's own."""
    build: Callable[[Config], nn.Module] | None = None
    """Makes the module from the config, its weights random; `save` writes directories for those that have it."""


REGISTERED: dict[str, Architecture] = {}


def no_parts(folder: Path, config: Config) -> Sequence[Path]:
    """All weights lie in the folder itself."""
    return ()


def never(config: Config) -> bool:
    """Directories name the architecture, and nothing else tells it."""
    return False


def register(
    name: str,
    kind: type[nn.Module],
    *,
    build: Callable[[Config], nn.Module] | None = None,
    anatomy: Callable[[Any], Anatomy] | None = None,
    parts: Callable[[Path, Config], Sequence[Path]] = no_parts,
    recognises: Callable[[Config], bool] = never,
    load: Callable[[Path, Config, torch.dtype, Report], nn.Module] | None = None,
    registered_by: str | None = None,
) -> None:
    """From here on, `load_model` and every command take directories whose `config.json` has `"architecture": name`.

    The module is built as `kind(**config)` from the other keys, or as `build(config)`; its weights are those of
    `model.safetensors` in the folder, all of them and no others. `load(folder, config, dtype, report)` does both in
    another way. `anatomy(module)` is a hand-written Anatomy (see `by_hand`); without it the Anatomy is resolved from a
    run, as for any model. `parts`, `recognises`: as in `Architecture`.

    Where nobody has registered the name yet, a local directory has the module imported that `save` wrote into it as
    `registered_by`: the class's own, unless another is named here. A package that is installed can name its module as
    an entry point of the group `interp.architectures`.

    Raises `UserError` where another class has the name.
    """
    from interp.models.saved import from_keys, reader

    if build is not None and load is not None:
        raise UserError(f"The architecture {name!r} is given build and load; load builds by itself, so leave out one.")
    if load is None:
        build = build or from_keys(kind)
        load = reader(kind, build)
    register_architecture(
        Architecture(name, kind, load, anatomy, parts, recognises, registered_by=registered_by or "", build=build)
    )


def register_architecture(architecture: Architecture) -> None:
    """Keep it under its name. A class that is defined anew, as in a notebook, takes the place of its older self.

    Raises `UserError` where another class has the name.
    """
    taken = REGISTERED.get(architecture.name)
    if taken is not None and _spelled(taken.kind) != _spelled(architecture.kind):
        raise UserError(
            f"The name {architecture.name!r} is taken by {_spelled(taken.kind)}: register "
            f"{_spelled(architecture.kind)} under another."
        )
    REGISTERED[architecture.name] = architecture


def registered_for(module: nn.Module) -> Architecture | None:
    """The architecture whose class `module` is an instance of, subclasses left out."""
    return next((found for found in REGISTERED.values() if type(module) is found.kind), None)


def architecture_of(config: Config, *, local: bool = False) -> Architecture | None:
    """The architecture that a `config.json` names, or that recognises it; None where the config is transformers'.

    Asked in this order: what is registered, what is built in, what an installed package offers; of a `local` directory
    also the module that it says to be registered by, which is imported. Raises `UserError` for a name that nobody
    registers.
    """
    name = config.get("architecture")
    if isinstance(name, str):
        found = REGISTERED.get(name) or _imported(name, BUILT_IN.get(name)) or _installed(name)
        if found is not None:
            return found
        if "model_type" not in config or "registered_by" in config:
            return _stated(name, config.get("registered_by"), local)
    if "model_type" not in config:
        for built_in, module in BUILT_IN.items():
            _imported(built_in, module)
    return next((found for found in REGISTERED.values() if found.recognises(config)), None)


def _imported(name: str, module: str | None) -> Architecture | None:
    if module is not None:
        importlib.import_module(module)
    return REGISTERED.get(name)


def _installed(name: str) -> Architecture | None:
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS, name=name):
        _run(entry.load, f"The architecture {name!r} is offered by an installed package", entry.value)
    return REGISTERED.get(name)


def _run(importing: Callable[[], Any], asked: str, module: str) -> None:
    """Import what is not ours; whatever it raises is why it cannot be imported."""
    try:
        importing()
    except Exception as error:
        said = str(error).splitlines() or [type(error).__name__]
        raise UserError(
            f"{asked}, and the module {module} that registers it cannot be imported ({said[0]}): put its folder on "
            "PYTHONPATH, or install it."
        ) from error


def _stated(name: str, module: object, local: bool) -> Architecture:
    """What the module that the directory names registers when it is imported."""
    asked = f"config.json names the architecture {name!r}, which nobody has registered"
    if not isinstance(module, str) or not module:
        raise UserError(f"{asked}: import the Python module that registers it before load_model, or install it.")
    if not local:
        raise UserError(
            f"{asked}; what comes from the hub names code ({module}) and never has it imported: install the package "
            "that registers it, or import it yourself before load_model."
        )
    _run(lambda: importlib.import_module(module), asked, module)
    if name not in REGISTERED:
        raise UserError(f"{asked}: importing {module} registers no such name; call interp.models.register in it.")
    return REGISTERED[name]


def _spelled(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
