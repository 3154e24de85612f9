"""What a person is told who gives a command something wrong: one sentence, exit status 2, and nothing is written."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from interp.edits import Scale, to_json

from .conftest import Interp, Outcome


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Outputs that a flag leaves at its default would land here; converted models in a cache beside it."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("INTERP_CACHE", str(tmp_path / "cache"))
    yield
    assert listing(tmp_path / "here") == [], "a refused command left something behind"
    kept = [path for path in listing(tmp_path / "cache") if path.parts[0] != "proofs"]
    assert kept == [], "a refused command converted something"


def listing(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))


def sentence(outcome: Outcome) -> str:
    """The one line on stderr of a command that refused its input."""
    assert outcome.status == 2, outcome
    lines = outcome.err.splitlines()
    assert len(lines) == 1 and lines[0].endswith("."), outcome.err
    assert "Traceback" not in outcome.err + outcome.out and "Error(" not in outcome.err
    return lines[0]


@pytest.fixture
def in_a_process(tmp_path: Path) -> Callable[..., Outcome]:
    """The installed command in a process of its own, where nothing is patched."""

    def run(*arguments: str | Path, **environment: str) -> Outcome:
        command = [sys.executable, "-m", "interp.scripts.main", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


def damaged(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_an_engine_that_cannot_do_it(interp: Interp, tiny: Path) -> None:
    said = sentence(interp("generate", tiny, "--prompt", "w1", "--compile", "--engine", "nnsight"))
    assert said.startswith("compile=True decodes by a graph") and 'engine="eager"' in said
    assert "Unknown engine 'jax'; choose auto or eager or nnsight" in sentence(
        interp("points", tiny, "--engine", "jax")
    )


def test_unknown_model_while_the_hub_is_switched_off(in_a_process: Callable[..., Outcome]) -> None:
    said = sentence(in_a_process("demo", "--model", "nobody/no-such-model", HF_HUB_OFFLINE="1"))
    assert "Unknown model 'nobody/no-such-model'" in said and "gemma-3-270m" in said


def test_no_network(in_a_process: Callable[..., Outcome], tmp_path: Path) -> None:
    """Nobody listens at the hub's address, and its cache is empty."""
    unreachable = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    said = sentence(in_a_process("doctor", "nobody/no-such-model", **unreachable))
    assert "cannot be asked" in said and "packaged: gemma-3-270m, smollm2-135m-instruct" in said


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("./nowhere", "There is no file or directory"),
        ("nowhere.gguf", "There is no file or directory"),
        ("a b c", "no valid hub id"),
        ("", "No model is named"),
    ],
)
def test_a_model_that_is_nowhere(interp: Interp, model: str, expected: str) -> None:
    assert expected in sentence(interp("points", model))


