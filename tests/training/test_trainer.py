"""The whole job on a tiny model: files, metrics, resuming, and what is refused."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from interp.dictionaries import Transcoder, load_dictionaries
from interp.engines.eager import EagerEngine
from interp.errors import PointRefused, UserError
from interp.eval import fraction_of_variance_unexplained
from interp.training import Contexts, Corpus, Trainer, TranscoderTrainingConfig, train_transcoders
from interp.training.progress import Progress
from interp.training.tokens import cut_rows

from .conftest import BOS

CONFIG = TranscoderTrainingConfig(
    total_tokens=1800,
    held_out_tokens=400,
    context_len=17,
    k=4,
    epochs=15,
    batch_size=128,
    lr=3e-3,
    store_dtype="float32",
)


@pytest.fixture(scope="module")
def run(engine: EagerEngine, documents: list[str], tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("run")
    return folder, train_transcoders(engine, CONFIG, documents, folder)


def test_every_layer_beats_its_linear_map(run) -> None:
    _, reports = run
    assert [report.layer for report in reports] == [0, 1, 2]
    for report in reports:
        assert report.fvu_transcoder < report.fvu_linear < report.fvu_mean
        assert 0.9 < report.fvu_mean < 1.1
        assert 0 < report.l0 <= 4
        assert not report.kept


def test_the_folder_is_as_documented(run, engine: EagerEngine) -> None:
    folder, reports = run
    assert sorted(path.name for path in folder.iterdir()) == [
        "corpus.safetensors", "mlp_in.0", "mlp_in.1", "mlp_in.2", "train.jsonl",
    ]  # fmt: skip
    for layer, transcoder in load_dictionaries(folder, engine.model).items():
        config = transcoder.config
        assert (config.input_points, config.output_points) == ([f"mlp_in.{layer}"], [f"mlp_out.{layer}"])
        assert config.metrics["fvu"] == reports[layer].fvu_transcoder
        assert config.excluded_token_ids == [0, BOS]
        assert config.model is not None and config.model.fingerprint == "abc"
        assert config.tokens_seen > 10 * 1800
    steps = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    assert {step["layer"] for step in steps} == {0, 1, 2}


def test_saved_fvu_is_that_of_the_saved_weights_on_unseen_documents(
    run, engine: EagerEngine, documents: list[str]
) -> None:
    folder, reports = run
    rows = cut_rows(
        documents, engine.tokenizer, context_len=17, train_tokens=1800, held_out_tokens=400, seed=CONFIG.seed
    )
    corpus = Corpus.load(folder)
    assert corpus.tokens.tolist() == [token for row in rows.train + rows.held_out for token in row.tokens]
    inputs, targets = [], []

    def keep(_module, args, output) -> None:
        inputs.append(args[0][0, 1:])
        targets.append(output[0, 1:])

    handle = engine.module.get_submodule("model.layers.1.mlp").register_forward_hook(keep)
    with torch.no_grad():
        for row in rows.held_out:
            engine.module(input_ids=torch.tensor([row.tokens]))
    handle.remove()
    x, y = torch.cat(inputs), torch.cat(targets)
    transcoder = Transcoder.load(folder / "mlp_in.1" / "final")
    assert fraction_of_variance_unexplained(y, transcoder(x)) == pytest.approx(reports[1].fvu_transcoder, rel=1e-3)


def test_contexts_hold_the_latents_own_values(run, engine: EagerEngine) -> None:
    folder, _ = run
    corpus, final = Corpus.load(folder), folder / "mlp_in.2" / "final"
    contexts, transcoder = Contexts.load(final), Transcoder.load(final)
    seen = []
    mlp = engine.module.get_submodule("model.layers.2.mlp")
    handle = mlp.register_forward_hook(lambda _m, args, _out: seen.append(args[0][0]))
    rows = [corpus.tokens[a:b].tolist() for a, b in pairwise(corpus.offsets)]
    with torch.no_grad():
        for ids in rows:
            engine.module(input_ids=torch.tensor([ids]))
    handle.remove()
    latents = [transcoder.encode(x) for x in seen]
    strongest = torch.stack([table[1:].max(0).values for table in latents]).topk(6, dim=0).values.T
    torch.testing.assert_close(torch.from_numpy(contexts.values), strongest, atol=1e-4, rtol=1e-3)
    found = np.argwhere(contexts.rows >= 0)
    assert len(found) > 100
    for latent, rank in found:
        row, position = contexts.rows[latent, rank], contexts.positions[latent, rank]
        value = float(contexts.values[latent, rank])
        assert float(latents[row][position, latent]) == pytest.approx(value, rel=1e-3, abs=1e-4)


def test_finished_layers_are_kept_and_others_trained(
    run, engine: EagerEngine, documents: list[str], tmp_path: Path
) -> None:
    _, expected = run
    first = train_transcoders(engine, replace(CONFIG, layers=(1,)), documents, tmp_path)
    stamp = (tmp_path / "mlp_in.1" / "final" / "weights.safetensors").stat().st_mtime_ns
    stages: list[Progress] = []
    reports = train_transcoders(engine, CONFIG, documents, tmp_path, stages.append)
    assert [report.kept for report in reports] == [False, True, False]
    assert {stage.stage for stage in stages} == {"harvest", "layer 0", "layer 2"}
    assert replace(reports[1], kept=False) == first[0]
    assert (tmp_path / "mlp_in.1" / "final" / "weights.safetensors").stat().st_mtime_ns == stamp
    for report, other in zip(reports, expected, strict=True):
        assert report.fvu_transcoder == pytest.approx(other.fvu_transcoder, rel=1e-6)
    assert all(report.kept for report in train_transcoders(engine, CONFIG, documents, tmp_path))


def test_another_configuration_text_or_model_trains_again(
    engine: EagerEngine, documents: list[str], tmp_path: Path
) -> None:
    quick = replace(CONFIG, layers=(0,), epochs=1)
    train_transcoders(engine, quick, documents, tmp_path)
    assert train_transcoders(engine, quick, documents, tmp_path)[0].kept
    assert not train_transcoders(engine, replace(quick, lr=1e-3), documents, tmp_path)[0].kept
    assert not train_transcoders(engine, replace(quick, lr=1e-3), documents[:60], tmp_path)[0].kept


def test_an_interrupted_run_leaves_finished_layers_and_no_half(
    engine: EagerEngine, documents: list[str], tmp_path: Path
) -> None:
    def stop(progress: Progress) -> None:
        if progress.stage == "layer 1":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_transcoders(engine, replace(CONFIG, epochs=1), documents, tmp_path, stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.safetensors", "mlp_in.0", "train.jsonl"]
    reports = train_transcoders(engine, replace(CONFIG, epochs=1), documents, tmp_path)
    assert [report.kept for report in reports] == [True, False, False]


def test_reports_come_as_layers_finish(engine: EagerEngine, documents: list[str], tmp_path: Path) -> None:
    told = []
    trainer = Trainer(replace(CONFIG, epochs=1), engine, documents, tmp_path, on_report=told.append)
    assert trainer.fit() == told


def test_what_cannot_be_done_is_refused_first(engine: EagerEngine, documents: list[str], tmp_path: Path) -> None:
    def refused(config: TranscoderTrainingConfig, corpus: list[str] | Path, folder: Path) -> str:
        with pytest.raises((UserError, PointRefused)) as caught:
            train_transcoders(engine, config, corpus, folder)
        return str(caught.value)

    assert "layers 0 to 2" in refused(replace(CONFIG, layers=(3,)), documents, tmp_path)
    assert "router_logits.0" in refused(replace(CONFIG, input_point="router_logits"), documents, tmp_path)
    assert "does not exist" in refused(CONFIG, tmp_path / "none.txt", tmp_path)
    (tmp_path / "file").write_text("")
    assert "Cannot write" in refused(CONFIG, documents, tmp_path / "file" / "below")
    with pytest.raises(UserError, match="epochs must be at least 1"):
        replace(CONFIG, epochs=0)
    assert "exceeds the 48 latents" in refused(replace(CONFIG, k=64), documents, tmp_path)
    assert not list(tmp_path.glob("mlp_in*"))
    assert not np.any([path.name == "activations" for path in tmp_path.iterdir()])
