"""docs/analysis.md runs from top to bottom as it is pasted, and prints what it says it prints."""

import re
import sys
from pathlib import Path

import pytest

from tests.quick_demo import ROOT, execute

pytestmark = pytest.mark.real

PAGE = (ROOT / "docs" / "analysis.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")


def test_every_block_is_code_or_what_it_prints() -> None:
    languages = [language for language, _ in BLOCKS]
    assert languages == ["python", *["python", ""] * 6]


def test_it_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    """Words are the same; numbers agree within two of the last digit that is shown."""
    program = "\nprint('=====')\n".join(code for language, code in BLOCKS if language == "python")
    (tmp_path / "page.py").write_text(program, encoding="utf-8")
    run = execute([sys.executable, "page.py"], tmp_path)
    assert run.status == 0, run.err
    said = run.out.split("=====\n")[1:]
    shown = [text for language, text in BLOCKS if not language]
    assert len(said) == len(shown)
    for text, right in zip(said, shown, strict=True):
        assert NUMBER.sub("#", text).split() == NUMBER.sub("#", right).split()
        for number, expected in zip(NUMBER.findall(text), NUMBER.findall(right), strict=True):
            unit = 10.0 ** -len(expected.partition(".")[2])
            assert abs(float(number) - float(expected)) <= (2.01 * unit if "." in expected or "%" in right else 0.0), (
                right
            )
