"""A page of docs/ whose blocks are code and what it prints: run from top to bottom, as it is pasted."""

import re
import sys
from pathlib import Path

from tests.quick_demo import ROOT, execute

NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of every fenced block."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def check_page(page: str, folder: Path) -> None:
    """Words are the same; numbers agree within two of the last digit that is shown."""
    found = blocks(page)
    program = "\nprint('=====')\n".join(code for language, code in found if language == "python")
    (folder / "page.py").write_text(program, encoding="utf-8")
    run = execute([sys.executable, "page.py"], folder)
    assert run.status == 0, run.err
    said = run.out.split("=====\n")[1:]
    shown = [text for language, text in found if not language]
    assert len(said) == len(shown)
    for text, right in zip(said, shown, strict=True):
        assert NUMBER.sub("#", text).split() == NUMBER.sub("#", right).split()
        for number, expected in zip(NUMBER.findall(text), NUMBER.findall(right), strict=True):
            unit = 10.0 ** -len(expected.partition(".")[2])
            assert abs(float(number) - float(expected)) <= (2.01 * unit if "." in expected or "%" in right else 0.0), (
                right
            )
