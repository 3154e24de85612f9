"""Cards tell what a feature promotes, as brute force finds it, and where it fired in the harvested text."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from interp.circuits.attribution import AttributionComputer, AttributionConfig
from interp.circuits.graph import AttributionGraph, NodeKind
from interp.circuits.replacement_model import ReplacementModel
from interp.deploy import cards as cards_module
from interp.deploy.cards import TOP, feature_cards
from interp.engines.load import wrap
from interp.models.float64 import true_float64
from interp.training.contexts import CONTEXTS_FILE, Contexts, Corpus
from tests.circuits.frozen_oracle import LAYOUTS
from tests.circuits.tiny_graphs import TOKENS, standard, transcoders
from tests.families.tiny import build

POST_NORM = {"gemma2": "post_feedforward_layernorm", "olmo2": "post_feedforward_layernorm"}
GAIN_OFFSET = {"gemma2": 1.0}
MULTIPLIER = {"granite": 0.22}
EPSILON = {"gpt2": 1e-5, "cohere": 1e-5, "olmo2": 1e-5}


def through(norm, x: torch.Tensor, written: torch.Tensor, family: str) -> torch.Tensor:
    """`written` [n, d] behind `norm`, its denominator the mean of those at `x` [pos, d], BOS left out."""
    centred = LAYOUTS[family].centred
    spread = x - x.mean(-1, keepdim=True) if centred else x
    scale = (spread.square().mean(-1) + EPSILON.get(family, 1e-6)).sqrt()[1:].mean()
    written = written - written.mean(-1, keepdim=True) if centred else written
    return written / scale * (norm.weight + GAIN_OFFSET.get(family, 0.0))


def through_adapter(adapter, seen, written: torch.Tensor) -> torch.Tensor:
    """`written` behind the adapter's matrices, a ReLU between them the mean of its mask, BOS left out."""
    if isinstance(adapter, torch.nn.Linear):
        return adapter(written)
    first, relu, last = adapter
    return (written @ first.weight.T * (seen[relu] > 0).double()[1:].mean(0)) @ last.weight.T


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "gemma2", "olmo2", "granite", "cohere", "split_llama", "split_llama_mlp"]
)
def test_promoted_tokens_are_those_of_brute_force(family, tmp_path, monkeypatch):
    monkeypatch.setattr(cards_module, "CHUNK", 5)
    tried = standard(family)
    layout, module = LAYOUTS[family], tried.module
    final, head = module.get_submodule(layout.final_norm), module.get_submodule(layout.head)
    weight: torch.Tensor = head.weight  # type: ignore[assignment]
    blocks = [block for path in layout.layers for block in module.get_submodule(path)]  # type: ignore[union-attr]
    seen: dict[object, torch.Tensor] = {}
    adapter = [module.get_submodule(f"{layout.adapter}.1")] if family == "split_llama_mlp" else []
    norms = [final, *adapter, *(getattr(block, POST_NORM[family]) for block in blocks if family in POST_NORM)]
    handles = [norm.register_forward_hook(lambda m, args, y: seen.__setitem__(m, args[0][0])) for norm in norms]
    with true_float64(), torch.no_grad():
        module(input_ids=torch.tensor([TOKENS]))
    for handle in handles:
        handle.remove()

    cards = feature_cards(tried.rm, tried.state, AttributionGraph.from_edges(tried.edges), tmp_path)
    nodes = tried.edges.nodes
    mine = nodes.is_kind(NodeKind.FEATURE)
    assert set(cards) == set(zip(nodes.layer[mine].tolist(), nodes.index[mine].tolist(), strict=True))
    for (layer, latent), card in cards.items():
        written = tried.transcoders[layer].W_dec[latent][None]
        if family in POST_NORM:
            post = getattr(blocks[layer], POST_NORM[family])
            written = through(post, seen[post], written, family)
        if layout.adapter and layer < len(module.get_submodule(layout.layers[0])):  # type: ignore[arg-type]
            written = through_adapter(module.get_submodule(layout.adapter), seen, written)
        written = through(final, seen[final], written * MULTIPLIER.get(family, 1.0), family)
        effect = (written @ weight.T * layout.logit_scale)[0].detach()
        effect = effect - effect.mean()
        order = effect.argsort(descending=True)
        assert len(card.top_logits) == len(card.bottom_logits) == TOP and not card.contexts
        for said, expected in ((card.top_logits, order[:TOP]), (card.bottom_logits, order.flip(0)[:TOP])):
            assert [text for text, _ in said] == [str(int(token)) for token in expected]
            np.testing.assert_allclose([value for _, value in said], effect[expected].numpy(), rtol=0, atol=1e-12)


def test_contexts_are_windows_of_the_harvested_text_with_the_peak_marked(tmp_path):
    module = build("llama", torch.float64)
    engine = wrap(module, SimpleNamespace(decode=lambda ids, **_: "".join(f"<{i}>" for i in ids)), prove=False)
    rm = ReplacementModel(engine, transcoders())
    state = rm.build(TOKENS)
    graph = AttributionGraph.from_edges(
        AttributionComputer(rm, AttributionConfig(max_logits=1)).compute_full_graph(state, TOKENS)
    )
    Corpus(np.arange(100, 140, dtype=np.int32), np.array([0, 25, 40])).save(tmp_path)
    rows, positions = np.full((70, 2), -1, np.int32), np.full((70, 2), -1, np.int32)
    values = np.zeros((70, 2), np.float32)
    fires, silent = state.layers[1].latents[:2].tolist()
    rows[fires], positions[fires], values[fires] = [1, 0], [2, 20], [4.5, 2.25]
    folder = tmp_path / "mlp_in.1" / "final"
    folder.mkdir(parents=True)
    Contexts(rows, positions, values).save(folder / CONTEXTS_FILE)

    cards = feature_cards(rm, state, graph, tmp_path)
    first, second = cards[1, fires].contexts
    assert first[0] == [f"<{i}>" for i in range(125, 134)] and list(first[1]) == [0, 0, 4.5, 0, 0, 0, 0, 0, 0]
    assert second[0] == [f"<{i}>" for i in range(108, 125)]
    assert [i for i, value in enumerate(second[1]) if value] == [12] and second[1][12] == 2.25
    assert not cards[1, silent].contexts
    assert all(not card.contexts for (layer, _), card in cards.items() if layer != 1)
    assert all(text.startswith("<") for text, _ in cards[1, fires].top_logits)
