"""A SplitLlama of real weights, its adapter trained, goes all the way: proofs, engines, trainers, tracer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from examples.split_smollm2 import TEXT, Recipe, loss, made
from interp import HookedSplitLlama, Request, load_model
from interp.analysis import direct_logit_attribution, logit_lens
from interp.circuits.graph import AttributionGraph
from interp.dictionaries import load_dictionaries
from interp.edits import Add
from interp.engines import doctor
from interp.engines.eager import EagerEngine
from interp.models import SplitLlama, SplitLlamaConfig
from interp.scripts import trace, train_transcoders
from interp.training.corpus import read_documents
from interp.training.tokens import cut_rows
from tests.real.conftest import SMOLLM, loaded

RECIPE = Recipe()
PROMPT = "The capital of France is"
N_LAYERS = RECIPE.n_first + RECIPE.n_last


@pytest.fixture(scope="module")
def folder() -> Path:
    return made()


@pytest.fixture(scope="module")
def engine(folder: Path) -> EagerEngine:
    return load_model(folder, device="cpu", dtype="float32")


def held_out(engine: EagerEngine, n: int) -> list[list[int]]:
    rows = cut_rows(
        read_documents(TEXT),
        engine.tokenizer,
        context_len=RECIPE.context_len,
        train_tokens=RECIPE.train_tokens,
        held_out_tokens=RECIPE.held_out_tokens,
        seed=RECIPE.seed,
    )
    return [row.tokens for row in rows.held_out][:n]


def test_both_halves_of_one_checkpoint_around_an_identity_are_that_checkpoint(tmp_path: Path) -> None:
    whole = loaded(SMOLLM)
    stated = {"path8b": SMOLLM, "path70b": SMOLLM, "num_layers_8": 11, "num_layers_70": 19, "mlp": False}
    stated["vocab_size"] = whole.model.d_vocab
    (tmp_path / "config.json").write_text(json.dumps(stated))
    save_file({"weight": torch.eye(whole.model.d_model)}, tmp_path / "adapter.safetensors")
    split = SplitLlama(SplitLlamaConfig(tmp_path), dtype=torch.float32).requires_grad_(False)
    ids = whole.to_tokens("In the middle of the nineteenth century, the railway came to the valley")
    with torch.no_grad():
        assert torch.equal(split(ids).logits, whole.module(ids).logits)


def test_the_trained_adapter_is_clearly_better_than_the_unigram_entropy(folder: Path, engine: EagerEngine) -> None:
    stated = json.loads((folder / "losses.json").read_text())
    assert stated["narrow"] < stated["trained"] < stated["start"] < stated["unigram"]
    assert stated["trained"] < stated["unigram"] - 1.0
    measured = loss(engine.module, held_out(engine, 8))
    assert abs(measured - stated["trained"]) < 1.0 and measured < stated["unigram"] - 0.5


def test_every_proof_holds_in_both_groups_and_through_the_adapter(engine: EagerEngine) -> None:
    claims = doctor.prove(engine)
    assert not [claim for claim in claims if not claim.holds] and not engine.anatomy.refused
    assert {claim.layer for claim in claims} == {None, *range(N_LAYERS)}
    assert sum("adapter" in claim.equation for claim in claims) >= 4
    assert [(group.name, group.d_model) for group in engine.model.groups] == [
        ("layers_first", 576),
        ("layers_last", RECIPE.d_wide),
    ]


def test_nnsight_and_eager_are_one_bit_for_bit_and_hooks_are_named_by_group(folder: Path, engine: EagerEngine) -> None:
    hooked = HookedSplitLlama(SplitLlama(SplitLlamaConfig(folder), dtype=torch.float32))
    assert hooked.name == "nnsight" and hooked.model.fingerprint == engine.model.fingerprint
    names = [hook.name for hook in hooked.topology.hooks]
    assert len(names) == 4 * N_LAYERS + 3
    ids = hooked.to_tokens(PROMPT)
    through_nnsight = hooked.run_with_cache(ids, names)
    (result,) = engine.run([Request(ids, [hooked.address(name) for name in names])])
    for name in names:
        assert torch.equal(through_nnsight[name][0], result.capture[hooked.address(name)]), name


def test_cached_generation_equals_the_uncached_and_an_edit_before_the_adapter_moves_it(engine: EagerEngine) -> None:
    prompt = engine.to_tokens(PROMPT)
    (result,) = engine.run([Request(prompt, ["adapter_out", f"resid_post.{N_LAYERS - 1}"], max_new_tokens=6)])
    tokens = prompt[0].tolist()
    with torch.no_grad():
        for _ in range(6):
            tokens.append(int(engine.module(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    assert result.tokens == tokens
    (again,) = engine.run([Request(tokens[:-1], list(result.capture))])
    for address in result.capture:
        assert torch.allclose(result.capture[address], again.capture[address], atol=1e-3, rtol=1e-4)
    vector = torch.randn(576, generator=torch.Generator().manual_seed(0))
    (edited,) = engine.run([Request(prompt, ["adapter_out"], [Add("resid_post.9", vector)])])
    (plain,) = engine.run([Request(prompt, ["adapter_out"])])
    moved = edited.capture["adapter_out"] - plain.capture["adapter_out"]
    assert torch.allclose(moved, engine.module.adapter(vector).expand_as(moved), atol=2e-3)  # type: ignore[operator]


def test_the_lens_and_direct_attribution_go_through_the_adapter(engine: EagerEngine) -> None:
    lens = logit_lens(engine, PROMPT, top_k=1, return_logits=True, layers=[9, N_LAYERS - 1])
    module: Any = engine.module
    (result,) = engine.run([Request(engine.to_tokens(PROMPT), ["resid_post.9", "logits"])])
    with torch.no_grad():
        by_hand = module.lm_head(module.norm(module.adapter(result.capture["resid_post.9"])))
    assert lens.logits is not None and torch.equal(lens.logits[0], by_hand)
    assert torch.allclose(lens.logits[1], result.capture["logits"], atol=1e-4)
    found = direct_logit_attribution(engine, PROMPT, " Paris", heads=True)
    assert abs(found.error) < 1e-4 * sum(abs(row.value) for row in found.rows)
    assert {row.layer for row in found.rows if row.layer is not None} == set(range(N_LAYERS))


def test_trainers_and_tracer_take_the_directory(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "transcoders"
    train_transcoders.run(
        train_transcoders.TrainTranscoders(
            model_path=str(folder),
            dataset_name=str(TEXT),
            train_all=True,
            checkpoint_dir=out,
            expansion_factor=1,
            k=16,
            total_tokens=2000,
            batch_size=256,
            device="cpu",
            dtype="float32",
        )
    )
    widths = {layer: found.config.d_in for layer, found in load_dictionaries(out).items()}
    assert sorted(widths.values()) == [576] * RECIPE.n_first + [RECIPE.d_wide] * RECIPE.n_last
    graphs = tmp_path / "graphs"
    trace.run(trace.Trace(model_path=str(folder), transcoder_dir=out, prompt=PROMPT, output_dir=graphs, max_nodes=300))
    graph = AttributionGraph.load(graphs / "graph.json")
    assert graph.certificate is not None
    assert graph.certificate.max_relative_error < 1e-4 and graph.certificate.rows > 300
    assert "Certificate" in capsys.readouterr().out
