"""How a module of a registered class is written to a directory, and read back from it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from interp.errors import UserError
from interp.files import atomic_dir
from interp.models.architectures import OWN_KEYS, Config, Report, registered_for
from interp.models.parameters import dtype_of

WEIGHTS = "model.safetensors"


def save(module: nn.Module, folder: str | Path, config: Config, tokenizer: Any = None) -> None:
    """Write a directory from which `load_model` makes this module again, in any process that can import its class.

    It holds `config.json`: `config`, the arguments that the class is built with, and the name that it is registered
    under; `model.safetensors`; the files of `tokenizer`, one of transformers'. A folder that is there is replaced once
    all of them are written.

    Raises `UserError` for a class that is not registered or that only the running program has, and for a config from
    which the class is not built as this module is.
    """
    from safetensors.torch import save_model

    kind = type(module).__name__
    architecture = registered_for(module)
    if architecture is None:
        raise UserError(f"{kind} is not registered: call interp.models.register(name, {kind}) before it is saved.")
    if architecture.build is None:
        raise UserError(f"{kind} is read by a function of its own: write its directory as that reads it.")
    home = architecture.registered_by or type(module).__module__
    if home == "__main__":
        raise UserError(
            f"{kind} is defined in the program that runs, which no other process can import: move it, with its "
            "registration, to a module of its own and import it from there."
        )
    arguments = {key: value for key, value in config.items() if key not in OWN_KEYS}
    stated = {
        "architecture": architecture.name,
        "registered_by": home,
        "dtype": str(dtype_of(module)).removeprefix("torch."),
        **arguments,
    }
    try:
        text = json.dumps(stated, indent=2) + "\n"
    except TypeError as error:
        raise UserError(
            f"The config of {kind} cannot be written as JSON ({error}): give plain numbers and texts."
        ) from None
    _check_built(module, architecture.build, arguments)
    with atomic_dir(folder) as beside:
        (beside / "config.json").write_text(text, encoding="utf-8")
        save_model(module, str(beside / WEIGHTS), metadata={"format": "pt"})
        if tokenizer is not None:
            tokenizer.save_pretrained(beside)


def _check_built(module: nn.Module, build: Callable[[Config], nn.Module], arguments: Config) -> None:
    """`UserError` where the config makes another module, as a build without memory shows."""
    try:
        with torch.device("meta"):
            built = _built(type(module).__name__, build, arguments)
    except (RuntimeError, NotImplementedError):  # a constructor that reads its tensors needs memory; a load will tell
        return
    mine, theirs = ({name: t.shape for name, t in m.state_dict().items()} for m in (module, built))
    for name in sorted(mine | theirs):
        if mine.get(name) != theirs.get(name):
            raise UserError(
                f"This config does not make this {type(module).__name__}: {name} would be {_shape(theirs.get(name))} "
                f"and is {_shape(mine.get(name))}; give the arguments that it was built with."
            )


def _shape(shape: torch.Size | None) -> str:
    return "missing" if shape is None else str(list(shape))


def from_keys(kind: type[nn.Module]) -> Callable[[Config], nn.Module]:
    """What builds `kind` with a config's keys as arguments."""
    return lambda config: kind(**config)


def _built(kind: str, build: Callable[[Config], nn.Module], arguments: Config) -> nn.Module:
    try:
        return build(arguments)
    except (TypeError, ValueError, KeyError) as error:
        said = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"{kind} cannot be built from its config ({type(error).__name__}: {said}): the keys must be "
            "the arguments that it is built with."
        ) from error


def reader(
    kind: type[nn.Module], build: Callable[[Config], nn.Module]
) -> Callable[[Path, Config, torch.dtype, Report], nn.Module]:
    """What reads directories that `save` writes: the module as `build` makes it, with the weights that lie there."""

    def load(folder: Path, config: Config, dtype: torch.dtype, report: Report) -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)  # constants that a constructor rounds are then those of `dtype`
        try:
            arguments = {key: value for key, value in config.items() if key not in OWN_KEYS}
            module = _built(kind.__name__, build, arguments)
        finally:
            torch.set_default_dtype(before)
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        if (folder / WEIGHTS).is_file():
            _fill(module, folder / WEIGHTS)
        else:
            report(f"{folder} has no {WEIGHTS}: {kind.__name__} is initialised randomly.")
        return module

    return load


def _fill(module: nn.Module, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    kind = type(module).__name__
    try:
        missing, unexpected = load_model(module, path, strict=False)
    except (SafetensorError, RuntimeError, OSError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = next((line for line in lines if "size mismatch" in line), lines[0] if lines else type(error).__name__)
        raise UserError(f"The weights in {path} are not those of {kind}: {why.rstrip('.')}.") from None
    other = "the config.json beside it describes another module"
    if missing:
        raise UserError(f"{path} lacks {len(missing)} weights that {kind} has ({sorted(missing)[0]} …): {other}.")
    if unexpected:
        first = sorted(unexpected)[0]
        raise UserError(f"{path} holds {len(unexpected)} weights that {kind} has no place for ({first} …): {other}.")