def test_truncated_gguf(in_a_process: Callable[..., Outcome], tmp_path: Path) -> None:
    """A real header whose tensors are missing, and a file that ends within its header."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(tmp_path / "whole.gguf", "llama")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((64, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole = (tmp_path / "whole.gguf").read_bytes()
    for kept in (len(whole) - 1000, 60):
        cut = damaged(tmp_path / "cut.gguf", whole[:kept])
        said = sentence(in_a_process("doctor", cut))
        assert "cut short" in said and str(cut) in said


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("empty.txt", b"", "holds no text"),
        ("blank.txt", b" \n\n\n\t\n", "holds no text"),
        ("binary.txt", b"\x00\x01\x02 abc" * 50, "binary"),
        ("latin.txt", b"caf\xe9 " * 50, "binary file or not encoded in UTF-8"),
        ("short.txt", b"w1 w2 w3", "too short"),
        ("broken.jsonl", b'{"text": "w1"}\n{"te', "line 2: not JSON"),
        ("broken.txt.gz", b"\x1f\x8b\x08\x00 no gzip", "Cannot read"),
        ("broken.parquet", b"PAR1 no parquet", "Cannot read"),
    ],
)
def test_text_that_cannot_be_trained_on(
    interp: Interp, tiny: Path, tmp_path: Path, name: str, content: bytes, expected: str
) -> None:
    text = damaged(tmp_path / name, content)
    said = sentence(interp("train-transcoders", "--model_path", tiny, "--dataset_name", text, "--train_all"))
    assert expected in said
    if name != "short.txt":
        assert expected in sentence(interp("demo", "--model", tiny, "--text", text))


def test_text_that_is_not_there(interp: Interp, tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "nowhere.txt"
    said = sentence(interp("train-transcoders", "--model_path", tiny, "--dataset_name", text, "--train_all"))
    assert str(text) in said
    assert str(text) in sentence(interp("demo", "--model", tiny, "--text", text))


def test_prompt_longer_than_the_context(interp: Interp, tiny: Path, text: Path, transcoders: Path) -> None:
    """65 words and BOS where 64 tokens fit."""
    prompt = " ".join(["w1"] * 65)
    for outcome in (
        interp("capture", tiny, "--prompt", prompt, "--points", "mlp_out.0"),
        interp("trace", "--model_path", tiny, "--transcoder_dir", transcoders, "--prompt", prompt),
        interp("demo", "--model", tiny, "--text", text, "--prompt", prompt),
    ):
        said = sentence(outcome)
        assert "66 tokens" in said and "context is 64" in said


@pytest.mark.parametrize("place", ["below a file", "/proc"])
def test_output_folder_that_cannot_be_written(
    interp: Interp, tiny: Path, text: Path, transcoders: Path, tmp_path: Path, place: str
) -> None:
    folder = damaged(tmp_path / "file", b"") / "out" if place == "below a file" else Path("/proc/interp/out")
    training = ("--model_path", tiny, "--dataset_name", text, "--train_all")
    for outcome in (
        interp("capture", tiny, "--prompt", "w1", "--points", "mlp_out.0", "--out", folder / "acts.safetensors"),
        interp("trace", "--model_path", tiny, "--transcoder_dir", transcoders, "--output_dir", folder),
        interp("train-transcoders", *training, "--checkpoint_dir", folder),
        interp("demo", "--model", tiny, "--output_dir", folder),
    ):
        said = sentence(outcome)
        assert said.startswith(f"Cannot write to {folder}: ") and "choose another output folder" in said
        assert not outcome.out, "the folder is checked before anything slow begins"


def test_transcoders_of_another_model(interp: Interp, stranger: Path, transcoders: Path) -> None:
    """Same architecture, same shapes, other weights: only the fingerprint tells."""
    said = sentence(interp("trace", "--model_path", stranger, "--transcoder_dir", transcoders, "--prompt", "w1"))
    assert "trained on tiny" in said and "stranger" in said


def test_transcoders_that_are_not_there_or_not_all(
    interp: Interp, tiny: Path, transcoders: Path, tmp_path: Path
) -> None:
    import shutil

    said = sentence(interp("trace", "--model_path", tiny, "--transcoder_dir", tmp_path / "nowhere"))
    assert "No dictionaries in" in said and "nowhere" in said
    shutil.copytree(transcoders, tmp_path / "some")
    shutil.rmtree(tmp_path / "some" / "mlp_in.1")
    said = sentence(interp("trace", "--model_path", tiny, "--transcoder_dir", tmp_path / "some", "--prompt", "w1"))
    assert "layer 1 has no transcoder" in said
    weights = tmp_path / "some" / "mlp_in.0" / "final" / "weights.safetensors"
    damaged(weights, weights.read_bytes()[:-8])
    said = sentence(interp("trace", "--model_path", tiny, "--transcoder_dir", tmp_path / "some", "--prompt", "w1"))
    assert str(weights) in said


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ("resid_pots.1", "No point is called 'resid_pots'; nearest: resid_post"),
        ("resid_post", "exists once per layer"),
        ("final_norm.1", "exists once per model"),
        ("mlp_out.0.head-1", "no head axis"),
        ("mlp out", "is no address"),
        ("resid_post.3", "resid_post.3"),
        ("z.0.head-6", "z.0.head-6"),
        ("router_logits.0", "PointRefused: router_logits.0 does not exist here"),
    ],
)
def test_a_point_that_does_not_exist(interp: Interp, tiny: Path, points: str, expected: str) -> None:
    assert expected in sentence(interp("capture", tiny, "--prompt", "w1", "--points", points))


@pytest.mark.parametrize(
    ("target", "expected"), [("w1 w2", "is 2 tokens for this tokenizer"), ("", "is 0 tokens for this tokenizer")]
)
def test_a_target_that_is_not_one_token(
    interp: Interp, tiny: Path, transcoders: Path, target: str, expected: str
) -> None:
    flags = ("--prompt", "w1", "--target_token", target)
    assert expected in sentence(interp("trace", "--model_path", tiny, "--transcoder_dir", transcoders, *flags))


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("--node_threshold", "1.5", "between 0 and 1"),
        ("--top_k", "0", "at least one logit"),
        ("--max_nodes", "-1", "-1 is below 0"),
        ("--dtype", "float12", "float12"),
        ("--device", "toaster", "toaster"),
    ],
)
def test_a_value_out_of_range(
    interp: Interp, tiny: Path, transcoders: Path, flag: str, value: str, expected: str
) -> None:
    said = sentence(interp("trace", "--model_path", tiny, "--transcoder_dir", transcoders, flag, value))
    assert expected in said


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), "Name the layers"),
        (("--train_all", "--layers", "0"), "Name the layers"),
        (("--layers", "7"), "there is no layer 7"),
        (("--train_all", "--activation_fn", "relu"), "relu does not train yet"),
        (("--train_all", "--k", "0"), "k must be at least 1"),
        (("--train_all", "--context_len", "4"), "context_len = 4"),
        (("--train_all", "--k", "5000"), "5000"),
    ],
)
def test_training_that_cannot_be_done(
    interp: Interp, tiny: Path, text: Path, flags: tuple[str, ...], expected: str
) -> None:
    said = sentence(interp("train-transcoders", "--model_path", tiny, "--dataset_name", text, *flags))
    assert expected in said


@pytest.mark.parametrize(
    "command", [("points",), ("points", "tiny", "--no-such-flag"), ("no-such-command",), ("trace", "--top_k", "many")]
)
def test_flags_that_do_not_parse(interp: Interp, command: tuple[str, ...]) -> None:
    """The parser's own message, which is a box and no sentence."""
    outcome = interp(*command)
    assert outcome.status == 2 and "Traceback" not in outcome.err and outcome.err


