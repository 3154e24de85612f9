"""What is stored is what the model computed at that token, and excluded tokens are never stored."""

from pathlib import Path

import pytest
import torch

from interp.engines.eager import EagerEngine
from interp.errors import InterpError, UserError
from interp.training.harvest import StoreDtype, harvest
from interp.training.tokens import TokenRows, cut_rows

from .conftest import BOS, WORDS

POINTS = ["mlp_in.0", "mlp_out.0", "mlp_in.2", "mlp_out.2"]


def cut(engine: EagerEngine, documents: list[str]) -> TokenRows:
    return cut_rows(documents, engine.tokenizer, context_len=17, train_tokens=700, held_out_tokens=200)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float16", 1e-3)])
def test_against_hooks_on_one_row_at_a_time(
    engine: EagerEngine, documents: list[str], tmp_path: Path, dtype: StoreDtype, tolerance: float
) -> None:
    rows = cut(engine, documents)
    store = harvest(engine, rows, POINTS, tmp_path, excluded_token_ids=[BOS, 7], batch_tokens=100, dtype=dtype)
    index, model = store.index, engine.module
    stored = {point: torch.cat([store.train(point), store.held_out(point)]) for point in POINTS}
    seen: dict[str, torch.Tensor] = {}
    for layer in (0, 2):
        mlp = model.get_submodule(f"model.layers.{layer}.mlp")

        def keep(_module, args, output, layer=layer):
            seen[f"mlp_in.{layer}"], seen[f"mlp_out.{layer}"] = args[0][0], output[0]

        mlp.register_forward_hook(keep)
    for r, row in enumerate(rows.train + rows.held_out):
        model(input_ids=torch.tensor([row.tokens]))
        at = (index.rows == r).nonzero()[0]
        kept = [p for p, token in enumerate(row.tokens) if token not in (BOS, 7)]
        assert index.positions[at].tolist() == kept
        assert index.token_ids[at].tolist() == [row.tokens[p] for p in kept]
        assert bool((at < index.n_train).all()) == (r < len(rows.train))
        for point in POINTS:
            torch.testing.assert_close(stored[point][at], seen[point][kept].detach(), atol=tolerance, rtol=tolerance)
    for layer in (0, 2):
        model.get_submodule(f"model.layers.{layer}.mlp")._forward_hooks.clear()


def test_one_pass_and_complete_progress(engine: EagerEngine, documents: list[str], tmp_path: Path) -> None:
    rows = cut(engine, documents)
    ran: list[int] = []
    handle = engine.module.get_submodule("model.layers.0").register_forward_pre_hook(
        lambda _module, args: ran.append(args[0].shape[0])
    )
    reports = []
    harvest(engine, rows, POINTS, tmp_path, batch_tokens=100, progress=reports.append)
    handle.remove()
    everything = rows.train + rows.held_out
    assert sum(ran) == len(everything)
    assert max(ran) > 3
    total = sum(len(row.tokens) for row in everything)
    assert (reports[0].done, reports[-1].done, reports[-1].total) == (0, total, total)


def test_large_values_keep_their_precision_in_float16(
    engine: EagerEngine, documents: list[str], tmp_path: Path
) -> None:
    rows = cut(engine, documents)
    weight = engine.module.get_submodule("model.layers.0.mlp.down_proj").get_parameter("weight")
    with torch.no_grad():
        weight.mul_(1e6)
    try:
        (tmp_path / "half").mkdir()
        (tmp_path / "full").mkdir()
        half = harvest(engine, rows, ["mlp_out.0"], tmp_path / "half").train("mlp_out.0")
        full = harvest(engine, rows, ["mlp_out.0"], tmp_path / "full", dtype="float32").train("mlp_out.0")
    finally:
        with torch.no_grad():
            weight.div_(1e6)
    assert float(full.abs().max()) > 65504
    error = (half - full).double().square().sum() / (full - full.mean(0)).double().square().sum()
    assert float(error) < 1e-6


def test_text_of_excluded_tokens_only_is_refused(engine: EagerEngine, documents: list[str], tmp_path: Path) -> None:
    everything = range(len(WORDS) + 4)
    with pytest.raises(UserError, match="excluded"):
        harvest(engine, cut(engine, documents), POINTS, tmp_path, excluded_token_ids=everything)


def test_a_file_that_was_cut_short_is_noticed(engine: EagerEngine, documents: list[str], tmp_path: Path) -> None:
    store = harvest(engine, cut(engine, documents), POINTS, tmp_path)
    file = tmp_path / "mlp_in.2"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(InterpError, match="shorter"):
        store.held_out("mlp_in.2")
