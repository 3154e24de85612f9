"""Commands on both packaged models, loaded once; README's test runs `trace` on Gemma and `doctor` on SmolLM2."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from interp.circuits.graph import AttributionGraph
from interp.engines import load
from interp.engines.eager import EagerEngine
from interp.scripts import capture, doctor, points, trace, train_transcoders
from interp.training import read_documents

from .conftest import GEMMA, SMOLLM

pytestmark = pytest.mark.real


@pytest.fixture(autouse=True)
def already_loaded(engine: EagerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands get the engine that is there when they ask for its model."""

    def found(model: str | Path, report: Callable[[str], None], **options: object) -> EagerEngine:
        assert str(model) == engine.model.name
        return engine

    monkeypatch.setattr(load, "load_model", found)
    monkeypatch.setenv("COLUMNS", "200")


def test_points(engine: EagerEngine, capsys: pytest.CaptureFixture[str]) -> None:
    points.run(points.Points(engine.model.name))
    rows = {line.split("│")[1].strip(): line for line in capsys.readouterr().out.splitlines() if line.count("│") > 5}
    norm_behind = engine.model.name == GEMMA
    expected = "post_feedforward_layernorm output" if norm_behind else "model.layers.N.mlp output"
    assert expected in rows["mlp_out_post"] and "model.layers.N.mlp output" in rows["mlp_out"]
    assert f"0-{engine.model.n_layers - 1}" in rows["resid_mid"]
    assert ("self_attn.q_norm" in rows["q_norm_out"]) == norm_behind


@pytest.mark.parametrize("engine", [GEMMA], indirect=True)
def test_doctor(engine: EagerEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(doctor.Doctor(engine.model.name)) == 0
    printed = capsys.readouterr().out
    assert "all hold" in printed and "FAIL" not in printed


def test_capture(engine: EagerEngine, tmp_path: Path) -> None:
    addresses = ("resid_post.10", "mlp_out_post.4", "z.3.head-2", "attn_probs.5")
    out = tmp_path / "acts.safetensors"
    capture.run(capture.CaptureCommand(engine.model.name, "Hello, world", addresses, out))
    saved = load_file(out)
    n_pos = len(saved["tokens"])
    assert saved["tokens"].tolist() == engine.to_tokens("Hello, world")[0].tolist()
    assert saved["resid_post.10"].shape == saved["mlp_out_post.4"].shape == (n_pos, engine.model.d_model)
    assert saved["z.3.head-2"].shape == (n_pos, engine.model.d_head)
    assert saved["attn_probs.5"].shape == (engine.model.n_heads, n_pos, n_pos)
    assert torch.allclose(saved["attn_probs.5"].sum(-1), torch.ones(()), atol=1e-5)


@pytest.mark.parametrize("engine", [SMOLLM], indirect=True)
def test_train_and_trace(engine: EagerEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Few tokens make poor dictionaries; the certificate does not depend on how good they are."""
    sample = Path(train_transcoders.__file__).parents[1] / "data" / "sample.txt.gz"
    few = tmp_path / "few.txt"
    few.write_text("\n\n\n".join(document[:2000] for document in read_documents(sample)[:4]), encoding="utf-8")
    training = train_transcoders.TrainTranscoders(
        engine.model.name, str(few), tmp_path / "t", train_all=True, expansion_factor=1, k=8, total_tokens=700
    )
    train_transcoders.run(training)
    trace.run(trace.Trace(engine.model.name, tmp_path / "t", "Two and two is", tmp_path / "g", html=True))
    certificate = AttributionGraph.load(tmp_path / "g" / "graph.json").certificate
    assert certificate is not None and certificate.max_relative_error <= 1e-4
    assert sorted(path.name for path in (tmp_path / "g").iterdir()) == ["graph.html", "graph.json"]
    printed = capsys.readouterr().out
    # SmolLM2's tokenizer puts no BOS before a text, so there is no position to leave out.
    assert printed.count("Replacement score") == 1
