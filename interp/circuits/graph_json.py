"""How is a graph written to and read from the JSON of Neuronpedia and circuit-tracer's frontend?

`graph.schema.json` beside this file states the format as written, node kind by node kind. What the format has no
place for (certificate, scores without excluded positions, token ids) lies under `metadata.interp`, which other tools
pass over. Files of other tools are read too: their error nodes are called `0_{layer}_{position}`, ours
`{layer}_-1_{position}`, because theirs collide with the features of layer 0.
"""

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from interp.circuits.certificate import Certificate
from interp.circuits.graph import AttributionGraph, Edges, NodeKind, Nodes, file_name_part
from interp.circuits.influence import Scores
from interp.errors import InterpError, UserError
from interp.files import atomic_path

FORMAT_VERSION = 1
FEATURE_TYPES = {
    NodeKind.FEATURE: "cross layer transcoder",
    NodeKind.ERROR: "mlp reconstruction error",
    NodeKind.TOKEN: "embedding",
    NodeKind.POSITION: "position",
    NodeKind.BIAS: "bias",
    NodeKind.LOGIT: "logit",
}
KINDS = {feature_type: kind for kind, feature_type in FEATURE_TYPES.items()}
Q_PARAMS = {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""}
LOGIT_CLERP = re.compile(r'^Output "(.*)" \(p=[^)]*\)$', re.DOTALL)


