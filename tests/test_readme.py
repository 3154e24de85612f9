"""Every command and every example of the README runs as it is written; every link leads somewhere."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.quick_demo import ROOT, QuickDemo, environment, execute, run_quick_demo

README = (ROOT / "README.md").read_text(encoding="utf-8")
INLINE = re.findall(r"`((?:make|interp) [^`]+)`", re.sub(r"```.*?```", "", README, flags=re.DOTALL))


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    text: str


BLOCKS = [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)]
LINES = [
    line.strip()
    for block in BLOCKS
    if block.language == "bash"
    for line in block.text.replace("\\\n", " ").splitlines()
    if line.strip()
]
MAKE = [line for line in LINES if line.startswith("make ")]
COMMANDS = [line for line in LINES if not line.startswith("make ")]
EXAMPLES = [block.text for block in BLOCKS if block.language == "python"]


@pytest.fixture(scope="session")
def quick_demo() -> QuickDemo:
    return run_quick_demo()


@pytest.fixture
def after_the_demo(quick_demo: QuickDemo, tmp_path: Path) -> Iterator[Path]:
    """A folder in which `make demo` has been: its dictionaries lie where the README says, made with --quick."""
    (tmp_path / "demo" / "transcoders").mkdir(parents=True)
    (tmp_path / "demo" / "transcoders" / "gemma-3-270m").symlink_to(quick_demo.transcoders)
    yield tmp_path


def test_it_is_short() -> None:
    assert len(README.splitlines()) < 150


def test_every_block_is_run_or_is_a_picture() -> None:
    assert {block.language for block in BLOCKS} == {"bash", "python", ""}
    assert len(MAKE) == 2 and len(COMMANDS) >= 4 and len(EXAMPLES) == 2
    for block in BLOCKS:
        if not block.language:
            assert "─▶" in block.text and not re.search(r"^(make|interp|python|pip) ", block.text, re.MULTILINE)


def test_make_demo_runs(quick_demo: QuickDemo) -> None:
    """The second of the two quick runs goes through make; the full one differs in the number of tokens alone."""
    assert MAKE[0].split("#")[0].strip() == "make demo"
    assert quick_demo.again.status == 0, quick_demo.again.err
    assert "Done in" in quick_demo.again.out


def test_make_test_is_what_runs_here() -> None:
    """`make test` cannot run within itself: what one pytest leaves out the other runs, and CI calls it."""
    assert MAKE[1].split("#")[0].strip() == "make test"
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "make test"
    planned = subprocess.run(
        ["make", "-n", "-o", ".venv/.setup-done", "test"], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert planned.returncode == 0, planned.stderr
    alone, rest = (line.split() for line in planned.stdout.splitlines() if "-m pytest" in line)
    folders = [word for word in alone[3:] if not word.startswith("-")]
    assert folders and all((ROOT / folder).exists() for folder in folders)
    assert [word for word in rest if word.startswith("--ignore")] == [f"--ignore={folder}" for folder in folders]
    for words in (alone, rest):
        assert not {"-k", "-m", "--deselect", "-x"} & set(words[words.index("pytest") :])
    for tool in ("ruff check", "ruff format --check", "lint-imports", "pyright", "interp.scripts.docs --check"):
        assert f"/{tool}" in planned.stdout or f" {tool}" in planned.stdout


@pytest.mark.real
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs(command: str, after_the_demo: Path) -> None:
    run = execute(["bash", "-euo", "pipefail", "-c", command], after_the_demo)
    assert run.status == 0, run.err
    assert run.out and not run.err
    for flag, name in (("--out", "acts.safetensors"), ("--output_dir", "graphs/graph.html")):
        if flag in command.split():
            assert (after_the_demo / name).is_file()


@pytest.mark.real
@pytest.mark.parametrize("example", EXAMPLES, ids=["points", "graph"])
def test_an_example_runs_as_pasted(example: str, after_the_demo: Path) -> None:
    (after_the_demo / "example.py").write_text(example, encoding="utf-8")
    run = execute([sys.executable, "example.py"], after_the_demo)
    assert run.status == 0, run.err
    # transformers shows a progress bar of its own, which a program that is no command of ours does not turn off.
    said = [line for line in run.err.replace("\r", "\n").splitlines() if line and "Loading weights" not in line]
    assert len(said) == 1 and said[0].startswith("interp: Running on ")
    if "print(cache[" in example:
        assert "torch.Size([1, 6, 640])" in run.out
        assert len(example.strip().splitlines()) <= 12
    if "certificate" in example:
        assert float(run.out.split()[0]) <= 1e-4
        assert (after_the_demo / "graph.json").is_file()


@pytest.mark.parametrize("command", sorted(set(INLINE)))
def test_a_command_in_the_text_exists(command: str) -> None:
    """`make X` is a target, `interp X --flag` takes that flag."""
    words = shlex.split(command)
    if words[0] == "make":
        run = execute(["make", "-n", "-o", ".venv/.setup-done", *words[1:]], ROOT)
        assert run.status == 0, run.err
    else:
        run = execute([*words[:2], "--help"], ROOT)
        assert run.status == 0, run.err
        assert all(word in run.out for word in words if word.startswith("--"))


def test_make_help_lists_what_the_readme_names() -> None:
    run = execute(["make", "help"], ROOT)
    assert run.status == 0
    for target in ("setup", "demo", "test", "lint", "types", "docs", "bench"):
        assert re.search(rf"^  make {target} ", run.out, re.MULTILINE)


DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        linked = document.parent / name if name else document
        assert linked.exists(), f"{document.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{document.name} links to {target}"


def test_documents_are_linked_from_the_readme() -> None:
    for path in (ROOT / "docs").glob("*.md"):
        assert f"(docs/{path.name})" in README
