"""The package as a whole: light to import, versioned once, tidy, and tested without gaps."""

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from beartype.roar import BeartypeCallHintParamViolation, BeartypeDoorHintViolation

from interp import Address
from interp.eval.reconstruction import ReconstructionMeter
from interp.scripts import console
from interp.scripts.doctor import Doctor
from tests import signatures

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "datasets", "pyarrow", "wandb", "scipy", "gguf", "fastapi", "vllm")


def fresh_import(module: str) -> tuple[float, set[str]]:
    """Seconds that `import module` takes in a new interpreter, and the heavy packages that it loads."""
    code = (
        "import json, sys, time; start = time.perf_counter(); import "
        + module
        + "; print(json.dumps([time.perf_counter() - start, list(sys.modules)]))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    seconds, modules = json.loads(run.stdout)
    return seconds, {package for package in HEAVY if package in modules}


def test_import_is_quick() -> None:
    assert min(fresh_import("interp")[0] for _ in range(3)) < 0.5


@pytest.mark.parametrize("module", ["interp", "interp.points"])
def test_import_loads_nothing_heavy(module: str) -> None:
    assert fresh_import(module)[1] == set()


def test_version_is_stated_once() -> None:
    import interp

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert interp.__version__ == metadata.version("interp") == declared


def test_shapes_in_signatures_are_checked_in_tests() -> None:
    meter = ReconstructionMeter()
    meter.add(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(jaxtyping.TypeCheckError):
        meter.add(torch.ones(2, 3), torch.ones(3, 2))


def test_other_types_in_signatures_are_checked_in_tests() -> None:
    wrong: Any = 3
    for function in (console.say, Address.parse):  # the second quotes a type
        with pytest.raises(BeartypeCallHintParamViolation):
            function(wrong)
    with pytest.raises(BeartypeDoorHintViolation, match=r"Doctor\.model "):
        Doctor(wrong)
    with signatures.unchecked(), pytest.raises(TypeError, match="expected string"):
        console.say(wrong)


def test_console_scripts_exist() -> None:
    scripts = [entry for entry in metadata.entry_points(group="console_scripts") if entry.value.startswith("interp.")]
    assert {script.name for script in scripts} >= {"interp", "interp-train-transcoders", "interp-trace"}
    for script in scripts:
        assert callable(script.load()), script.name


def test_constraints_satisfy_the_ranges() -> None:
    """Every direct dependency is pinned, within its range; vLLM's own pins clash with the tested stack."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.partition("==") for line in lines if line and not line.startswith("#")]
    pins = {canonicalize_name(name): version for name, _, version in pairs}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [lines for name, lines in project["optional-dependencies"].items() if name != "vllm"]
    for line in [line for lines in [project["dependencies"], *extras] for line in lines]:
        requirement = Requirement(line)
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), line
    assert not [version for version in pins.values() if "+" in version], "a local build cannot be installed elsewhere"


def repository_files() -> list[Path]:
    """Tracked files and new ones that are not ignored; in an unpacked archive, every file of the source folders."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        folders = ("interp", "tests", "benchmarks", "docs", ".ci")
        paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
        paths += ROOT.glob("*")
    return [path for path in paths if path.is_file()]


# One machine's folders and package hosts: they mean nothing to whoever clones the repository.
FORBIDDEN = re.compile(
    r"(?<![\w.~*])/(?:home|Users|root|work)/\w"
    r"|/opt/(?:wheels|pypi)"
    r"|pypi\.org|pythonhosted\.org|npmjs\.(?:org|com)|download\.pytorch\.org|--(?:extra-)?index-url"
)


@pytest.mark.parametrize(
    ("text", "forbidden"),
    [
        ("cd " + "/home/" + "ada/interp", True),
        ("/work/" + "main", True),
        ("https://" + "pypi." + "org/simple", True),
        ("https://example.org/home/page", False),
        ("frame/work/shop", False),
    ],
)
def test_forbidden_words_are_recognised(text: str, forbidden: bool) -> None:
    assert bool(FORBIDDEN.search(text)) == forbidden


def test_no_machine_specific_words() -> None:
    found = []
    for path in repository_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match.group()}" for match in FORBIDDEN.finditer(text)]
    assert not found


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("def test_a(): pass", 0, False),
        ("import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('no model')", 1, True),
        ("import pytest\npytest.importorskip('a_package_that_nobody_has')", 1, True),
        ("import pytest\n@pytest.mark.xfail\ndef test_a(): assert False", 1, True),
    ],
)
def test_a_skipped_test_fails_the_run(pytester: pytest.Pytester, body: str, status: int, said: bool) -> None:
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text())
    pytester.makepyfile(body)
    result = pytester.runpytest_subprocess()
    assert result.ret == status
    assert ("FAILED RUN" in result.stdout.str()) == said