@cache
def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of the documents that `graph_document` makes."""
    return json.loads(resources.files("interp.circuits").joinpath("graph.schema.json").read_text(encoding="utf-8"))


def validate_document(document: dict[str, Any]) -> None:
    """Check a document against `schema()`. Raises `InterpError` with the first place that does not fit."""
    from jsonschema import Draft202012Validator

    error = next(Draft202012Validator(schema()).iter_errors(document), None)
    if error is not None:
        raise InterpError(f"The graph JSON does not fit its schema at {error.json_path}: {error.message}")


def cantor_pair(layer: int, latent: int) -> int:
    """The one number that the frontend uses for a feature: (l + f)(l + f + 1)/2 + f."""
    return (layer + latent) * (layer + latent + 1) // 2 + latent


def write_graph(graph: AttributionGraph, path: str | Path) -> None:
    """Write `graph` as JSON with one node or link per line. Warns where the public frontend cannot draw it."""
    layers = graph.nodes.layer[~graph.nodes.is_kind(NodeKind.LOGIT)]
    if layers.max(initial=-1) < 1:
        warnings.warn(
            "The graph has no node above layer 0 apart from its logits; Neuronpedia's frontend cannot draw such a "
            "graph, interp's own HTML view can.",
            stacklevel=3,
        )
    text = document_text(graph_document(graph))
    with atomic_path(path) as beside:
        beside.write_text(text, encoding="utf-8")


def document_text(document: dict[str, Any]) -> str:
    """The document as JSON text: one line per metadata entry, node and link."""

    def compact(value: Any) -> str:
        return json.dumps(value, allow_nan=False)

    def lines(items: list[str], brackets: str) -> str:
        return f"{brackets[0]}\n" + ",\n".join(items) + f"\n{brackets[1]}" if items else brackets

    metadata_lines = [f"{compact(key)}: {compact(value)}" for key, value in document["metadata"].items()]
    return (
        f'{{\n"metadata": {lines(metadata_lines, "{}")},\n"qParams": {compact(document["qParams"])},\n'
        f'"nodes": {lines([compact(node) for node in document["nodes"]], "[]")},\n'
        f'"links": {lines([compact(link) for link in document["links"]], "[]")}\n}}\n'
    )


def graph_document(graph: AttributionGraph) -> dict[str, Any]:
    """The JSON document of `graph`, as plain Python values. Raises `UserError` for metadata that is not JSON."""
    matrix, ids = graph.matrix, graph.node_ids
    target = np.repeat(np.arange(len(ids)), np.diff(matrix.indptr)).tolist()
    links = [
        {"source": ids[source], "target": ids[row], "weight": weight}
        for source, row, weight in zip(matrix.indices.tolist(), target, _shortest(matrix.data), strict=True)
    ]
    return {
        "metadata": _metadata(graph),
        "qParams": {**Q_PARAMS, **graph.q_params},
        "nodes": _node_entries(graph),
        "links": links,
    }


def _metadata(graph: AttributionGraph) -> dict[str, Any]:
    edges, scores = graph.edges, graph.scores
    generator = {"name": "interp", "version": _version()}
    own = {
        "slug": file_name_part(f"{edges.scan}-{edges.prompt}"),
        "scan": file_name_part(edges.scan),
        "transcoder_list": [],
        "prompt_tokens": edges.prompt_tokens,
        "prompt": edges.prompt,
        "schema_version": 1,
        "info": {"generator": generator},
        "generation_settings": edges.settings,
    }
    if graph.pruning is not None:
        own |= {name: share for name, share in graph.pruning.items() if name == "node_threshold"}
        own["pruning_settings"] = graph.pruning
    if scores is not None:
        own["replacement_score"] = _null_if_nan(scores.replacement)
        own["completeness_score"] = _null_if_nan(scores.completeness)
    merged = {**own, **graph.metadata}
    merged["info"] = {**own["info"], **graph.metadata.get("info", {})}
    for name in ("slug", "scan"):
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", str(merged[name])):
            raise UserError(f"A graph's {name} may contain letters, digits, '_', '.' and '-', not {merged[name]!r}.")
    merged["interp"] = {
        "format_version": FORMAT_VERSION,
        "model": edges.scan,
        "n_layers": edges.n_layers,
        "token_ids": [int(token) for token in edges.token_ids],
        "excluded_positions": [int(pos) for pos in edges.excluded_positions],
        "weight_dtype": str(edges.matrix.dtype),
        "certificate": None if graph.certificate is None else asdict(graph.certificate),
        "scores": None if scores is None else {key: _null_if_nan(value) for key, value in scores._asdict().items()},
    }
    try:
        json.dumps(merged, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"The graph's metadata and settings must be plain JSON values: {error}.") from None
    return merged


def _node_entries(graph: AttributionGraph) -> list[dict[str, Any]]:
    edges, nodes, ids = graph.edges, graph.nodes, graph.node_ids
    top, clerps, values = edges.top_logit, _clerps(graph), _shortest(nodes.value)
    entries = []
    for row in range(len(nodes)):
        kind = NodeKind(nodes.kind[row])
        layer, pos, index = int(nodes.layer[row]), int(nodes.pos[row]), int(nodes.index[row])
        feature, shown_layer, js_id = _frontend_names(kind, layer, pos, index, edges.n_layers)
        entry = {
            "node_id": ids[row],
            "feature": feature,
            "layer": shown_layer,
            "ctx_idx": pos,
            "feature_type": FEATURE_TYPES[kind],
            "jsNodeId": js_id,
            "clerp": clerps[row],
            "influence": _null_if_nan(float(graph.influence[row])),
            "activation": _null_if_nan(values[row]) if kind is NodeKind.FEATURE else None,
            "token_prob": values[row] if kind is NodeKind.LOGIT else 0.0,
            "is_target_logit": row == top,
            "run_idx": 0,
            "reverse_ctx_idx": 0,
        }
        if not np.isnan(edges.pre_activation[row]):
            entry["pre_activation"] = float(edges.pre_activation[row])
        entries.append(entry)
    return entries


def _frontend_names(kind: NodeKind, layer: int, pos: int, index: int, n_layers: int) -> tuple[int | None, str, str]:
    """The fields `feature`, `layer` and `jsNodeId` of a node."""
    match kind:
        case NodeKind.FEATURE:
            return cantor_pair(layer, index), str(layer), f"{layer}_{index}-0"
        case NodeKind.ERROR:
            return -1, str(layer), f"{layer}_{pos}-0"
        case NodeKind.TOKEN:
            return pos, "E", f"E_{index}-{pos}"
        case NodeKind.POSITION:
            return pos, "E", f"P-{pos}"
        case NodeKind.BIAS:
            return None, str(layer), f"{layer}_bias-{pos}"
        case NodeKind.LOGIT:
            return index, str(n_layers + 1), f"L_{index}-{pos}"


def _clerps(graph: AttributionGraph) -> list[str]:
    """The label of each node: a person's where there is one, else what its kind and place say."""
    edges, nodes = graph.edges, graph.nodes
    labels = []
    for row, node in enumerate(graph.node_ids):
        token = edges.prompt_tokens[nodes.pos[row]]
        match NodeKind(nodes.kind[row]):
            case NodeKind.FEATURE:
                label = ""
            case NodeKind.ERROR:
                label = f'Err: mlp "{token}"'
            case NodeKind.TOKEN:
                label = f'Emb: "{token}"'
            case NodeKind.POSITION:
                label = f"Pos: {nodes.pos[row]}"
            case NodeKind.BIAS:
                label = f"Bias: layer {nodes.layer[row]}"
            case NodeKind.LOGIT:
                index = int(nodes.index[row])
                label = f'Output "{edges.logit_strings.get(index, str(index))}" (p={nodes.value[row]:.3f})'
        labels.append(graph.labels.get(node, label))
    return labels


