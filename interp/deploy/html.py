"""How does a graph become one HTML file that anybody can open, with no network and no server?

The page under `viewer/` (plain HTML, CSS and JavaScript) is filled with the graph JSON, the same document that
`AttributionGraph.save` writes, and with a card for each feature: what it promotes and where it is most active.
"""

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from interp.circuits.graph import AttributionGraph, NodeKind
from interp.circuits.graph_json import graph_document
from interp.circuits.paths import CircuitPath
from interp.errors import InterpError
from interp.files import atomic_path

SCRIPTS = ("graph.js", "drawing.js", "panel.js", "main.js")
"""The page's script, in order; they share one scope."""


@dataclass(frozen=True)
class FeatureCard:
    """What a reader needs to guess a feature's meaning."""

    top_logits: Sequence[tuple[str, float]] = ()
    """Output tokens that the feature promotes most, with the change of their logit per unit of activation."""
    bottom_logits: Sequence[tuple[str, float]] = ()
    """Output tokens that it suppresses most."""
    contexts: Sequence[tuple[Sequence[str], Sequence[float]]] = field(default_factory=list)
    """Windows of text where it is most active: tokens, and its activation on each."""
    fraction_active: float | None = None
    """Share of tokens of the harvested text on which it fires, 0…1."""

    def __post_init__(self) -> None:
        for tokens, activations in self.contexts:
            if len(tokens) != len(activations):
                raise InterpError(f"A context has {len(tokens)} tokens but {len(activations)} activations.")


def write_html(
    graph: AttributionGraph,
    path: str | Path,
    features: Mapping[tuple[int, int], FeatureCard] | None = None,
    paths: Sequence[CircuitPath] | None = None,
    title: str | None = None,
) -> None:
    """Write `graph` as one self-contained HTML file, whole or not at all.

    `features` holds a card per (layer, latent); cards of features that the graph does not have are left out. `paths`
    are listed and drawn before a node is chosen, by default `strongest(graph)`. The address `#node=<id>` opens a node.
    """
    page = page_html(graph, features or {}, strongest(graph) if paths is None else paths, title)
    with atomic_path(path) as beside:
        beside.write_text(page, encoding="utf-8")


def strongest(graph: AttributionGraph) -> list[CircuitPath]:
    """Ten paths to the top logit and ten that pass a feature, each once."""
    both = (*graph.paths(10), *graph.paths(10, through_features=True))
    return list({path.node_ids: path for path in both}.values())


def page_html(
    graph: AttributionGraph,
    features: Mapping[tuple[int, int], FeatureCard],
    paths: Sequence[CircuitPath],
    title: str | None = None,
) -> str:
    """The page as text."""
    nodes = graph.nodes
    is_feature = nodes.is_kind(NodeKind.FEATURE)
    present = sorted(set(zip(nodes.layer[is_feature].tolist(), nodes.index[is_feature].tolist(), strict=True)))
    view = {
        "features": {
            f"{layer}_{index}": _card(features[layer, index]) for layer, index in present if (layer, index) in features
        },
        "paths": [{"node_ids": path.node_ids, "share": path.share, "sign": path.sign} for path in paths],
    }
    fill = {
        "title": html.escape(title or f"{graph.edges.prompt.strip()} · {graph.edges.scan}"),
        "css": _viewer_file("viewer.css"),
        "js": "\n".join(_viewer_file(name) for name in SCRIPTS),
        "graph": json_for_script(graph_document(graph)),
        "view": json_for_script(view),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda place: fill[place[1]], _viewer_file("index.html"))


def json_for_script(value: Any) -> str:
    """JSON that may stand inside a `<script>` element: no text in it can end the element or open a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _card(card: FeatureCard) -> dict[str, Any]:
    return {
        "top_logits": [[token, _rounded(value)] for token, value in card.top_logits],
        "bottom_logits": [[token, _rounded(value)] for token, value in card.bottom_logits],
        "contexts": [[list(tokens), [_rounded(a) for a in activations]] for tokens, activations in card.contexts],
        "fraction_active": card.fraction_active,
    }


def _rounded(value: float) -> float:
    """Four significant digits: what a reader sees, at half the size."""
    return float(f"{value:.4g}")


def _viewer_file(name: str) -> str:
    return resources.files("interp.deploy").joinpath("viewer").joinpath(name).read_text(encoding="utf-8")
