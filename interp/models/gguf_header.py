"""What a GGUF file says about itself: metadata, tensor table, and whether all of its bytes are there.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, counts; key/value pairs; tensor
table; padding to the alignment; tensor data. `GGUFReader` of the `gguf` package makes one array per vocabulary entry,
which takes 10 to 20 s for 262k tokens; this walk takes a fraction of a second and checks for truncation.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from interp.errors import UserError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_MAX_KEPT = 1024
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class TensorEntry:
    """One row of the tensor table; `shape` in torch order, `offset` from the start of the data."""

    name: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata and tensor table of one file.

    `metadata` holds scalars, strings and arrays of up to 1,024 entries; of a longer array (the vocabulary, its scores,
    the merges) only its length, as `ArrayLength`. `spans` gives each key's byte range, `table` the tensor table's.
    """

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]
    spans: dict[str, tuple[int, int]]
    table: tuple[int, int]
    data_start: int

    @property
    def architecture(self) -> str:
        return self.metadata["general.architecture"]

    @property
    def alignment(self) -> int:
        return self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)

    def get(self, suffix: str, default: Any = None) -> Any:
        """The architecture's own key, e.g. `get("rope.freq_base")` for `llama.rope.freq_base`."""
        return self.metadata.get(f"{self.architecture}.{suffix}", default)


class ArrayLength(int):
    """Length of a metadata array that was walked over, not kept."""


def read_header(path: str | Path) -> GgufHeader:
    """Read and check the header of a GGUF file.

    Raises `UserError` if the file is not GGUF, is of a version other than 2 or 3, is damaged, or is shorter than its
    tensor table promises.
    """
    path = Path(path)
    size = path.stat().st_size
    with open(path, "rb") as file:
        if size < 24 or file.read(4) != b"GGUF":
            raise UserError(f"{path} is not a GGUF file: it does not start with the GGUF magic bytes.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
            try:
                header = _walk(path, blob)
            except (struct.error, IndexError):
                raise UserError(
                    f"{path} is cut short: its {size:,} bytes end within the header; download it again."
                ) from None
            except (KeyError, ValueError, UnicodeDecodeError, OverflowError, MemoryError) as error:
                raise UserError(f"{path} is not a readable GGUF file ({error}); download it again.") from None
    needed = header.data_start + max((t.offset + t.n_bytes for t in header.tensors.values()), default=0)
    if size < needed:
        raise UserError(f"{path} is cut short: {size:,} of {needed:,} bytes are there; download it again.")
    return header


def write_without_vocabulary(header: GgufHeader, target: str | Path) -> None:
    """Write the file again without its long `tokenizer.*` arrays; every other key and every tensor byte is the same.

    The number of tokens is kept as `{architecture}.vocab_size`, where the file does not state it already.
    """
    dropped = {k for k, v in header.metadata.items() if isinstance(v, ArrayLength) and k.startswith("tokenizer.")}
    kept = [span for key, span in header.spans.items() if key not in dropped]
    added = b""
    if "tokenizer.ggml.tokens" in dropped and header.get("vocab_size") is None:
        key = f"{header.architecture}.vocab_size".encode()
        added = (
            struct.pack("<Q", len(key)) + key + struct.pack("<II", _UINT32, header.metadata["tokenizer.ggml.tokens"])
        )
    with open(header.path, "rb") as source, open(target, "wb") as out:
        n_keys = len(kept) + bool(added)
        out.write(b"GGUF" + struct.pack("<IQQ", header.version, len(header.tensors), n_keys) + added)
        for start, end in [*kept, header.table]:
            source.seek(start)
            out.write(source.read(end - start))
        out.write(b"\0" * (-out.tell() % header.alignment))
        source.seek(header.data_start)
        while block := source.read(1 << 22):
            out.write(block)


def _walk(path: Path, blob: mmap.mmap) -> GgufHeader:
    version, n_tensors, n_keys = struct.unpack_from("<IQQ", blob, 4)
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version}; versions 2 and 3 are read")
    position = 24
    metadata: dict[str, Any] = {}
    spans: dict[str, tuple[int, int]] = {}
    for _ in range(n_keys):
        start = position
        key, position = _string(blob, position)
        (kind,) = struct.unpack_from("<I", blob, position)
        metadata[key], position = _value(blob, position + 4, kind)
        spans[key] = (start, position)
    if not isinstance(metadata.get("general.architecture"), str):
        raise ValueError("no general.architecture in its metadata")
    table_start = position
    tensors: dict[str, TensorEntry] = {}
    for _ in range(n_tensors):
        entry, position = _entry(blob, position)
        tensors[entry.name] = entry
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    data_start = position + -position % alignment
    return GgufHeader(path, version, metadata, tensors, spans, (table_start, position), data_start)


def _entry(blob: mmap.mmap, position: int) -> tuple[TensorEntry, int]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name, position = _string(blob, position)
    (n_dims,) = struct.unpack_from("<I", blob, position)
    if n_dims > 8:
        raise ValueError(f"tensor {name} claims {n_dims} dimensions")
    dims = struct.unpack_from(f"<{n_dims}Q", blob, position + 4)
    kind, offset = struct.unpack_from("<IQ", blob, position + 4 + 8 * n_dims)
    per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    entry = TensorEntry(name, tuple(reversed(dims)), offset, prod(dims) // per_block * block_bytes)
    return entry, position + 16 + 8 * n_dims


def _value(blob: mmap.mmap, position: int, kind: int) -> tuple[Any, int]:
    if kind in _SCALARS:
        code = "<" + _SCALARS[kind]
        return struct.unpack_from(code, blob, position)[0], position + struct.calcsize(code)
    if kind == _STRING:
        return _string(blob, position)
    if kind != _ARRAY:
        raise ValueError(f"metadata value of unknown type {kind}")
    element, count = struct.unpack_from("<IQ", blob, position)
    position += 12
    if element in _SCALARS:
        width = struct.calcsize("<" + _SCALARS[element])
        end = position + count * width
        if end > len(blob):
            raise IndexError
        if count > _MAX_KEPT:
            return ArrayLength(count), end
        return list(struct.unpack_from(f"<{count}{_SCALARS[element]}", blob, position)), end
    values = []
    for _ in range(count):
        if element == _STRING and count > _MAX_KEPT:
            (length,) = struct.unpack_from("<Q", blob, position)
            position += 8 + length
            continue
        value, position = _value(blob, position, element)
        values.append(value)
    return (ArrayLength(count) if count > _MAX_KEPT else values), position


def _string(blob: mmap.mmap, position: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", blob, position)
    start, end = position + 8, position + 8 + length
    if end > len(blob):
        raise IndexError
    return blob[start:end].decode("utf-8"), end
