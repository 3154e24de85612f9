"""The dictionary that an edit uses: a folder known by its content, or any object that encodes and decodes.

Nothing here knows a dictionary class. Folders are read by loaders, `loader(folder, device=..., dtype=...)`, which are
registered with `register_loader` or as an entry point of the group `interp.dictionary_loaders`.
"""

import hashlib
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from interp.errors import UserError

ENTRY_POINTS = "interp.dictionary_loaders"
Loader = Callable[..., Any]
_LOADERS: dict[str, Loader] = {}


def register_loader(name: str, loader: Loader) -> None:
    """Let `loader(folder, device=..., dtype=...)` read dictionaries; it raises `UserError` for a folder not its own."""
    _LOADERS[name] = loader


@dataclass(frozen=True)
class DictionaryReference:
    """A dictionary on disk: a folder, and the hash of what it held when the reference was made."""

    folder: str
    sha256: str

    @classmethod
    def of(cls, folder: str | Path) -> "DictionaryReference":
        """The reference to `folder` as it is now. Raises `UserError` where it cannot be read."""
        return cls(str(folder), content_hash(folder))

    def __str__(self) -> str:
        return f"{self.folder}@{self.sha256[:8]}"

    def to_json(self) -> dict[str, str]:
        """`{"folder": ..., "sha256": ...}`."""
        return {"folder": self.folder, "sha256": self.sha256}

    @classmethod
    def from_json(cls, data: Any) -> "DictionaryReference":
        """What `to_json` wrote; the folder is read when the edit runs. Raises `UserError` on anything else."""
        if not isinstance(data, dict) or set(data) != {"folder", "sha256"}:
            raise UserError('A dictionary in JSON is {"folder": "...", "sha256": "..."}.')
        if not all(isinstance(value, str) for value in data.values()):
            raise UserError("A dictionary's folder and sha256 are texts.")
        return cls(data["folder"], data["sha256"])


class Coder:
    """Any object with `encode(x)` and `decode(z)`, or `decode(z, x)` where it needs its input; equal to itself alone.

    x is brought to the dtype and device of a module's own parameters.
    """

    def __init__(self, dictionary: Any) -> None:
        if not callable(getattr(dictionary, "encode", None)) or not callable(getattr(dictionary, "decode", None)):
            raise UserError(
                f"A dictionary is a folder or an object with encode and decode, not a {type(dictionary).__name__}."
            )
        self.dictionary = dictionary
        after = list(inspect.signature(dictionary.decode).parameters.values())[1:2]
        self._takes_input = any(p.name == "x" or p.default is inspect.Parameter.empty for p in after)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Coder) and self.dictionary is other.dictionary

    def __hash__(self) -> int:
        return id(self.dictionary)

    def __repr__(self) -> str:
        return type(self.dictionary).__name__

    @property
    def folder(self) -> str | None:
        """Where the object says that it lies on disk."""
        folder = getattr(self.dictionary, "folder", None)
        return None if folder is None else str(folder)

    def encode(self, x: Tensor) -> Tensor:
        """[pos, ..., n_latents] for [pos, ..., d_in]."""
        return self.dictionary.encode(self._own(x))

    def decode(self, latents: Tensor, x: Tensor) -> Tensor:
        """[pos, ..., d_out] for the latents of x."""
        return self.dictionary.decode(latents, self._own(x)) if self._takes_input else self.dictionary.decode(latents)

    def _own(self, x: Tensor) -> Tensor:
        module = self.dictionary
        parameters = module.parameters() if isinstance(module, nn.Module) else ()
        own = next((p for p in parameters if p.is_floating_point()), None)
        return x if own is None else x.to(own)


Source = DictionaryReference | Coder


def source_of(dictionary: Any) -> Source:
    """The kept form of what a user gives as a dictionary."""
    if isinstance(dictionary, (DictionaryReference, Coder)):
        return dictionary
    return DictionaryReference.of(dictionary) if isinstance(dictionary, (str, Path)) else Coder(dictionary)


def coder_of(source: Source, dtype: torch.dtype, device: torch.device) -> Coder:
    """What encodes and decodes; a folder is loaded in `dtype` on `device`, once. Raises `UserError` if it changed."""
    return source if isinstance(source, Coder) else _load(source, dtype, device)


@lru_cache(maxsize=16)
def _load(reference: DictionaryReference, dtype: torch.dtype, device: torch.device) -> Coder:
    found = content_hash(reference.folder)
    if found != reference.sha256:
        raise UserError(
            f"The dictionary in {reference.folder} is not the one that this edit was made with: its content is "
            f"{found[:8]}, not {reference.sha256[:8]}; make the edit anew or restore the folder."
        )
    loaders = _loaders()
    if not loaders:
        raise UserError("No loader of dictionaries is known; import interp.dictionaries or install interp properly.")
    said: list[str] = []
    for loader in loaders.values():
        try:
            return Coder(loader(Path(reference.folder), device=device, dtype=dtype))
        except UserError as error:
            said.append(str(error))
    raise UserError(" ".join(said))


def _loaders() -> dict[str, Loader]:
    installed = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return {entry.name: entry.load() for entry in installed if entry.name not in _LOADERS} | _LOADERS


def content_hash(folder: str | Path) -> str:
    """SHA-256 over the names and contents of a folder's files, hidden ones left out."""
    root = Path(folder).expanduser()
    files = sorted(p for p in root.rglob("*") if p.is_file() and not p.name.startswith(".")) if root.is_dir() else []
    if not files:
        raise UserError(f"No dictionary in {folder}: there is no such folder, or it is empty.")
    digest = hashlib.sha256()
    for path in files:
        try:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise UserError(f"Cannot read {path}: {error.strerror or error}.") from None
        digest.update(f"{path.relative_to(root).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()
