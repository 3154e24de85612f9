"""What was proven about a checkpoint before: its claims, kept under INTERP_CACHE, so that a second load proves nothing.

A file per checkpoint, dtype and kind of device. Its claims hold for what its key names: the checkpoint, the state of
its files (a changed weight that the fingerprint's sample misses changes their time), the numerics, the versions of what
computes, and the source of what resolves, runs and proves. Another key is proven anew.
"""

import hashlib
import importlib.metadata
import inspect
import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from interp.errors import UserError
from interp.files import atomic_path, cache_dir
from interp.models.architectures import Architecture
from interp.models.parameters import device_of, devices_of, dtype_of
from interp.models.proofs import Claim

ROOMS = ("points", "models", "engines")
"""What claims depend on of our own code."""


def key_of(
    module: nn.Module, folders: Sequence[Path], fingerprint: str, architecture: Architecture | None = None
) -> dict[str, str]:
    """Everything that the claims about a loaded checkpoint depend on, in words.

    `folders`: its own, then those of its parts. Of a custom architecture, the code that loads it and that writes its
    Anatomy counts as the model's.
    """
    files = hashlib.sha256()
    for number, folder in enumerate(folders):
        for path in sorted(p for p in folder.iterdir() if p.is_file()):
            state = path.stat()
            files.update(f"{number} {path.name} {state.st_size} {state.st_mtime_ns}\n".encode())
    written: list[Any] = [type(module)]
    if architecture is not None:
        written += [architecture.kind, architecture.load, architecture.build, architecture.anatomy]
    return {
        "fingerprint": fingerprint,
        "files": files.hexdigest(),
        "dtype": str(dtype_of(module)).removeprefix("torch."),
        "device": device_of(module).type,
        "devices": json.dumps(devices_of(module), sort_keys=True),
        "quantization": _quantization(module),
        "precision": torch.get_float32_matmul_precision(),
        "attention": str(getattr(getattr(module, "config", None), "_attn_implementation", None)),
        "model_code": hashlib.sha256(b"".join(_source(code) for code in written if code is not None)).hexdigest(),
        "our_code": _our_code(),
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers", "interp")},
    }


def proven(key: dict[str, str], prove: Callable[[], list[Claim]], report: Callable[[str], None]) -> list[Claim]:
    """The claims kept for `key`, else those that `prove` makes, which are then kept.

    A damaged file, or a cache that cannot be written, is said once through `report`; the model loads all the same.
    """
    path = cache_dir() / "proofs" / _name(key)
    if (kept := _read(path, key, report)) is not None:
        return kept
    claims = prove()
    try:
        with atomic_path(path) as beside:
            fields = [asdict(claim) for claim in claims]
            beside.write_text(json.dumps({"key": key, "claims": fields, "sha256": _sha256(fields)}), encoding="utf-8")
    except (UserError, OSError) as error:
        report(f"The proofs of this model are not kept, and the next load proves again: {error}")
    return claims


def _source(code: Any) -> bytes:
    """The file that a class or function is written in; where there is none, as in a notebook, nothing is kept."""
    code = code.func if isinstance(code, partial) else code
    try:
        return Path(inspect.getfile(inspect.unwrap(code))).read_bytes()
    except (TypeError, OSError):
        return uuid.uuid4().bytes


def _name(key: dict[str, str]) -> str:
    """A model that is split or packed at load has a file beside that of the checkpoint as it is."""
    name = "-".join(key[part] for part in ("fingerprint", "dtype", "device"))
    special = key["devices"] + key["quantization"]
    return f"{name}.json" if special == "{}" else f"{name}-{hashlib.sha256(special.encode()).hexdigest()[:8]}.json"


def _quantization(module: nn.Module) -> str:
    config: Any = getattr(getattr(module, "config", None), "quantization_config", None)
    return "" if config is None else str(config if isinstance(config, dict) else config.to_dict())


def _read(path: Path, key: dict[str, str], report: Callable[[str], None]) -> list[Claim] | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        claims = [_claim(**fields) for fields in kept["claims"]]
        if kept["sha256"] != _sha256(kept["claims"]):
            raise ValueError("its claims are not those that were written")
        return claims if kept["key"] == key else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        report(f"The proofs kept in {path} are damaged ({type(error).__name__}: {error}); the model is proven anew.")
        return None


def _sha256(fields: object) -> str:
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def _claim(
    proof: str, equation: str, layer: int | None, points: list[str], difference: float, tolerance: float
) -> Claim:
    return Claim(proof, equation, layer, tuple(points), float(difference), float(tolerance))


@cache
def _our_code() -> str:
    """SHA-256 of the source of the rooms below and at the engines."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent.parent
    for path in sorted(path for room in ROOMS for path in (folder / room).rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
