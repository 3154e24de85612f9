"""How large files are recognised: by all of their bytes, or by an even sample of them, or of each tensor in them."""

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path

from interp.errors import UserError

SAMPLES = 64
SAMPLE_BYTES = 1 << 16


def sha256_of(path: str | Path) -> str:
    """Hex SHA-256 of the whole file (about a second per gigabyte)."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sampled_sha256(path: str | Path) -> str:
    """Hex SHA-256 of the file's size and of 64 evenly spaced pieces of 64 KiB, its two ends among them (milliseconds).

    Finds truncation, swapped files and other versions; a flipped byte between two pieces it cannot find.
    """
    size = Path(path).stat().st_size
    digest = hashlib.sha256(str(size).encode())
    last_start = max(size - SAMPLE_BYTES, 0)
    with open(path, "rb") as file:
        for start in sorted({last_start * i // (SAMPLES - 1) for i in range(SAMPLES)}):
            file.seek(start)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def sampled_weights(folder: Path) -> Iterator[bytes]:
    """Of a checkpoint folder: pieces that do not depend on how the tensors are spread over safetensors files."""
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