def read_graph(path: str | Path) -> AttributionGraph:
    """Read a graph JSON, ours or another tool's.

    A file of another tool has no certificate, and its node ids become ours. Raises `UserError`, naming file and
    place, for a file that is missing, not such a JSON, of a newer format, or ambiguous.
    """
    path = Path(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"Cannot read the graph {path}: {error.strerror or error}.") from None
    except ValueError as error:
        raise UserError(f"{path} is not a graph JSON: {error}.") from None
    if not isinstance(document, dict):
        raise UserError(f"{path} is not a graph JSON: it holds a {type(document).__name__}, not an object.")
    try:
        return graph_from_document(document)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        reason = f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{path} is not a graph JSON that can be read: {reason}.") from None
    except InterpError as error:
        raise UserError(f"{path} cannot be read as a graph: {error}") from None


def graph_from_document(document: dict[str, Any]) -> AttributionGraph:
    """The graph that a JSON document describes; `read_graph` turns what this raises into one sentence."""
    meta = dict(document["metadata"])
    own = meta.pop("interp", {})
    if own.get("format_version", FORMAT_VERSION) > FORMAT_VERSION:
        raise UserError(f"it has format version {own['format_version']}, newer than {FORMAT_VERSION}; update interp.")
    entries = document["nodes"]
    n_layers = own["n_layers"] if own else _layers_of(entries)
    nodes = _nodes_of(entries, n_layers)
    row_of = {entry["node_id"]: row for row, entry in enumerate(entries)}
    if len(row_of) < len(entries):
        twice = next(e["node_id"] for row, e in enumerate(entries) if row_of[e["node_id"]] != row)
        raise UserError(
            f"the id {twice} names two nodes, so its links cannot be told apart. (Error ids `0_layer_position` collide "
            "with the features of layer 0; write the graph with a tool that avoids them.)"
        )
    edges = Edges(
        nodes=nodes,
        matrix=_matrix_of(document["links"], row_of, np.dtype(own.get("weight_dtype", "float64"))),
        pre_activation=np.array([entry.get("pre_activation", np.nan) for entry in entries], dtype=np.float64),
        prompt=meta.pop("prompt"),
        prompt_tokens=meta.pop("prompt_tokens"),
        token_ids=own["token_ids"] if own else _token_ids_of(nodes, len(document["metadata"]["prompt_tokens"])),
        n_layers=n_layers,
        scan=own["model"] if own else meta["scan"],
        excluded_positions=own.get("excluded_positions", []),
        logit_strings=_logit_strings_of(entries, nodes),
        settings=meta.pop("generation_settings", {}),
    )
    scores = own.get("scores")
    for recomputed in ("replacement_score", "completeness_score") if scores else ():
        meta.pop(recomputed, None)
    node_threshold = meta.pop("node_threshold", None)
    pruning = meta.pop("pruning_settings", None if node_threshold is None else {"node_threshold": node_threshold})
    graph = AttributionGraph(
        edges=edges,
        influence=np.array([_nan_if_null(entry.get("influence")) for entry in entries]),
        certificate=Certificate(**own["certificate"]) if own.get("certificate") else None,
        scores=Scores(**{key: _nan_if_null(value) for key, value in scores.items()}) if scores else None,
        pruning=pruning,
        metadata=meta,
        q_params=document.get("qParams", {}),
    )
    written = zip(edges.node_ids, entries, _clerps(graph), strict=True)
    return replace(graph, labels={node: entry["clerp"] for node, entry, clerp in written if entry["clerp"] != clerp})


