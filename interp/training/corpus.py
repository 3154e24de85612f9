"""Which documents a text file or folder holds.

.txt[.gz]    documents are separated by two or more empty lines; longer pieces are cut at paragraphs
.jsonl[.gz]  one JSON object per line; the text is its field `text_column`
.parquet     one row per document; the text is its column `text_column` (needs pyarrow)
a folder     every such file below it, in the order of their paths
"""

import gzip
import importlib
import json
import re
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path

from interp.errors import UserError

SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")
LONGEST_DOCUMENT = 8_000
"""Characters after which a .txt document is cut at the next paragraph, so that one long book is many documents."""


def read_documents(path: str | Path, text_column: str = "text") -> list[str]:
    """The documents of a file or folder, in order, none of them blank.

    Raises `UserError` where the path does not exist, is of no known kind, is binary, damaged, or holds no text.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"No text at {path}: the file or folder does not exist.")
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.name.endswith(SUFFIXES))
        if not files:
            raise UserError(f"The folder {path} holds no text: expected files ending in {', '.join(SUFFIXES)}.")
    else:
        files = [path]
    documents = [document for file in files for document in _documents(file, text_column)]
    if not documents:
        raise UserError(f"{path} holds no text: it is empty or blank.")
    return documents


def _documents(file: Path, text_column: str) -> Iterator[str]:
    if file.name.endswith(".parquet"):
        found = _parquet(file, text_column)
    elif file.name.endswith((".jsonl", ".jsonl.gz")):
        found = _jsonl(file, text_column)
    else:
        found = _plain(file)
    return (text for text in map(str.strip, found) if text)


def _plain(file: Path) -> Iterator[str]:
    for document in re.split(r"\n(?:[ \t]*\n){2,}", "".join(_lines(file))):
        piece: list[str] = []
        for paragraph in re.split(r"(?<=\n)[ \t]*\n", document):
            piece.append(paragraph)
            if sum(map(len, piece)) >= LONGEST_DOCUMENT:
                yield "\n".join(piece)
                piece = []
        yield "\n".join(piece)


def _jsonl(file: Path, text_column: str) -> Iterator[str]:
    for number, line in enumerate(_lines(file), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            raise UserError(f"{file}, line {number}: not JSON.") from None
        if not isinstance(record, dict) or not isinstance(record.get(text_column), str):
            raise UserError(
                f"{file}, line {number}: no text in a field {text_column!r}; name the field with --text_column."
            )
        yield record[text_column]


def _parquet(file: Path, text_column: str) -> Iterator[str]:
    try:
        pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UserError(f"Reading {file} needs pyarrow; install interp with the extra `train`.") from None
    try:
        table = parquet.ParquetFile(file)
        if text_column not in table.schema_arrow.names:
            names = ", ".join(table.schema_arrow.names)
            raise UserError(f"{file} has no column {text_column!r} but {names}; name the column with --text_column.")
        for batch in table.iter_batches(columns=[text_column]):
            for value in batch.column(0).to_pylist():
                if value is not None and not isinstance(value, str):
                    raise UserError(f"The column {text_column!r} of {file} holds no text.")
                yield value or ""
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"Cannot read {file}: {error}.") from None


def _lines(file: Path) -> Iterator[str]:
    try:
        with _open(file) as stream:
            for line in stream:
                if "\0" in line:
                    raise UserError(f"{file} is a binary file, not text.")
                yield line
    except UnicodeDecodeError:
        raise UserError(f"{file} is a binary file or not encoded in UTF-8; give a UTF-8 text file.") from None
    except (OSError, EOFError) as error:
        raise UserError(f"Cannot read {file}: {error}.") from None


def _open(file: Path) -> TextIOWrapper:
    return gzip.open(file, "rt", encoding="utf-8") if file.name.endswith(".gz") else file.open(encoding="utf-8")
