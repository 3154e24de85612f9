"""Where a model's files are, and how they are told from others: packaged name, directory, GGUF file or hub id."""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from interp.errors import UserError
from interp.models.content import sampled_sha256, sampled_weights
from interp.models.gguf import checkpoint_from_gguf, convert, folder_for, is_complete
from interp.models.packaged import PACKAGED, discard_assembled, packaged_gguf

if TYPE_CHECKING:
    from torch import nn

    from interp.models.architectures import Architecture

_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
_HUB_IGNORED = ["*/*", "consolidated*", "*.msgpack"]
_VOLATILE_KEYS = {
    "transformers_version",
    "_name_or_path",
    "_model_name_or_path",
    "dtype",
    "torch_dtype",
    "use_cache",
    "registered_by",
}


@dataclass(frozen=True)
class Checkpoint:
    """A model's files on this machine."""

    path: Path
    """Directory with `config.json`."""
    name: str
    """What the user calls it: packaged name, hub id, or the name of the directory or GGUF file."""
    revision: str | None
    """Commit of a hub model, SHA-256 of a packaged file, sampled hash of a GGUF file; none for a directory."""
    kind: Literal["packaged", "directory", "gguf", "hub"]


def resolve(model: str | Path, report: Callable[[str], None], *, random_init: bool = False) -> Checkpoint:
    """Find, and where needed fetch and convert, the checkpoint that `model` names.

    Tried in this order: an existing directory or file; a packaged name (any case); a hub id. Honours `HF_TOKEN`,
    `HF_HOME` and `HF_HUB_OFFLINE`. Raises `UserError`, one sentence, if there is none or it cannot be used: so is a
    directory of transformers' that has no weights, unless `random_init` says that it needs none.
    """
    name = str(model).strip()
    if not name:
        raise UserError("No model is named: give a packaged name, a checkpoint directory, a GGUF file or a hub id.")
    path = Path(model).expanduser()
    if path.is_dir():
        return _directory(path, random_init)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UserError(
                f"{path} is a file but no .gguf file; give a checkpoint directory, a GGUF file or a hub id."
            )
        return Checkpoint(checkpoint_from_gguf(path, report), path.stem, sampled_sha256(path), "gguf")
    if name.lower() in PACKAGED:
        return _packaged(name.lower(), report)
    if isinstance(model, Path) or name.startswith((".", "/", "~")) or name.lower().endswith(".gguf"):
        raise UserError(f"There is no file or directory {str(model)!r}.")
    return _hub(name, report, random_init)


def architecture_in(checkpoint: Checkpoint) -> "Architecture | None":
    """The custom architecture that the checkpoint is of; None where transformers reads it."""
    from interp.models.architectures import architecture_of

    return architecture_of(read_config(checkpoint.path), local=checkpoint.kind == "directory")


def parts_of(folder: Path, architecture: "Architecture | None") -> list[Path]:
    """Further checkpoint folders that the weights of a custom architecture come from."""
    return [] if architecture is None else list(architecture.parts(folder, read_config(folder)))


def checkpoint_dtype(checkpoint: Checkpoint) -> str | None:
    """The dtype that the checkpoint's config states, e.g. "bfloat16", else that of its first part; else none."""
    for folder in (checkpoint.path, *parts_of(checkpoint.path, architecture_in(checkpoint))[:1]):
        config = read_config(folder)
        for level in (config, config.get("text_config") or {}):
            stated = level.get("dtype") or level.get("torch_dtype")
            if stated:
                return str(stated).removeprefix("torch.")
    return None