def _layers_of(entries: list[dict[str, Any]]) -> int:
    logit_layers = [int(entry["layer"]) for entry in entries if entry["feature_type"] == "logit"]
    if not logit_layers:
        raise UserError("it has no logit node, so there is nothing that it explains.")
    return max(logit_layers) - 1


def _nodes_of(entries: list[dict[str, Any]], n_layers: int) -> Nodes:
    ids: dict[NodeKind, Callable[[str, int], list[str]]] = {
        NodeKind.FEATURE: lambda layer, pos: [rf"{layer}_(\d+)_{pos}"],
        NodeKind.ERROR: lambda layer, pos: [rf"{layer}_-1_{pos}", rf"0_{layer}_{pos}"],
        NodeKind.TOKEN: lambda layer, pos: [rf"E_(\d+)_{pos}"],
        NodeKind.POSITION: lambda layer, pos: [rf"P_{pos}"],
        NodeKind.BIAS: lambda layer, pos: [rf"{layer}_bias_{pos}"],
        NodeKind.LOGIT: lambda layer, pos: [rf"{layer}_(\d+)_{pos}"],
    }
    columns = []
    for entry in entries:
        kind, name, layer, pos = KINDS.get(entry["feature_type"]), entry["node_id"], entry["layer"], entry["ctx_idx"]
        if kind is None:
            raise UserError(f"node {name} is of type {entry['feature_type']!r}; known are {', '.join(KINDS)}.")
        match = next(filter(None, (re.fullmatch(form, name) for form in ids[kind](str(layer), pos))), None)
        if match is None:
            raise UserError(f"the id {name} does not fit a node of type {entry['feature_type']!r} at layer {layer}.")
        value = {NodeKind.FEATURE: entry.get("activation"), NodeKind.LOGIT: entry.get("token_prob")}.get(kind, 1.0)
        depth = {"E": -1, str(n_layers + 1): n_layers}.get(str(layer))
        columns.append(
            (kind, int(layer) if depth is None else depth, pos, int((*match.groups(), -1)[0]), _nan_if_null(value))
        )
    return Nodes(*(np.array(column) for column in zip(*columns, strict=True)))


def _matrix_of(links: list[dict[str, Any]], row_of: dict[str, int], dtype: np.dtype) -> sp.csr_array:
    unknown = next((end for link in links for end in (link["source"], link["target"]) if end not in row_of), None)
    if unknown is not None:
        raise UserError(f"a link names the node {unknown}, which the graph does not have.")
    source = np.array([row_of[link["source"]] for link in links], dtype=np.int32)
    target = np.array([row_of[link["target"]] for link in links], dtype=np.int32)
    weight = np.array([link["weight"] for link in links], dtype=dtype)
    return sp.csr_array((weight, (target, source)), shape=(len(row_of), len(row_of)))


def _token_ids_of(nodes: Nodes, n_pos: int) -> list[int]:
    """Vocabulary ids as the embedding nodes give them; −1 at a position without one."""
    token_ids = np.full(n_pos, -1)
    is_token = nodes.is_kind(NodeKind.TOKEN)
    token_ids[nodes.pos[is_token]] = nodes.index[is_token]
    return token_ids.tolist()


def _logit_strings_of(entries: list[dict[str, Any]], nodes: Nodes) -> dict[int, str]:
    clerps = ((row, LOGIT_CLERP.match(entries[row]["clerp"])) for row in np.flatnonzero(nodes.is_kind(NodeKind.LOGIT)))
    return {int(nodes.index[row]): match[1] for row, match in clerps if match}


def _shortest(values: np.ndarray) -> list[float]:
    """Floats whose decimal form is the shortest that gives back each value in its own dtype."""
    return [float(text) for text in values.astype(str)] if values.dtype == np.float32 else values.tolist()


def _null_if_nan(value: float) -> float | None:
    return None if np.isnan(value) else value


def _nan_if_null(value: float | None) -> float:
    return float("nan") if value is None else value


def _version() -> str:
    try:
        return metadata.version("interp")
    except metadata.PackageNotFoundError:
        return "unknown"
