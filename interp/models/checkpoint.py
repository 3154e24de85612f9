"""Where a model's files are, and how they are loaded: packaged name, directory, GGUF file or hub id."""

import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from interp.errors import UserError
from interp.models.content import sampled_sha256
from interp.models.gguf import checkpoint_from_gguf, convert, folder_for, is_complete
from interp.models.packaged import PACKAGED, discard_assembled, packaged_gguf

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tokenizer_config.json",
)
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
_HUB_IGNORED = ["*/*", "consolidated*", "*.msgpack"]
_VOLATILE_KEYS = {"transformers_version", "_name_or_path", "_model_name_or_path", "dtype", "torch_dtype", "use_cache"}


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


def resolve(model: str | Path, report: Callable[[str], None]) -> Checkpoint:
    """Find, and where needed fetch and convert, the checkpoint that `model` names.

    Tried in this order: an existing directory or file; a packaged name (any case); a hub id. Honours `HF_TOKEN`,
    `HF_HOME` and `HF_HUB_OFFLINE`. Raises `UserError`, one sentence, if there is none or it cannot be used.
    """
    name = str(model).strip()
    if not name:
        raise UserError("No model is named: give a packaged name, a checkpoint directory, a GGUF file or a hub id.")
    path = Path(model).expanduser()
    if path.is_dir():
        return _directory(path)
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
    return _hub(name, report)


