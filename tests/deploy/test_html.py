"""The HTML file: complete in itself, safe against its own contents, and carrying the very graph."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from interp.circuits.graph import AttributionGraph, NodeKind
from interp.circuits.graph_json import graph_document, graph_from_document, validate_document
from interp.deploy.html import FeatureCard, json_for_script, strongest, write_html
from interp.errors import InterpError, UserError
from tests.circuits.synthetic import hand_edges, synthetic_edges

NASTY = '</script><script>alert(1)</script><!-- & " \u2028'
CARD = FeatureCard(
    top_logits=[(" Paris", 1.23456789), (NASTY, 0.5)],
    bottom_logits=[(" Rome", -0.25)],
    contexts=[([" the", " capital", NASTY], [0.0, 3.14159265, 0.0])],
    fraction_active=0.0125,
)


class Page(HTMLParser):
    """Which elements a browser would see, with their attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: tuple[str, dict[str, str | None]] = ("", {})
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self._open = (tag, dict(attrs))
        self.elements.append(self._open)

    def handle_data(self, data):
        self.texts.append((self._open[1].get("id") or self._open[0], data))

    def json(self, element_id):
        return json.loads("".join(text for owner, text in self.texts if owner == element_id))


def write_page(folder: Path, graph: AttributionGraph, **options) -> tuple[str, Page]:
    write_html(graph, folder / "graph.html", **options)
    text = (folder / "graph.html").read_text(encoding="utf-8")
    return text, Page(text)


def graph_with_cards() -> tuple[AttributionGraph, dict[tuple[int, int], FeatureCard]]:
    graph = AttributionGraph.from_edges(synthetic_edges(0, n_pos=12)).prune(0.8)
    nodes = graph.nodes
    first = int(np.flatnonzero(nodes.is_kind(NodeKind.FEATURE))[0])
    return graph, {(int(nodes.layer[first]), int(nodes.index[first])): CARD, (99, 1): CARD}


def test_the_page_loads_nothing_from_anywhere(tmp_path):
    graph, cards = graph_with_cards()
    text, page = write_page(tmp_path, graph, features=cards)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text.replace("// ", ""), re.IGNORECASE)
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "img", "object", "embed", "base")
        assert "src" not in attributes and "href" not in attributes
    policy = [attributes.get("content") for _, attributes in page.elements if attributes.get("http-equiv")]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"]
    assert "{{" not in text.split("<script")[0]


def test_the_page_carries_the_graph_json_that_save_writes(tmp_path):
    graph, cards = graph_with_cards()
    _, page = write_page(tmp_path, graph, features=cards)
    document = page.json("graph-data")
    assert document == graph_document(graph)
    validate_document(document)
    again = graph_from_document(document)
    assert again.node_ids == graph.node_ids and again.certificate == graph.certificate


def test_cards_of_features_in_the_graph_and_the_strongest_paths_are_on_the_page(tmp_path):
    graph, cards = graph_with_cards()
    _, page = write_page(tmp_path, graph, features=cards)
    view = page.json("view-data")
    (layer, index), _ = list(cards)
    assert view["features"] == {
        f"{layer}_{index}": {
            "top_logits": [[" Paris", 1.235], [NASTY, 0.5]],
            "bottom_logits": [[" Rome", -0.25]],
            "contexts": [[[" the", " capital", NASTY], [0.0, 3.142, 0.0]]],
            "fraction_active": 0.0125,
        }
    }
    assert [path["node_ids"] for path in view["paths"]] == [list(path.node_ids) for path in strongest(graph)]
    _, page = write_page(tmp_path, graph, paths=graph.paths(2))
    assert len(page.json("view-data")["paths"]) == 2


def test_no_text_of_the_graph_can_become_markup(tmp_path):
    graph, cards = graph_with_cards()
    feature = graph.node_ids[int(np.flatnonzero(graph.nodes.is_kind(NodeKind.FEATURE))[0])]
    text, page = write_page(tmp_path, graph.with_labels({feature: NASTY}), features=cards, title=NASTY)
    assert [tag for tag, _ in page.elements].count("script") == 3
    assert "alert(1)" not in re.sub(
        r"<script type=\"application/json\".*?</script>|<title>.*?</title>", "", text, flags=re.S
    )
    assert "".join(t for owner, t in page.texts if owner == "title").strip() == NASTY.strip()
    labels = [node["clerp"] for node in page.json("graph-data")["nodes"]]
    assert NASTY in labels
    assert json.loads(json_for_script(NASTY)) == NASTY and not set("<>&") & set(json_for_script(NASTY))


def test_the_script_never_writes_markup_and_finds_every_element_it_names(tmp_path):
    text, page = write_page(tmp_path, AttributionGraph.from_edges(hand_edges()))
    script = text[text.rindex("<script>") :]
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|\bfetch\b|XMLHttpRequest", script
    )
    ids = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    named = set(re.findall(r'element\("([\w-]+)"\)|getElementById\("([\w-]+)"\)', script))
    assert {first or second for first, second in named} <= ids
    classes = {"positive", "negative", "focus", "linked", "hidden", "halo", "selected"}
    assert all(re.search(rf"\.{name}\b", text.split("</style>")[0]) for name in classes)


def test_light_and_dark_define_the_same_colours():
    style = (Path(__file__).parents[2] / "interp/deploy/viewer/viewer.css").read_text()
    light, dark = (set(re.findall(r"(--[\w-]+):", block)) for block in re.findall(r":root \{(.*?)\}", style, re.S))
    assert light - dark == {"--sans", "--mono"} and not dark - light
    assert set(re.findall(r"var\((--[\w-]+)\)", style)) <= light


def test_the_title_is_the_prompt_and_the_model_unless_given(tmp_path):
    graph = AttributionGraph.from_edges(hand_edges())
    text, _ = write_page(tmp_path, graph)
    assert "<title>Hello world · tiny</title>" in text
    text, _ = write_page(tmp_path, graph, title="A & B")
    assert "<title>A &amp; B</title>" in text


def test_bad_cards_and_bad_folders_are_refused_and_nothing_is_left(tmp_path):
    with pytest.raises(InterpError, match="2 tokens but 1 activations"):
        FeatureCard(contexts=[([" a", " b"], [1.0])])
    graph = AttributionGraph.from_edges(hand_edges())
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="Cannot write"):
        write_html(graph, tmp_path / "file" / "graph.html")
    with pytest.raises(ValueError):
        write_html(graph, tmp_path / "graph.html", features={(0, 7): FeatureCard(top_logits=[("x", float("nan"))])})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
