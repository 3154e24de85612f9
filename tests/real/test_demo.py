"""What a person has after `interp demo --quick`, and after the second run."""

import json
import re
from html.parser import HTMLParser

import pytest
import torch

from interp.circuits.graph import AttributionGraph
from interp.circuits.graph_json import schema
from interp.dictionaries import load_dictionaries
from interp.models.checkpoint import fingerprint, resolve
from tests.quick_demo import QuickDemo

pytestmark = pytest.mark.real

STEPS = ("Model", "Points", "Transcoders", "Circuit")
N_LAYERS, D_MODEL = 18, 640
LIMIT_QUICK, LIMIT_AGAIN = 90, 60
"""Seconds on two idle cores."""


def test_both_runs_end_well_and_say_nothing_on_stderr(quick_demo: QuickDemo) -> None:
    for run in (quick_demo.first, quick_demo.again):
        assert run.status == 0, run.err
        assert not run.err
    assert "graph.html in a browser" in quick_demo.first.out


def test_every_step_says_what_it_does_and_how_long_it_took(quick_demo: QuickDemo) -> None:
    for run in (quick_demo.first, quick_demo.again):
        titles = re.findall(r"^(\w+) ─+\n([A-Z].+\.)$", run.out, re.MULTILINE)
        assert tuple(title for title, _ in titles) == STEPS
        seconds = re.findall(r"^(\w+): ([\d.]+) s\.$", run.out, re.MULTILINE)
        assert tuple(step for step, _ in seconds) == STEPS
    assert re.search(r"\d+ claims checked, all hold; .* units of rounding", quick_demo.first.out)
    trap = re.findall(r"layer (0|9|17): cosine (\d\.\d+)", quick_demo.first.out)
    assert len(trap) == 3 and all(0.1 < float(cosine) < 0.6 for _, cosine in trap)


def test_it_is_quick(quick_demo: QuickDemo, capsys: pytest.CaptureFixture[str]) -> None:
    """The limits hold where nothing else runs; a crowded machine gets twice as long, or its crowd's share."""
    for run, limit in ((quick_demo.first, LIMIT_QUICK), (quick_demo.again, LIMIT_AGAIN)):
        with capsys.disabled():
            print(f"\ndemo --quick: {run.seconds:.0f} of {limit} s, load per core {run.crowd:.1f}")  # noqa: T201
        assert run.seconds <= limit * (1 if run.crowd <= 1 else max(2, run.crowd))


def test_the_second_run_uses_the_dictionaries_of_the_first(quick_demo: QuickDemo) -> None:
    dictionaries = {path: time for path, time in quick_demo.written.items() if quick_demo.transcoders in path.parents}
    assert sum(path.name == "weights.safetensors" for path in dictionaries) == N_LAYERS
    assert {path: path.stat().st_mtime_ns for path in dictionaries} == dictionaries
    assert table(quick_demo.again.out) == table(quick_demo.first.out)
    assert (quick_demo.folder / "graph.json").stat().st_mtime_ns > quick_demo.written[quick_demo.folder / "graph.json"]


