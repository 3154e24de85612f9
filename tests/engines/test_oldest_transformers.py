"""The oldest transformers that pyproject.toml admits gives the same captures and continuations."""

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.families.tiny import build
from tests.peers.oldest_transformers_cache import main

ROOT = Path(__file__).parents[2]
FAMILIES = ("llama", "gpt2", "gemma3", "split_llama")
TOKENS = [7, 3, 99, 11, 64]


def test_the_environment_holds_the_lower_bound() -> None:
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bound = next(match[1] for text in stated if (match := re.fullmatch(r"transformers>=([\d.]+)", text)))
    pinned = re.search(r"^transformers==([\d.]+)$", (ROOT / "tests/peers/oldest_transformers.txt").read_text(), re.M)
    assert pinned is not None and f"{pinned[1]}.".startswith(f"{bound}.")


def test_captures_and_continuations_are_those_of_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERP_CACHE", str(tmp_path / "cache"))
    models, here, there = (tmp_path / name for name in ("models", "here", "there"))
    for folder in (models, here, there):
        folder.mkdir()
    for family in FAMILIES:
        build(family, torch.float32).save_pretrained(models / family)  # type: ignore[operator]
    python = ROOT / ".peers" / "oldest_transformers" / "bin" / "python"
    assert python.exists(), "The oldest transformers has no environment: `make peers` creates it."
    command = [python, ROOT / "tests/peers/oldest_transformers_cache.py", models, there, json.dumps(TOKENS)]
    own = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=own)
    assert done.returncode == 0, done.stderr
    main(models, here, TOKENS)
    for family in FAMILIES:
        one, other = (load_file(folder / f"{family}.safetensors") for folder in (here, there))
        assert one.keys() == other.keys() and torch.equal(one["tokens"], other["tokens"])
        for name, tensor in one.items():
            assert torch.allclose(tensor.float(), other[name].float(), atol=1e-5), (family, name)
