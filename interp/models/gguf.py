"""How a GGUF file becomes a plain checkpoint directory: float32 safetensors, config and tokenizer, converted once.

1. `read_header` checks that the file is whole.
2. transformers dequantises it and undoes llama.cpp's storage conventions (rows of q and k permuted, Gemma's norm gains
   stored plus one).
3. What that importer drops or rounds is put right: see `interp.models.gguf_repairs`.
4. Every weight of the file and of the model must have found its partner.
5. The directory appears under its name only when it is complete.
"""

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp.errors import UserError
from interp.files import atomic_dir, cache_dir, check_writable
from interp.models.content import sampled_sha256, sha256_of
from interp.models.gguf_header import GgufHeader, read_header, write_without_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
"""Raised when the conversion changes, so that older directories are converted anew."""


def checkpoint_from_gguf(gguf: str | Path, report: Callable[[str], None]) -> Path:
    """The checkpoint directory for any GGUF file, converted on first use (recognised by size and sampled content).

    Raises `UserError` if the file is missing, not GGUF, cut short, or of a kind that cannot be imported exactly.
    """
    gguf = Path(gguf)
    if not gguf.is_file():
        raise UserError(f"There is no file {gguf}.")
    folder = folder_for(gguf.stem, sampled_sha256(gguf))
    return folder if is_complete(folder) else convert(gguf, folder, report)


def folder_for(name: str, content_hash: str) -> Path:
    """Where the conversion of the file with this content belongs in the user's cache."""
    return cache_dir() / "models" / f"{name}-{content_hash[:12]}"


def is_complete(folder: Path) -> bool:
    """Whether every file that the manifest lists is there with its size and sampled content (milliseconds)."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return manifest["format_version"] == FORMAT_VERSION and all(
            (folder / name).stat().st_size == file["size"] and sampled_sha256(folder / name) == file["sampled_sha256"]
            for name, file in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def convert(gguf: Path, folder: Path, report: Callable[[str], None]) -> Path:
    """Convert `gguf` into the checkpoint directory `folder`, replacing whatever is there.

    Peak memory is about three times the float32 weights. Errors as `checkpoint_from_gguf`.
    """
    header = read_header(gguf)
    check_writable(folder.parent)
    report(f"Converting {gguf.name} to a plain float32 checkpoint in {folder} (once).")
    try:
        with atomic_dir(folder) as work:
            _save_model(header, work)
            _save_tokenizer(header, work, report)
            _write_manifest(header, work)
    except OSError as error:
        raise UserError(f"Cannot convert {gguf} into {folder}: {error.strerror or error}.") from None
    return folder


def _save_model(header: GgufHeader, work: Path) -> None:
    import torch

    bare = work / "bare.gguf"
    write_without_vocabulary(header, bare)
    model = _import(header, bare)
    bare.unlink()
    # A model from GGUF refuses `save_pretrained`; the same weights in a model built from the config do not.
    with torch.device("meta"):
        plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict(), strict=True, assign=True)
    plain.tie_weights()
    plain.save_pretrained(work)


def _import(header: GgufHeader, bare: Path) -> "PreTrainedModel":
    import torch
    import transformers

    from interp.models.gguf_repairs import repair_config

    # transformers parses every vocabulary entry several times over (a minute for 262k tokens); the weights need none.
    try:
        config = _read_config(header, bare)
        repair_config(config, header)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            bare.parent, gguf_file=bare.name, config=config, dtype=torch.float32, output_loading_info=True
        )
    except UserError:
        raise
    except Exception as error:  # whatever the importer makes of an odd file, the person who gave it needs one sentence
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"transformers {transformers.__version__} cannot import {header.path} "
            f"(architecture {header.architecture!r}): {reason}"
        ) from None
    model, loading = loaded
    _check_partners(header, model, loading)
    for name in ("quantization_config", "_model_name_or_path", "unk_token_id"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    return model


def _read_config(header: GgufHeader, bare: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(bare.parent, gguf_file=bare.name)
    except KeyError:
        # Importers of newer architectures look the vocabulary up in the metadata, and read it fast.
        return AutoConfig.from_pretrained(header.path.parent, gguf_file=header.path.name)


def _check_partners(header: GgufHeader, model: "PreTrainedModel", loading: Any) -> None:
    """Refuse an import that left a weight of the model or of the file without partner; transformers only logs it."""
    from interp.models.gguf_repairs import REBUILT_TENSORS

    unfilled = sorted(str(key) for key in loading.get("missing_keys", ()))
    if unfilled or loading.get("mismatched_keys"):
        names = ", ".join(unfilled[:3]) or str(sorted(loading["mismatched_keys"])[0])
        raise UserError(f"{header.path} holds no weights, or weights of another shape, for {names}; it cannot be used.")
    tied = model.config.tie_word_embeddings
    ignored = REBUILT_TENSORS | ({"output.weight"} if tied else set())
    stored = sum(prod(entry.shape) for name, entry in header.tensors.items() if name not in ignored)
    held = sum(tensor.numel() for tensor in {id(p): p for p in model.parameters()}.values())
    held += sum(b.numel() for name, b in model.named_buffers() if name in model.state_dict())
    if stored != held:
        raise UserError(
            f"{header.path} holds {stored:,} weights where the {header.architecture!r} model of transformers has "
            f"{held:,}; some have no place in it, so the import would not be exact."
        )


def _save_tokenizer(header: GgufHeader, work: Path, report: Callable[[str], None]) -> None:
    from transformers import AutoTokenizer

    from interp.models.gguf_repairs import repair_tokenizer

    kind = header.metadata.get("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        report(f"{header.path.name} holds no tokenizer: prompts must be given as token ids.")
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(header.path.parent, gguf_file=header.path.name)
    except Exception as error:  # as in `_import`; the weights are of use without it
        report(f"The {kind!r} tokenizer of {header.path.name} cannot be read ({error}): give prompts as token ids.")
        return
    repair_tokenizer(tokenizer, header, report)
    tokenizer.save_pretrained(work)


def _write_manifest(header: GgufHeader, work: Path) -> None:
    files = {
        path.name: {
            "size": path.stat().st_size,
            "sha256": sha256_of(path),
            "sampled_sha256": sampled_sha256(path),
        }
        for path in sorted(work.iterdir())
    }
    source = {"name": header.path.name, "sha256": sha256_of(header.path), "size": header.path.stat().st_size}
    manifest = {"format_version": FORMAT_VERSION, "source": source, "files": files}
    (work / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