def load_model_and_tokenizer(
    checkpoint: Checkpoint,
    device: "torch.device",
    dtype: "torch.dtype",
    device_map: "str | dict[str, Any] | None" = None,
    offload_folder: str | Path | None = None,
    quantization: Any = None,
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase | None"]:
    """The model in eval mode without gradients to its weights, and its tokenizer (none if the checkpoint has none).

    `device_map`, `offload_folder` and `quantization` (a `quantization_config`) are those of transformers. Without them
    built in `dtype` on the CPU, then moved: constants that a model rounds when it is built (Gemma's embedding scale)
    are then those of `dtype`; a model cast later keeps the rounding of the earlier dtype.

    Raises `UserError` if transformers does not know the model type or the weights do not fit the config.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    packed = quantization is not None or _is_quantised(checkpoint)
    if device_map is None and packed:  # a packed model is not moved once it is loaded
        device_map = {"": device}
    placed = {} if device_map is None else {"device_map": device_map, "offload_folder": offload_folder}
    if quantization is not None:
        placed["quantization_config"] = quantization
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint.path, dtype=dtype, output_loading_info=True, **placed
        )
    except (ValueError, KeyError, OSError, RuntimeError, ImportError, SafetensorError, StrictDataclassError) as error:
        raise UserError(f"Cannot load {checkpoint.name} from {checkpoint.path}: {first_line(error)}") from None
    model, loading = loaded
    missing = sorted(str(key) for key in loading.get("missing_keys", ()))
    if missing:
        raise UserError(
            f"{checkpoint.name} lacks {len(missing)} weights that its config asks for ({missing[0]} …); the checkpoint "
            f"in {checkpoint.path} is incomplete."
        )
    model.eval().requires_grad_(False)
    return model if placed else model.to(device), load_tokenizer(checkpoint.path, checkpoint.name)


def _is_quantised(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint's config says that its weights are packed; `UserError` if it says so in unknown words."""
    from transformers.quantizers.auto import AutoHfQuantizer

    stated = read_config(checkpoint.path).get("quantization_config")
    if not stated:
        return False
    # transformers itself warns, and loads packed numbers as if they were weights.
    if not AutoHfQuantizer.supports_quant_method(stated):
        method = stated.get("quant_method")
        raise UserError(
            f"Cannot load {checkpoint.name}: its config says that its weights are quantised by {method!r}, which this "
            "transformers does not know; use a checkpoint that is not quantised, or in another way."
        )
    return True


def checkpoint_dtype(checkpoint: Checkpoint) -> str | None:
    """The dtype that the checkpoint's config states, e.g. "bfloat16"; none if it states none."""
    config = read_config(checkpoint.path)
    for level in (config, config.get("text_config") or {}):
        stated = level.get("dtype") or level.get("torch_dtype")
        if stated:
            return str(stated).removeprefix("torch.")
    return None


def fingerprint(source: "str | Path | nn.Module") -> str:
    """16 hex digits that are equal for equal checkpoints, whatever dtype or device they are loaded in.

    Of a directory: its config without keys that say nothing about the model (library version, paths, dtype), and name,
    shape and a sample of the bytes of every stored tensor, so that sharding does not matter. Of a module that has no
    files: its config and a sample of its weights as they are, so here dtype does matter.
    """
    digest = hashlib.sha256()
    if isinstance(source, str | Path):
        folder = Path(source)
        digest.update(_canonical(read_config(folder)))
        for piece in _sampled_files(folder):
            digest.update(piece)
    else:
        from interp.models.parameters import stored

        config = getattr(source, "config", None)
        digest.update(_canonical(config.to_dict() if config is not None else {}))
        for name, tensor in stored(source):
            flat = tensor.detach().reshape(-1)
            sample = flat[:: max(flat.numel() // 256, 1)].float().cpu().numpy()
            digest.update(f"{name}{tuple(tensor.shape)}".encode() + sample.tobytes())
    return digest.hexdigest()[:16]


def _directory(path: Path) -> Checkpoint:
    config = read_config(path)
    if "model_type" in config and not any(file for pattern in _WEIGHT_FILES for file in path.glob(pattern)):
        raise UserError(f"{path} has a config.json but no weights; put model.safetensors beside it.")
    return Checkpoint(path, path.resolve().name, None, "directory")


def _packaged(name: str, report: Callable[[str], None]) -> Checkpoint:
    model = PACKAGED[name]
    folder = folder_for(name, model.sha256)
    if not is_complete(folder):
        convert(packaged_gguf(name, report), folder, report)
        discard_assembled(name)
    return Checkpoint(folder, name, model.sha256, "packaged")


def _hub(name: str, report: Callable[[str], None]) -> Checkpoint:
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
    return Checkpoint(_directory(path).path, name, path.name, "hub")


def load_tokenizer(folder: Path, name: str) -> "PreTrainedTokenizerBase | None":
    """The tokenizer whose files lie in `folder`; None where none do. `UserError` where they cannot be read."""
    from transformers import AutoTokenizer

    if not any((folder / file).exists() for file in TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise UserError(f"Cannot load the tokenizer of {name}: {first_line(error)}") from None


def read_config(folder: Path) -> dict[str, Any]:
    """What the folder's `config.json` holds. `UserError` where there is none or it is no JSON object."""
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


def _sampled_files(folder: Path) -> Iterator[bytes]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        for path in sorted(folder.glob("pytorch_model*.bin")):
            yield sampled_sha256(path).encode()
        return
    pieces: dict[str, bytes] = {}
    for path in files:
        pieces.update(_sampled_tensors(path))
    for name in sorted(pieces):
        yield pieces[name]


def _sampled_tensors(path: Path) -> Iterator[tuple[str, bytes]]:
    """Of each tensor: name, dtype, shape, and 1 KiB from its start, middle and end (safetensors: header, then data)."""
    with open(path, "rb") as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        except (struct.error, ValueError, OverflowError, MemoryError):
            raise UserError(f"{path} is not a readable safetensors file; copy or download it again.") from None
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            piece = f"{name}{entry['dtype']}{entry['shape']}".encode()
            for offset in sorted({start, max(start, (start + end) // 2 - 512), max(start, end - 1024)}):
                file.seek(8 + length + offset)
                piece += file.read(min(1024, end - offset))
            yield name, piece


def first_line(error: BaseException) -> str:
    """What an error of another library says, to stand inside a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].removeprefix("Got: ").rstrip(".") if lines else type(error).__name__