def fingerprint(source: "str | Path | nn.Module") -> str:
    """16 hex digits that are equal for equal checkpoints, whatever dtype or device they are loaded in.

    Of a directory: its config without keys that say nothing about the model (library version, paths, dtype), and name,
    shape and a sample of the bytes of every stored tensor, so that sharding does not matter; of a custom architecture
    also the same of every part. Of a module that has no files: its config and a sample of its weights as they are, so
    here dtype does matter.
    """
    digest = hashlib.sha256()
    if isinstance(source, str | Path):
        for piece in _pieces(Path(source)):
            digest.update(piece)
    else:
        from interp.models.parameters import stored

        digest.update(_canonical(_config_of(source)))
        for name, tensor in stored(source):
            flat = tensor.detach().reshape(-1)
            sample = flat[:: max(flat.numel() // 256, 1)].float().cpu().numpy()
            digest.update(f"{name}{tuple(tensor.shape)}".encode() + sample.tobytes())
    return digest.hexdigest()[:16]


def _pieces(folder: Path) -> Iterable[bytes]:
    from interp.models.architectures import architecture_of

    config = read_config(folder)
    parts = parts_of(folder, architecture_of(config, local=True))
    if parts:  # where a part lies says nothing about the model; what is in it does
        places = {part.resolve() for part in parts}
        config = {k: v for k, v in config.items() if not (isinstance(v, str) and (folder / v).resolve() in places)}
    yield _canonical(config)
    yield from sampled_weights(folder)
    for part in parts:
        yield fingerprint(part).encode()


def _config_of(module: "nn.Module") -> dict[str, Any]:
    """What a module's own config says, of transformers' kind or any other."""
    config: Any = getattr(module, "config", None)
    if hasattr(config, "to_dict"):
        return config.to_dict()
    stated = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    return {key: value for key, value in stated.items() if isinstance(value, (str, int, float, list, tuple, dict))}


def has_weights(folder: Path) -> bool:
    """Whether the folder holds files of weights that transformers reads."""
    return any(file for pattern in _WEIGHT_FILES for file in folder.glob(pattern))


def _directory(path: Path, random_init: bool = False) -> Checkpoint:
    found = Checkpoint(path, path.resolve().name, None, "directory")
    _check(found, random_init)
    return found


def _check(checkpoint: Checkpoint, random_init: bool) -> None:
    """`UserError` where nobody can read the folder, or it lacks weights that nobody draws at random."""
    config = read_config(checkpoint.path)
    needed = architecture_in(checkpoint) is None and "model_type" in config and not random_init
    if needed and not has_weights(checkpoint.path):
        raise UserError(
            f"{checkpoint.path} has a config.json but no weights; put model.safetensors beside it, or draw them at "
            "random: random_init=True, --random_init."
        )


def _packaged(name: str, report: Callable[[str], None]) -> Checkpoint:
    model = PACKAGED[name]
    folder = folder_for(name, model.sha256)
    if not is_complete(folder):
        convert(packaged_gguf(name, report), folder, report)
        discard_assembled(name)
    return Checkpoint(folder, name, model.sha256, "packaged")


def _hub(name: str, report: Callable[[str], None], random_init: bool) -> Checkpoint:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    def download(patterns: list[str]) -> Path:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=_HUB_IGNORED))

    report(f"Looking for {name} on the Hugging Face hub.")
    packaged = name.split("/")[-1].lower()
    packages = (
        f"the packaged model {packaged!r} needs no hub" if packaged in PACKAGED else f"packaged: {', '.join(PACKAGED)}"
    )
    try:
        path = download(_HUB_PATTERNS)
        if not any(path.glob("*.safetensors")):
            path = download([*_HUB_PATTERNS, "pytorch_model*.bin"])
    except HFValidationError:
        raise UserError(
            f"{name!r} is no directory, no file, no packaged model and no valid hub id; {packages}."
        ) from None
    except GatedRepoError:
        raise UserError(
            f"{name} is gated on the hub: accept its terms there and set HF_TOKEN, or use another model; {packages}."
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"Unknown model {name!r}: no such directory, file or packaged model, and the hub has none of this name "
            f"that this HF_TOKEN may read; {packages}."
        ) from None
    except Exception as error:  # the hub client lets errors of several HTTP libraries through
        raise UserError(
            f"Unknown model {name!r}: no such directory, file or packaged model, and the Hugging Face hub cannot be "
            f"asked ({first_line(error)}); {packages}."
        ) from None
    found = Checkpoint(path, name, path.name, "hub")
    _check(found, random_init)
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """What `config.json` in a checkpoint directory holds. Raises `UserError` where there is none to be read."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} is no checkpoint directory: it has no config.json.")
    try:
        config = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read as JSON ({first_line(error)}).") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} does not hold a JSON object.")
    return config


def _canonical(config: dict[str, Any]) -> bytes:
    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: clean(v) for k, v in value.items() if k not in _VOLATILE_KEYS}
        return [clean(v) for v in value] if isinstance(value, list | tuple) else value

    return json.dumps(clean(config), sort_keys=True, default=str).encode()


def first_line(error: BaseException) -> str:
    """What an error of a library says first, to be put into a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].removeprefix("Got: ").rstrip(".") if lines else type(error).__name__
