"""Every command from its flags to its files, on a tiny checkpoint directory."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from interp.circuits.graph import AttributionGraph
from interp.circuits.graph_json import validate_document
from interp.dictionaries import load_dictionaries
from interp.edits import Add, to_json
from interp.engines import hooks, load
from interp.engines.base import Request
from interp.engines.load import load_model
from interp.models.anatomy import Anatomy, Sublayer
from interp.models.checkpoint import fingerprint
from interp.models.resolve import resolve
from tests.families.tiny import D_HEAD, D_MODEL, N_HEADS, N_LAYERS

from .conftest import TRAINING, Interp


def test_points_lists_what_is_served_and_why_the_rest_is_not(interp: Interp, tiny: Path) -> None:
    outcome = interp("points", tiny)
    assert outcome.status == 0 and not outcome.err
    rows = {line.split("│")[1].strip(): line for line in outcome.out.splitlines() if line.count("│") > 5}
    assert "rw" in rows["mlp_out"] and "model.layers.N.mlp output" in rows["mlp_out"] and "0-2" in rows["mlp_out"]
    assert "rw" in rows["attn_probs"] and "heads x query x key" in rows["attn_probs"]
    assert "rw" not in rows["head_out"] and "heads x d_model" in rows["head_out"]
    assert "nearest: query.N" in rows["q_norm_in"] and "0-2" in rows["q_norm_in"]
    assert "-" in rows["router_logits"].split("│")[3] and "P" not in rows["router_logits"].split("│")[6]


def test_points_of_the_nnsight_engine(interp: Interp, tiny: Path) -> None:
    outcome = interp("points", tiny, "--engine", "nnsight")
    assert outcome.status == 0
    rows = {line.split("│")[1].strip(): line for line in outcome.out.splitlines() if line.count("│") > 5}
    assert "rw" in rows["mlp_out"] and "rw" in rows["resid_mid"]
    assert "0-2" in rows["attn_probs"] and "inside a module's forward" in rows["attn_probs"]


def test_doctor_checks_every_claim(interp: Interp, tiny: Path) -> None:
    outcome = interp("doctor", tiny)
    assert outcome.status == 0 and not outcome.err
    assert "all hold" in outcome.out and "FAIL" not in outcome.out
    for proof in ("P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8"):
        assert proof in outcome.out
    assert "resid_mid echoes" in " ".join(outcome.out.split())


def test_doctor_ends_with_status_1_when_a_claim_fails(
    interp: Interp, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An anatomy that takes attention's contribution for the MLP's contradicts P1 and P3."""

    def faulty(*arguments: Any) -> Anatomy:
        anatomy = resolve(*arguments)
        first, second, *rest = anatomy.blocks
        assert isinstance(second.attn, Sublayer) and isinstance(second.mlp, Sublayer)
        mlp = replace(second.mlp, contribution=second.attn.contribution)
        return replace(anatomy, blocks=(first, replace(second, mlp=mlp), *rest))

    monkeypatch.setattr(load, "resolve", faulty)
    outcome = interp("doctor", tiny)
    assert outcome.status == 1 and not outcome.err
    assert "FAILS at 1" in outcome.out and "all hold" not in outcome.out


