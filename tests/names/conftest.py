"""Tiny models on disk, and what other tools, each in its own environment, read from them."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.families.tiny import build
from tests.training.conftest import tiny_tokenizer

FAMILIES = (
    "gpt2",
    "gpt_neox_parallel",
    "gpt_neox_sequential",
    "llama",
    "qwen3",
    "gemma2",
    "gemma3",
    "olmo2",
    "phi",
    "mixtral",
)
TOKENS = [7, 3, 99, 11, 64]
ROOT = Path(__file__).parents[2]
Peer = Callable[[str], dict[str, Tensor]]
"""What a tool read from a family's model, by the tool's name; each with a batch axis."""


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of `tests.families.loaded.engine(family)`, rounded to fp32, as folders."""
    folder = tmp_path_factory.mktemp("names")
    for family in FAMILIES:
        build(family).save_pretrained(folder / family)  # type: ignore[operator]
        tiny_tokenizer().save_pretrained(folder / family)
    return folder


def _run(tool: str, checkpoints: Path, out: Path) -> Peer:
    python = ROOT / ".peers" / tool / "bin" / "python"
    assert python.exists(), f"{tool} has no environment: `make peers` creates it."
    command = [python, ROOT / "tests" / "peers" / f"{tool}_cache.py", checkpoints, out, json.dumps(TOKENS)]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=_offline())
    assert done.returncode == 0, done.stderr
    return lambda name: load_file(out / f"{name}.safetensors")


def _offline() -> dict[str, str]:
    return os.environ | {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONPATH": ""}


@pytest.fixture(scope="session")
def transformer_lens(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Peer:
    return _run("transformer_lens", checkpoints, tmp_path_factory.mktemp("transformer_lens"))


@pytest.fixture(scope="session")
def nnterp(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Peer:
    return _run("nnterp", checkpoints, tmp_path_factory.mktemp("nnterp"))
