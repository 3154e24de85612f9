"""Prompts of equal length for the benchmarks: the first tokens of documents in the text that the package ships."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from interp.training import read_documents


def prompts(tokenizer: Any, number: int, length: int) -> list[list[int]]:
    """`number` prompts of `length` token ids, each from a document of its own."""
    found = []
    for document in read_documents(Path(str(files("interp") / "data" / "sample.txt.gz"))):
        ids = tokenizer(document).input_ids[:length]
        if len(ids) == length:
            found.append(ids)
        if len(found) == number:
            return found
    raise ValueError(f"The shipped text has only {len(found)} documents of {length} tokens.")
