"""docs/custom-architectures.md runs from the module to the graph as it is pasted, and prints what it says it prints."""

import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.quick_demo import ROOT, Run, execute
from tests.real.page import NUMBER, blocks

BLOCKS = blocks("custom-architectures.md")
MODULE = "two_branch.py"
PROGRAMS = [code for language, code in BLOCKS if language == "python" and not code.startswith(f"# {MODULE}")]
PATH = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"


def words(text: str) -> list[str]:
    """Words without the lines of a table; figures that differ from machine to machine are alike."""
    return NUMBER.sub("#", text.replace("│", " ").replace("e-", "").replace("e+", "")).split()


def module() -> str:
    return "\n\n".join(code for language, code in BLOCKS if code.startswith(f"# {MODULE}"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("custom")


def checked(run: Run, shown: str) -> None:
    """Every line that the page shows is one that was printed, up to where it is cut."""
    printed = [words(line) for line in run.out.splitlines()]
    for line in shown.splitlines():
        wanted = words(line.partition("…")[0])
        assert any(wanted == found[: len(wanted)] for found in printed), f"{line}\nis not in\n{run.out}"
    if "…" not in shown:
        assert len(run.out.splitlines()) in (len(shown.splitlines()), len(shown.splitlines()) + 1)


def test_the_programs_print_what_the_page_shows(folder: Path) -> None:
    """In one process, as in a notebook; the first wraps the module before it has its Anatomy."""
    first, *rest = PROGRAMS
    (folder / MODULE).write_text(BLOCKS[0][1])
    shown = [answer for (_, code), (after, answer) in pairwise(BLOCKS) if code in PROGRAMS and not after]
    run = execute([sys.executable, "-c", PATH + first], folder)
    assert run.status == 0, run.err
    checked(run, shown[0])
    (folder / MODULE).write_text(module())
    program = "\nprint('=====')\n".join([PATH + first.partition("\ntry:")[0], *rest])
    (folder / "page.py").write_text(program)
    run = execute([sys.executable, "page.py"], folder)
    assert run.status == 0, run.err
    said = [text for text in run.out.split("=====\n") if text.strip()]
    assert len(said) == len(shown) - 1
    for text, right in zip(said, shown[1:], strict=True):
        assert words(text) == words(right)
    assert (folder / "graph.json").is_file()


@pytest.mark.parametrize(
    ("command", "shown"), [(code, answer) for (language, code), (_, answer) in pairwise(BLOCKS) if language == "bash"]
)
def test_the_commands_take_the_directory(folder: Path, command: str, shown: str) -> None:
    assert (folder / "two-branch" / "config.json").is_file(), "the programs make it"
    here = command.replace("PYTHONPATH=.", f"PYTHONPATH=.:{ROOT}")
    run = execute(["bash", "-euo", "pipefail", "-c", here], folder)
    assert run.status == 0 and not run.err, run.err
    checked(run, shown)


def test_a_lie_is_refused_as_the_page_says(folder: Path, tmp_path: Path) -> None:
    assert module().count("multiplier=0.8") == 1
    (tmp_path / MODULE).write_text(module().replace("multiplier=0.8", "multiplier=0.7"))
    program = (
        "from interp import Request, load_model\n"
        f"engine = load_model({str(folder / 'two-branch')!r}, device='cpu')\n"
        "try:\n    engine.run([Request([3], ['attn_out_post.0'])])\n"
        "except Exception as error:\n    print(f'{type(error).__name__}: {error}')\n"
    )
    (tmp_path / "lie.py").write_text(PATH + program)
    run = execute([sys.executable, "lie.py"], tmp_path)
    assert run.status == 0, run.err
    (right,) = [code for _, code in BLOCKS if code.startswith("PointRefused")]
    assert words(run.out) == words(right)


def test_the_anatomy_is_some_twenty_lines() -> None:
    written = module().partition("# two_branch.py, continued\n")[2]
    assert len(re.findall(r"^.*\S.*$", written, re.MULTILINE)) <= 24
