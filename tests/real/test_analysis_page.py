"""docs/analysis.md runs from top to bottom as it is pasted, and prints what it says it prints."""

from pathlib import Path

import pytest

from .page import blocks, check_page

pytestmark = pytest.mark.real


def test_every_block_is_code_or_what_it_prints() -> None:
    assert [language for language, _ in blocks("analysis.md")] == ["python", *["python", ""] * 6]


def test_it_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    check_page("analysis.md", tmp_path)
