"""Every command takes the directory of a class that its module registers, as it takes a checkpoint."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from interp.circuits.graph import AttributionGraph
from interp.models import save
from interp.models.architectures import REGISTERED
from interp.models.checkpoint import fingerprint
from tests.docs.test_custom_architectures import module
from tests.training.conftest import tiny_tokenizer

from .conftest import TRAINING, Interp

CONFIG = {"vocabulary": 64, "width": 12, "inner": 20, "n_heads": 4, "n_kv_heads": 2, "depth": 2}


@pytest.fixture(scope="module")
def custom(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a two-branch decoder; the folder of its module is on the Python path."""
    folder = tmp_path_factory.mktemp("custom")
    (folder / "two_branch.py").write_text(module())
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        import two_branch  # type: ignore[import-not-found]

        torch.manual_seed(0)
        save(two_branch.TwoBranch(**CONFIG), folder / "custom", CONFIG, tiny_tokenizer())
        yield folder / "custom"
    REGISTERED.pop("two_branch", None)
    sys.modules.pop("two_branch", None)


@pytest.fixture(autouse=True)
def as_in_a_new_process(custom: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is registered before the command reads the directory; its files land in an empty folder."""
    REGISTERED.pop("two_branch", None)
    monkeypatch.delitem(sys.modules, "two_branch", raising=False)
    monkeypatch.chdir(tmp_path)


def test_points_doctor_and_names(interp: Interp, custom: Path) -> None:
    outcome = interp("points", custom)
    assert outcome.status == 0 and not outcome.err and "custom, TwoBranch" in outcome.out
    rows = {line.split("│")[1].strip(): line for line in outcome.out.splitlines() if line.count("│") > 5}
    assert "rw" in rows["mlp_out_post"] and "blocks.N.mlp output, times 0.5" in rows["mlp_out_post"]
    assert "0-1" in rows["attn_probs"] and "adds attention and MLP in parallel" in rows["resid_mid"]
    outcome = interp("doctor", custom, "--dtype", "float64")
    assert outcome.status == 0 and "all hold" in outcome.out
    outcome = interp("names", "mlp_out.1", "--model", custom, "--to", "hf")
    assert outcome.status == 0 and outcome.out.startswith("blocks.1.mlp output")


def test_capture_is_what_the_class_computes(interp: Interp, custom: Path, tmp_path: Path) -> None:
    outcome = interp("capture", custom, "--prompt", "w1 w2 w3", "--points", "mlp_out_post.1", "logits")
    assert outcome.status == 0 and not outcome.err
    with safe_open(tmp_path / "acts.safetensors", "pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert file.metadata()["fingerprint"] == fingerprint(custom)
    model = sys.modules["two_branch"].TwoBranch(**CONFIG)
    with safe_open(custom / "model.safetensors", "pt") as file:
        model.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    seen: list[torch.Tensor] = []
    model.blocks["1"].mlp.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        logits = model(saved["tokens"][None])[0]
    assert torch.equal(saved["logits"], logits) and torch.equal(saved["mlp_out_post.1"], 0.5 * seen[0][0])


def test_generation_is_refused_in_one_sentence(interp: Interp, custom: Path) -> None:
    outcome = interp("generate", custom, "--prompt", "w1 w2")
    assert outcome.status == 2 and outcome.err.count("\n") == 1
    assert "custom cannot generate: its forward takes no cache" in outcome.err


def test_transcoders_and_the_graph(interp: Interp, custom: Path, text: Path, tmp_path: Path) -> None:
    flags = ("--dataset_name", text, "--checkpoint_dir", tmp_path / "transcoders", "--train_all", *TRAINING)
    outcome = interp("train-transcoders", "--model_path", custom, *flags)
    assert outcome.status == 0 and not outcome.err
    stated = json.loads((tmp_path / "transcoders" / "mlp_in.1" / "final" / "config.json").read_text())
    assert stated["model"]["fingerprint"] == fingerprint(custom)
    flags = ("--transcoder_dir", tmp_path / "transcoders", "--prompt", "w1 w2 w3", "--output_dir", tmp_path)
    outcome = interp("trace", "--model_path", custom, *flags)
    assert outcome.status == 0 and not outcome.err
    certificate = AttributionGraph.load(tmp_path / "graph.json").certificate
    assert certificate is not None and certificate.max_relative_error <= 1e-4


def test_weights_that_are_not_there_are_drawn_and_said_unless_asked_for(
    interp: Interp, custom: Path, tmp_path: Path
) -> None:
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bare" / name).write_bytes((custom / name).read_bytes())
    said = "bare has no model.safetensors: TwoBranch is initialised randomly."
    outcome = interp("points", "bare")
    assert outcome.status == 0 and said in outcome.out
    for flags in (("--random_init",), ("--random-init", "--device", "cpu")):
        outcome = interp("points", "bare", *flags)
        assert outcome.status == 0 and said not in outcome.out


COMMANDS = ("points", "doctor", "names", "capture", "generate", "train-transcoders", "trace", "demo")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_takes_a_model_takes_the_flags_of_loading(interp: Interp, command: str) -> None:
    outcome = interp(command, "--help")
    assert outcome.status == 0 and all(flag in outcome.out for flag in ("--random-init", "--device", "--dtype"))
    default = "float32" if command in ("trace", "demo") else "None"
    shown = " ".join(outcome.out.replace("│", " ").partition("--dtype")[2].split())
    assert re.search(r"default: (\w+)\)", shown)[1] == default  # type: ignore[index]


def test_a_config_of_transformers_alone_is_a_model_where_that_is_asked_for(
    interp: Interp, tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_bytes((tiny / "config.json").read_bytes())
    outcome = interp("points", "bare")
    assert outcome.status == 2 and "--random_init" in outcome.err and outcome.err.count("\n") == 1
    outcome = interp("doctor", "bare", "--random_init", "--dtype", "float64")
    assert outcome.status == 0 and "all hold" in outcome.out