def test_a_benchmark_that_does_not_exist(interp: Interp) -> None:
    said = sentence(interp("bench", "capture", "nonsense"))
    assert "'nonsense'" in said and "capture, generate" in said


def test_benchmarks_without_a_checkout(interp: Interp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a wheel, which has no benchmarks beside the package."""
    monkeypatch.setattr("interp.scripts.bench.CHECKOUT", tmp_path)
    assert "clone the repository" in sentence(interp("bench", "capture"))


def test_generate_says_what_is_wrong_with_edits_and_limits(interp: Interp, tiny: Path, tmp_path: Path) -> None:
    absent, broken, beyond = (tmp_path / name for name in ("absent.json", "broken.json", "beyond.json"))
    broken.write_text('{"version": 1, "edits": [{"kind": "Ad", "address": "resid_post.1"}]}', encoding="utf-8")
    beyond.write_text(to_json([Scale("resid_post.7", 2.0)]), encoding="utf-8")
    ask = ("generate", tiny, "--prompt", "w1", "--max-new-tokens", "2")
    assert "Cannot read the edits" in sentence(interp(*ask, "--steer", absent))
    assert "Ad" in sentence(interp(*ask, "--steer", broken))
    assert "resid_post.7" in sentence(interp(*ask, "--steer", beyond))
    assert "top_p" in sentence(interp(*ask, "--temperature", "1", "--top-p", "2"))
    assert "chat template" in sentence(interp(*ask, "--chat"))
    assert "max_new_tokens" in sentence(interp("generate", tiny, "--prompt", "w1", "--max-new-tokens", "0"))
