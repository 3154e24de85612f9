"""Every kind of text file gives its documents; text that is unusable is refused in one sentence."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from interp.errors import UserError
from interp.training.corpus import LONGEST_DOCUMENT, read_documents

TEXT = "One.\n\nStill one.\n\n\nTwo.\n \n\n\nThree.\n"
SPLIT = ["One.\n\nStill one.", "Two.", "Three."]


def test_plain_text_splits_at_two_empty_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    assert read_documents(tmp_path / "a.txt") == SPLIT
    with gzip.open(tmp_path / "a.txt.gz", "wt") as file:
        file.write(TEXT)
    assert read_documents(tmp_path / "a.txt.gz") == SPLIT
    (tmp_path / "dos.txt").write_bytes(TEXT.replace("\n", "\r\n").encode())
    assert read_documents(tmp_path / "dos.txt") == SPLIT


def test_one_long_text_is_cut_at_paragraphs_and_loses_nothing(tmp_path: Path) -> None:
    paragraphs = [f"Paragraph {i} " + "x" * 900 for i in range(40)]
    (tmp_path / "book.txt").write_text("\n\n".join(paragraphs))
    documents = read_documents(tmp_path / "book.txt")
    assert len(documents) > 3
    assert max(map(len, documents)) < LONGEST_DOCUMENT + 1000
    assert "\n\n".join(documents).split("\n\n") == paragraphs


def test_json_lines_and_folders(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps({"body": text, "text": text.upper()}) for text in ("x", "y", "  "))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.jsonl").write_text(lines + "\n\n")
    assert read_documents(tmp_path / "deep" / "b.jsonl", "body") == ["x", "y"]
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "ignored.csv").write_text("no")
    assert read_documents(tmp_path) == ["first", "X", "Y"]


BAD: list[tuple[str, Callable[[Path], object], str]] = [
    ("missing.txt", lambda p: None, "does not exist"),
    ("empty.txt", lambda p: p.write_text(""), "holds no text"),
    ("blank.txt", lambda p: p.write_text(" \n\n\n \n"), "holds no text"),
    ("zeros.txt", lambda p: p.write_bytes(b"abc\x00def"), "binary"),
    ("latin.txt", lambda p: p.write_bytes(b"caf\xe9"), "UTF-8"),
    ("fake.txt.gz", lambda p: p.write_text("not compressed"), "Cannot read"),
    ("cut.txt.gz", lambda p: p.write_bytes(gzip.compress(b"text " * 1000)[:-20]), "Cannot read"),
    ("bad.jsonl", lambda p: p.write_text('{"text": "a"}\nnot json\n'), "line 2: not JSON"),
    ("field.jsonl", lambda p: p.write_text('{"body": "a"}\n'), "no text in a field 'text'"),
    ("folder", lambda p: p.mkdir(), "expected files ending"),
]


@pytest.mark.parametrize(("name", "make", "said"), BAD, ids=[name for name, _, _ in BAD])
def test_unusable_text_is_refused(name: str, make: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    make(tmp_path / name)
    with pytest.raises(UserError, match=said) as caught:
        read_documents(tmp_path / name)
    assert "\n" not in str(caught.value)
