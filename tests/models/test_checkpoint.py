"""Where models are found, what is said when they are not, and what a fingerprint depends on."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from interp.errors import UserError
from interp.models import checkpoint as checkpoints
from interp.models.checkpoint import checkpoint_dtype, fingerprint, resolve
from interp.models.loading import load_model_and_tokenizer

CPU = torch.device("cpu")


def quiet(line: str) -> None:
    """A report that nobody reads."""


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=56,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(name: str, **_: object) -> str:
        raise AssertionError(f"the hub was asked for {name}")

    monkeypatch.setattr("huggingface_hub.snapshot_download", asked)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_a_directory_loads_frozen_in_eval_mode_without_tokenizer(saved: Path) -> None:
    found = resolve(str(saved), quiet)
    assert (found.path, found.name, found.kind, found.revision) == (saved, "tiny", "directory", None)
    model, tokenizer = load_model_and_tokenizer(found, CPU, torch.float32)
    assert tokenizer is None
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    for name, tensor in tiny_llama().state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_constants_are_those_of_the_dtype_that_the_model_is_built_in(tmp_path: Path) -> None:
    config = Gemma3TextConfig(
        vocab_size=97,
        hidden_size=40,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    Gemma3ForCausalLM(config).save_pretrained(tmp_path / "gemma")
    found = resolve(tmp_path / "gemma", quiet)
    scale = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model: Any = load_model_and_tokenizer(found, CPU, dtype)[0]
        assert all(parameter.dtype == dtype for parameter in model.parameters())
        scale[dtype] = (
            model.get_input_embeddings()(torch.tensor([5])) / model.get_parameter("model.embed_tokens.weight")[5]
        )
    assert scale[torch.float64][0, 0].item() == pytest.approx(math.sqrt(40), rel=1e-14)
    assert scale[torch.float32][0, 0].item() == pytest.approx(math.sqrt(40), rel=3e-7)
    assert scale[torch.bfloat16][0, 0].item() == pytest.approx(math.sqrt(40), rel=1e-2)


def test_checkpoint_dtype_is_what_the_config_states(saved: Path) -> None:
    assert checkpoint_dtype(resolve(saved, quiet)) == "float32"
    config = json.loads((saved / "config.json").read_text())
    for key, value in (("torch_dtype", "bfloat16"), ("dtype", "float16")):
        (saved / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "dtype"} | {key: value}))
        assert checkpoint_dtype(resolve(saved, quiet)) == value
    (saved / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "dtype"}))
    assert checkpoint_dtype(resolve(saved, quiet)) is None


def test_fingerprint_does_not_depend_on_shards_paths_or_stated_dtype(saved: Path, tmp_path: Path) -> None:
    expected = fingerprint(saved)
    assert len(expected) == 16
    tiny_llama().save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert fingerprint(tmp_path / "sharded") == expected
    config = json.loads((saved / "config.json").read_text())
    config |= {"dtype": "bfloat16", "transformers_version": "9.9", "_name_or_path": "elsewhere"}
    (saved / "config.json").write_text(json.dumps(config))
    assert fingerprint(str(saved)) == expected


def test_fingerprint_depends_on_config_and_on_weights(saved: Path, tmp_path: Path) -> None:
    expected = fingerprint(saved)
    tiny_llama(seed=1).save_pretrained(tmp_path / "other")
    assert fingerprint(tmp_path / "other") != expected
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert fingerprint(saved) != expected


def test_fingerprint_of_a_module_depends_on_its_weights() -> None:
    model = tiny_llama()
    assert fingerprint(model) == fingerprint(tiny_llama())
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight").add_(1)
    assert fingerprint(model) != fingerprint(tiny_llama())


def refused(model: str | Path, match: str) -> None:
    with pytest.raises(UserError, match=match) as error:
        resolve(model, quiet)
    assert "\n" not in str(error.value)


def test_what_is_no_checkpoint_is_refused_in_one_sentence(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no config.json")
    (tmp_path / "notes.txt").write_text("hello")
    refused(tmp_path / "notes.txt", "no .gguf file")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\3\0\0\0" + b"\1" * 40)
    refused(tmp_path / "broken.gguf", "GGUF file|cut short")
    refused("./nowhere", "no file or directory './nowhere'")
    refused("missing.gguf", "no file or directory 'missing.gguf'")
    refused("", "No model is named")
    (saved / "model.safetensors").unlink()
    refused(saved, "no weights")
    (saved / "config.json").write_text("[1, 2]")
    refused(saved, "does not hold a JSON object")
    (saved / "config.json").write_text("{")
    refused(saved, "cannot be read as JSON")


def test_incomplete_damaged_and_unknown_weights_are_refused(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    found = resolve(saved, quiet)

    def load_fails(match: str) -> None:
        with pytest.raises(UserError, match=match):
            load_model_and_tokenizer(found, CPU, torch.float32)

    (saved / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    load_fails("lacks 9 weights")
    (saved / "config.json").write_text(json.dumps(config | {"model_type": "nonesuch"}))
    load_fails("Cannot load tiny")
    (saved / "config.json").write_text(json.dumps(config))
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    load_fails("Cannot load tiny")
    weights.write_bytes(b"\xff" * 50)
    with pytest.raises(UserError, match="not a readable safetensors file"):
        fingerprint(saved)


def test_packaged_names_are_known_in_any_case_and_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def pretend_to_convert(gguf: Path, folder: Path, report: object) -> Path:
        calls.append(gguf.name)
        return folder

    monkeypatch.setenv("INTERP_CACHE", str(tmp_path))
    monkeypatch.setattr(checkpoints, "packaged_gguf", lambda name, report: tmp_path / f"{name}.gguf")
    monkeypatch.setattr(checkpoints, "convert", pretend_to_convert)
    found = resolve("Gemma-3-270M", quiet)
    assert (found.name, found.kind) == ("gemma-3-270m", "packaged")
    assert calls == ["gemma-3-270m.gguf"]
    monkeypatch.setattr(checkpoints, "is_complete", lambda folder: folder == found.path)
    assert resolve("gemma-3-270m", quiet) == found
    assert len(calls) == 1


def test_a_hub_id_is_downloaded_without_what_is_not_needed(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict] = []

    def download(name: str, **options: object) -> str:
        asked.append({"name": name} | options)
        return str(saved)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    found = resolve("someone/model", quiet)
    assert (found.path, found.name, found.kind, found.revision) == (saved, "someone/model", "hub", "tiny")
    assert [call["name"] for call in asked] == ["someone/model"]
    assert "*.safetensors" in asked[0]["allow_patterns"]
    assert not any("bin" in pattern for pattern in asked[0]["allow_patterns"])


def test_an_invalid_hub_id_names_the_packaged_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    refused("no/such/id/at/all", "no valid hub id; packaged: gemma-3-270m, smollm2-135m-instruct")


@pytest.mark.parametrize("offline", ["0", "1"])
def test_without_network_the_packaged_model_of_that_name_is_offered(tmp_path: Path, offline: str) -> None:
    code = "from interp.models.checkpoint import resolve; resolve('google/Gemma-3-270m', lambda line: None)"
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    environment |= {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": offline, "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("interp.errors.UserError: Unknown model 'google/Gemma-3-270m'")
    assert "the packaged model 'gemma-3-270m' needs no hub" in last
