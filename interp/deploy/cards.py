"""What a reader needs to guess what a feature means: the tokens that it promotes, and where it fires most."""

from pathlib import Path

import torch
from torch import Tensor

from interp.circuits.graph import AttributionGraph, NodeKind
from interp.circuits.replacement_model import ReplacementModel, ReplacementState
from interp.deploy.html import FeatureCard
from interp.dictionaries.storage import FINAL
from interp.training.contexts import CONTEXTS_FILE, CORPUS_FILE, Contexts, Corpus

TOP = 8
"""Tokens shown on each side of a card."""
CHUNK = 32
"""Features whose logits are held at once: [32, d_vocab]."""


def feature_cards(
    rm: ReplacementModel, state: ReplacementState, graph: AttributionGraph, transcoder_dir: str | Path
) -> dict[tuple[int, int], FeatureCard]:
    """A card per (layer, latent) of the graph's features.

    Contexts come from what the trainer wrote beside the dictionaries; dictionaries without it get none.
    """
    nodes = graph.nodes
    chosen = nodes.is_kind(NodeKind.FEATURE)
    features = sorted(set(zip(nodes.layer[chosen].tolist(), nodes.index[chosen].tolist(), strict=True)))
    corpus = Corpus.load(transcoder_dir) if (Path(transcoder_dir) / CORPUS_FILE).is_file() else None
    cards: dict[tuple[int, int], FeatureCard] = {}
    for layer in sorted({layer for layer, _ in features}):
        latents = [latent for at, latent in features if at == layer]
        promoted = _promoted(rm, state, layer, latents)
        folder = Path(transcoder_dir) / f"mlp_in.{layer}" / FINAL
        contexts = Contexts.load(folder) if corpus is not None and (folder / CONTEXTS_FILE).is_file() else None
        for latent, (top, bottom) in zip(latents, promoted, strict=True):
            windows = [] if corpus is None or contexts is None else _windows(rm, corpus, contexts, latent)
            cards[layer, latent] = FeatureCard(top_logits=top, bottom_logits=bottom, contexts=windows)
    return cards


Promoted = list[tuple[str, float]]


def _promoted(
    rm: ReplacementModel, state: ReplacementState, layer: int, latents: list[int]
) -> list[tuple[Promoted, Promoted]]:
    """Tokens whose logit each latent raises and lowers most, per unit of activation, on its direct path to the head.

    The norms' denominators, and what an adapter's activations multiply by, are those of this prompt, averaged over the
    positions that the dictionaries know; the order does not depend on the denominators.
    """
    head = rm.head
    sublayer, norm, frozen = rm.blocks[layer].mlp, rm.final_norm, state.layers[layer]
    written = rm.transcoders[layer].W_dec[latents] * sublayer.multiplier
    if sublayer.post is not None:
        written = sublayer.post.forward(written, _mean(state, frozen.mlp_post_scale))
    for behind in sorted(behind for behind in state.bridges if behind >= layer):
        written = state.bridges[behind].forward(written, _known(state))
    if norm is not None:
        written = norm.forward(written, _mean(state, state.final_scale))
    decode = rm.engine.tokenizer.decode if rm.engine.tokenizer is not None else lambda ids: str(ids[0])
    found = []
    for start in range(0, len(latents), CHUNK):
        logits = written[start : start + CHUNK] @ head.linear.weight.T * head.scale
        logits -= logits.mean(-1, keepdim=True)
        top, bottom = logits.topk(TOP, dim=-1), logits.topk(TOP, dim=-1, largest=False)
        for row in range(len(logits)):
            sides = [
                [(decode([int(i)]), float(v)) for i, v in zip(side.indices[row], side.values[row], strict=True)]
                for side in (top, bottom)
            ]
            found.append((sides[0], sides[1]))
    return found


def _mean(state: ReplacementState, scale: Tensor | None) -> Tensor:
    """The mean denominator over the positions that the dictionaries know: at BOS it can be many times the others'."""
    return torch.ones(()) if scale is None else scale[_known(state)].mean()


def _known(state: ReplacementState) -> list[int]:
    """Positions that the dictionaries know; all of them where they know none."""
    every = range(len(state.tokens))
    return [p for p in every if p not in state.excluded_positions] or list(every)


def _windows(
    rm: ReplacementModel, corpus: Corpus, contexts: Contexts, latent: int
) -> list[tuple[list[str], list[float]]]:
    decode = rm.engine.tokenizer.decode
    return [
        ([decode([t]) for t in w.token_ids], [w.value if i == w.peak else 0.0 for i in range(len(w.token_ids))])
        for w in corpus.windows(contexts, latent)
    ]
