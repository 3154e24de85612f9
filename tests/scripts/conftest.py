"""A tiny checkpoint directory with a tokenizer, a text that it reads, its transcoders, and `interp` as one call."""

import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from interp.scripts import main as entry
from tests.families.tiny import build
from tests.training.conftest import WORDS, tiny_tokenizer


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    status: int
    out: str
    err: str


Interp = Callable[..., Outcome]
TRAINING = ("--total-tokens", "600", "--context-len", "32", "--expansion-factor", "2", "--k", "4", "--batch-size", "64")


@pytest.fixture
def interp(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Interp:
    """`interp("points", folder)` runs the command of that name in this process, from its flags to its exit status."""

    def run(*arguments: str | Path) -> Outcome:
        capfd.readouterr()
        monkeypatch.setattr("sys.argv", ["interp", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")  # a table that is not folded can be searched
        # A command turns this off before it imports transformers, which other tests have imported already.
        monkeypatch.setattr("transformers.utils.logging._tqdm_active", False)
        with pytest.raises(SystemExit) as stopped:
            entry.main()
        printed = capfd.readouterr()
        return Outcome(int(stopped.value.code or 0), printed.out, printed.err)

    return run


def checkpoint(folder: Path, seed: int) -> Path:
    """A tiny Llama with a context of 64 tokens, as a user has it on disk."""
    model = build("llama", seed=seed)
    model.save_pretrained(folder)  # type: ignore[operator]
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("models") / "tiny", seed=0)


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return checkpoint(tmp_path_factory.mktemp("models") / "stranger", seed=1)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    documents = [" ".join(rng.choices(WORDS, k=rng.randrange(20, 60))) for _ in range(60)]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n\n\n".join(documents), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def transcoders(tmp_path_factory: pytest.TempPathFactory, tiny: Path, text: Path) -> Path:
    """What `interp train-transcoders` writes for the tiny model."""
    folder = tmp_path_factory.mktemp("transcoders") / "tiny"
    command = [sys.executable, "-m", "interp.scripts.train_transcoders", "--model_path", tiny, "--dataset_name", text]
    command += ["--checkpoint_dir", folder, "--train_all", *TRAINING]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    return folder