def table(out: str) -> list[list[str]]:
    """Cells of the rows that begin with a layer's number."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    return [row for row in rows if len(row) == 6 and row[0].isdigit()]


def test_every_transcoder_beats_the_best_linear_map(quick_demo: QuickDemo) -> None:
    loaded = load_dictionaries(quick_demo.transcoders)
    assert sorted(loaded) == list(range(N_LAYERS))
    model = fingerprint(resolve("gemma-3-270m", lambda line: None).path)
    printed = {int(row[0]): row for row in table(quick_demo.first.out)}
    for layer, transcoder in loaded.items():
        config, metrics = transcoder.config, transcoder.config.metrics
        assert metrics["fvu"] < metrics["fvu_linear"] < metrics["fvu_mean"]
        assert printed[layer][1:4] == [f"{metrics[name]:.3f}" for name in ("fvu", "fvu_linear", "fvu_mean")]
        assert (config.input_points, config.output_points) == ([f"mlp_in.{layer}"], [f"mlp_out.{layer}"])
        assert config.skip and config.activation.name == "topk" and config.d_in == config.d_out == D_MODEL
        assert config.model is not None and config.model.fingerprint == model
        assert config.excluded_token_ids == [0, 2], "padding and BOS"
        assert transcoder(torch.zeros(2, D_MODEL)).shape == (2, D_MODEL)


def test_the_graph_fits_the_schema_that_is_shipped(quick_demo: QuickDemo) -> None:
    from jsonschema import Draft202012Validator

    document = json.loads((quick_demo.folder / "graph.json").read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema())
    assert [error.message for error in Draft202012Validator(schema()).iter_errors(document)] == []
    assert document["metadata"]["prompt"].removeprefix("<bos>") == "Paris is the capital of"
    kinds = {node["feature_type"] for node in document["nodes"]}
    assert kinds >= {"mlp reconstruction error", "embedding", "bias", "logit"}


def test_the_certificate_holds_and_is_stored(quick_demo: QuickDemo) -> None:
    graph = AttributionGraph.load(quick_demo.folder / "graph.json")
    certificate = graph.certificate
    assert certificate is not None and certificate.max_relative_error <= 1e-4 and certificate.rows > 100
    assert f"over {certificate.rows} rows" in quick_demo.again.out
    assert f"at most {certificate.max_relative_error:.2g} of their size" in quick_demo.again.out
    assert graph.edges.excluded_positions == [0], "BOS"


def test_nothing_fires_at_the_position_that_was_not_trained_on(quick_demo: QuickDemo) -> None:
    document = json.loads((quick_demo.folder / "graph.json").read_text(encoding="utf-8"))
    at_bos = {node["feature_type"] for node in document["nodes"] if node["ctx_idx"] == 0}
    assert "cross layer transcoder" not in at_bos and "mlp reconstruction error" in at_bos


def test_scores_are_printed_with_and_without_bos_and_ten_paths(quick_demo: QuickDemo) -> None:
    for run in (quick_demo.first, quick_demo.again):
        scores = re.findall(r"^Replacement score ([\d.]+), completeness ([\d.]+) \((.+)\)\.$", run.out, re.MULTILINE)
        assert [where for _, _, where in scores] == [
            "all positions",
            "without the positions that the dictionaries were not trained on",
        ]
        assert all(0 < float(score) < 1 for pair in scores for score in pair[:2])
        paths = re.findall(r"^  \S.* → logit \".+\" \(share ([\d.]+) %, sign [+−]\)$", run.out, re.MULTILINE)
        shares = [float(share) for share in paths]
        strongest, through_features = shares[:10], shares[10:]
        assert len(through_features) == 10 and strongest[0] >= through_features[0]
        assert all(ten == sorted(ten, reverse=True) for ten in (strongest, through_features))
        assert run.out.count(" → L") >= 10


class Page(HTMLParser):
    """Every element with its attributes, and the text of each element that has an id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self._id = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._id = dict(attrs).get("id") or ""

    def handle_data(self, data: str) -> None:
        self.text[self._id] = self.text.get(self._id, "") + data


def test_the_page_is_complete_in_itself(quick_demo: QuickDemo) -> None:
    text = (quick_demo.folder / "graph.html").read_text(encoding="utf-8")
    page = Page(text)
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "img", "object", "embed", "base")
        for name, value in attributes.items():
            assert name not in ("src", "srcset", "href", "action", "data"), f"<{tag} {name}={value}>"
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", text)
    (policy,) = [attributes["content"] for _, attributes in page.elements if attributes.get("http-equiv")]
    assert policy and policy.startswith("default-src 'none'")
    shown = json.loads(page.text["graph-data"])
    assert shown["nodes"] == json.loads((quick_demo.folder / "graph.json").read_text(encoding="utf-8"))["nodes"]


def test_the_page_explains_features_with_logits_and_contexts(quick_demo: QuickDemo) -> None:
    page = Page((quick_demo.folder / "graph.html").read_text(encoding="utf-8"))
    data = [json.loads(text) for text in page.text.values() if text.lstrip().startswith('{"features"')]
    assert len(data) == 1
    nodes = json.loads(page.text["graph-data"])["nodes"]
    features = {(node["layer"], node["feature"]) for node in nodes if node["feature_type"] == "cross layer transcoder"}
    cards = data[0]["features"]
    assert features and len(cards) == len(features)
    for card in cards.values():
        assert len(card["top_logits"]) >= 5
    assert sum(bool(card["contexts"]) for card in cards.values()) > 0.9 * len(cards)


def test_only_what_is_promised_is_left(quick_demo: QuickDemo) -> None:
    assert sorted(path.name for path in quick_demo.folder.iterdir()) == [
        "graph.html",
        "graph.json",
        "transcoders-quick",
    ]
    hooks = [f"mlp_in.{layer}" for layer in range(N_LAYERS)]
    assert {path.name for path in quick_demo.transcoders.iterdir()} == {"corpus.safetensors", "train.jsonl", *hooks}
    assert [path.name for path in quick_demo.folder.parent.iterdir()] == ["demo"]