def test_doctor_ends_with_status_1_when_a_write_is_lost(
    interp: Interp, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    visit = hooks.Session._visit

    def forgetful(session: hooks.Session, use: hooks.Use, x: torch.Tensor) -> torch.Tensor | None:
        new = visit(session, use, x)
        return x if use.address.name == "mlp_act" else new

    monkeypatch.setattr(hooks.Session, "_visit", forgetful)
    outcome = interp("doctor", tiny)
    assert outcome.status == 1 and "A write at mlp_act at layer 1 is none" in outcome.out
    assert "FAILS at 0, 1, 2" in outcome.out and "all hold" not in outcome.out


def test_capture_saves_what_the_model_computes(interp: Interp, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "acts.safetensors"
    outcome = interp(
        "capture", tiny, "--prompt", "w1 w2 w3", "--points", "resid_post.1", "z.2.head-3", "final_norm", "--out", out
    )
    assert outcome.status == 0 and not outcome.err
    with safe_open(out, "pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    assert set(saved) == {"resid_post.1", "z.2.head-3", "final_norm", "tokens"}
    assert saved["z.2.head-3"].shape == (4, D_HEAD) and D_HEAD * N_HEADS != D_MODEL
    assert metadata["fingerprint"] == fingerprint(tiny) and metadata["prompt"] == "w1 w2 w3"
    assert json.loads(metadata["sources"])["resid_post.1"].startswith("model.layers.1 output")
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    states = model(saved["tokens"][None], output_hidden_states=True).hidden_states
    assert torch.equal(saved["resid_post.1"], states[2][0]) and torch.equal(saved["final_norm"], states[-1][0])
    assert [path.name for path in tmp_path.iterdir()] == ["acts.safetensors"]


def test_generate_streams_what_the_engine_gives_steered_by_a_file(interp: Interp, tiny: Path, tmp_path: Path) -> None:
    steer, out = tmp_path / "edits.json", tmp_path / "acts.safetensors"
    edit = Add("resid_post.1", torch.linspace(-9, 9, D_MODEL), positions=("last_prompt", "generated"))
    steer.write_text(to_json([edit]), encoding="utf-8")
    flags = ["--prompt", "w1 w2", "--max-new-tokens", "5", "--steer", steer, "--capture", "resid_post.1", "--out", out]
    outcome = interp("generate", tiny, *flags)
    assert outcome.status == 0 and not outcome.err
    engine = load_model(tiny, prove=False)
    request = Request("w1 w2", capture=["resid_post.1"], edits=[edit], max_new_tokens=5)
    (right,) = engine.run([request])
    (plain,) = engine.run([replace(request, edits=[])])
    assert right.text is not None and right.text in outcome.out and right.tokens != plain.tokens
    assert (
        f"({len(right.tokens) - right.n_prompt} tokens, ended by {right.finish_reason}, 1 edits, eager)" in outcome.out
    )
    with safe_open(out, "pt") as file:
        assert torch.equal(file.get_tensor("resid_post.1"), right.capture["resid_post.1"])
        assert file.get_tensor("tokens").tolist() == right.tokens


def test_generate_draws_again_what_the_told_seed_drew(interp: Interp, tiny: Path) -> None:
    flags = ["--prompt", "w1 w2", "--max-new-tokens", "8", "--temperature", "2"]
    first = interp("generate", tiny, *flags).out.splitlines()
    seed = first[-1].split("seed ")[1].rstrip(")")
    assert interp("generate", tiny, *flags, "--seed", seed).out.splitlines() == first
    assert interp("generate", tiny, *flags).out.splitlines()[:-1] != first[:-1]


def test_capture_while_generating_has_one_row_per_position_that_ran(interp: Interp, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "acts.safetensors"
    flags = ("--points", "mlp_out.0", "--max_new_tokens", "3", "--out", out)
    assert interp("capture", tiny, "--prompt", "w1 w2", *flags).status == 0
    with safe_open(out, "pt") as file:
        n_tokens, n_rows = file.get_tensor("tokens").shape[0], file.get_tensor("mlp_out.0").shape[0]
    assert n_tokens > 3 and n_rows == n_tokens - 1


def test_train_transcoders_writes_one_folder_per_layer_and_nothing_else(transcoders: Path, tiny: Path) -> None:
    folders = [f"mlp_in.{layer}" for layer in range(N_LAYERS)]
    assert sorted(p.name for p in transcoders.iterdir()) == ["corpus.safetensors", *folders, "train.jsonl"]
    loaded = load_dictionaries(transcoders)
    assert sorted(loaded) == list(range(N_LAYERS))
    for layer, transcoder in loaded.items():
        config = transcoder.config
        assert (config.input_points, config.output_points) == ([f"mlp_in.{layer}"], [f"mlp_out.{layer}"])
        assert config.model is not None and config.model.fingerprint == fingerprint(tiny)
        assert config.n_latents == 2 * D_MODEL and config.activation.k == 4 and config.excluded_token_ids == [0, 1]
        assert config.training["total_tokens"] == 600 and config.training["context_len"] == 32


def test_train_transcoders_prints_a_row_per_layer_and_keeps_finished_layers(
    interp: Interp, tiny: Path, text: Path, transcoders: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in transcoders.rglob("*")}
    training = ("--dataset-name", text, "--checkpoint-dir", transcoders, "--train-all", *TRAINING)
    outcome = interp("train-transcoders", "--model-path", tiny, *training)
    assert outcome.status == 0 and not outcome.err
    rows = [line for line in outcome.out.splitlines() if line.count("│") > 5]
    assert [row.split("│")[1].strip() for row in rows] == ["0", "1", "2"]
    assert {path: path.stat().st_mtime_ns for path in transcoders.rglob("*.safetensors")} == {
        path: time for path, time in before.items() if path.suffix == ".safetensors"
    }


@pytest.mark.parametrize("flag", ["--total_tokens", "--total-tokens"])
def test_flags_are_written_with_either_sign(interp: Interp, tiny: Path, text: Path, tmp_path: Path, flag: str) -> None:
    flags = ("--checkpoint_dir", tmp_path, "--layers", "1", flag, "320", *TRAINING[2:])
    outcome = interp("train-transcoders", "--model_path", tiny, "--dataset_name", text, *flags)
    assert outcome.status == 0
    config = json.loads((tmp_path / "mlp_in.1" / "final" / "config.json").read_text())
    assert config["training"]["total_tokens"] == 320
    assert [path.name for path in tmp_path.glob("mlp_in.*")] == ["mlp_in.1"]


def test_trace_writes_a_valid_graph_and_a_page(interp: Interp, tiny: Path, transcoders: Path, tmp_path: Path) -> None:
    flags = ("--prompt", "w1 w2 w3", "--output_dir", tmp_path, "--output_name", "mine", "--html", "--top_k", "3")
    outcome = interp("trace", "--model_path", tiny, "--transcoder_dir", transcoders, *flags)
    assert outcome.status == 0 and not outcome.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.html", "mine.json"]
    document = json.loads((tmp_path / "mine.json").read_text())
    validate_document(document)
    assert sum(node["feature_type"] == "logit" for node in document["nodes"]) == 3
    certificate = AttributionGraph.load(tmp_path / "mine.json").certificate
    assert certificate is not None and certificate.max_relative_error <= 1e-4
    assert outcome.out.count("Replacement score") == 2 and outcome.out.count("share ") == 20


def test_trace_explains_the_token_that_is_asked_for(
    interp: Interp, tiny: Path, transcoders: Path, tmp_path: Path
) -> None:
    flags = ("--prompt", "w1 w2 w3", "--output_dir", tmp_path, "--target_token", "w9")
    assert interp("trace", "--model_path", tiny, "--transcoder_dir", transcoders, *flags).status == 0
    document = json.loads((tmp_path / "graph.json").read_text())
    (logit,) = [node for node in document["nodes"] if node["feature_type"] == "logit"]
    assert logit["clerp"].startswith('Output "w9" (p=')


def test_every_command_explains_its_flags(interp: Interp) -> None:
    outcome = interp("--help")
    assert outcome.status == 0
    for command in ("points", "doctor", "names", "capture", "generate", "train-transcoders", "trace", "demo"):
        assert command in outcome.out
        assert interp(command, "--help").status == 0


@pytest.mark.parametrize("module", ["main", "trace", "train_transcoders"])
def test_a_module_is_a_command(module: str) -> None:
    run = subprocess.run([sys.executable, "-m", f"interp.scripts.{module}", "--help"], capture_output=True, text=True)
    assert run.returncode == 0 and "--help" in run.stdout and not run.stderr
