"""`interp trace` (also `interp-trace`): the attribution graph of one prompt, from a model and its transcoders."""

from dataclasses import dataclass, field
from pathlib import Path

from interp.scripts.console import bars, check_output, run_command, say
from interp.scripts.loading import Loading


@dataclass
class Trace(Loading):
    """Compute, prune and save the attribution graph of a prompt."""

    model_path: str
    """Packaged name, checkpoint directory, GGUF file or hub id."""
    transcoder_dir: Path
    """Folder with one transcoder per layer, as the trainer writes it."""
    prompt: str = "The capital of France is"
    """Text; the tokenizer adds BOS if that is its default."""
    output_dir: Path = Path("graphs")
    """Folder to write to."""
    output_name: str = "graph"
    """Name of the files, without ending."""
    target_token: str | None = None
    """Token to explain, as text; the most probable ones if left out."""
    top_k: int = 10
    """Explain at most this many of the most probable tokens."""
    node_threshold: float = 0.8
    """Share of influence that the kept nodes carry."""
    edge_threshold: float = 0.98
    """Share of influence that the kept edges carry."""
    max_nodes: int = 8192
    """Features whose own inputs are computed."""
    dtype: str = field(default="float32", kw_only=True)
    """float32 or float64: in less, edges do not sum to what they explain."""
    html: bool = False
    """Also write a self-contained page that shows the graph."""


def run(config: Trace) -> None:
    """Write `{output_name}.json`, and `{output_name}.html` if asked."""
    check_output(config.output_dir)
    check_exact(config.dtype)
    from interp.circuits.attribution import AttributionConfig
    from interp.dictionaries import load_dictionaries

    transcoders = load_dictionaries(config.transcoder_dir)
    engine = config.load(config.model_path)
    targets = (_token(engine, config.target_token),) if config.target_token is not None else ()
    attribution = AttributionConfig(target_tokens=targets, max_logits=config.top_k, max_feature_nodes=config.max_nodes)
    write_graph(
        engine,
        transcoders,
        config.transcoder_dir,
        config.prompt,
        config.output_dir / f"{config.output_name}.json",
        attribution,
        node_threshold=config.node_threshold,
        edge_threshold=config.edge_threshold,
        html=config.html,
    )


def write_graph(
    engine,
    transcoders,
    transcoder_dir: Path,
    prompt: str,
    path: Path,
    attribution,
    *,
    node_threshold: float,
    edge_threshold: float,
    html: bool,
) -> None:
    """Trace `prompt`, print certificate, scores and strongest paths, and write the files."""
    import time

    from interp.circuits.attribution import AttributionComputer
    from interp.circuits.graph import AttributionGraph
    from interp.circuits.replacement_model import ReplacementModel

    model = ReplacementModel(engine, transcoders)
    tokens = engine.to_tokens(prompt)
    started = time.perf_counter()
    with bars() as update:
        update("forward pass", 0, 1, "passes")
        state = model.build(tokens)
        update("forward pass", 1, 1, "passes")
        edges = AttributionComputer(model, attribution, progress=update).compute_full_graph(state, tokens)
    graph = AttributionGraph.from_edges(edges)
    pruned = graph.prune(node_threshold=node_threshold, edge_threshold=edge_threshold)
    say(
        f"Traced {len(state.tokens)} tokens: {state.n_active} active features, {edges.matrix.nnz:,} edges in "
        f"{time.perf_counter() - started:.1f} s."
    )
    say_graph(graph, pruned)
    pruned.save(path)
    say(f"Graph: {path}")
    if html:
        from interp.deploy.cards import feature_cards
        from interp.deploy.html import strongest, write_html

        cards = feature_cards(model, state, pruned, transcoder_dir)
        write_html(pruned, path.with_suffix(".html"), cards, paths=strongest(graph))
        say(f"Page: {path.with_suffix('.html')}")


def check_exact(dtype: str) -> None:
    """`UserError` for a dtype in which edges do not sum to what they explain."""
    from interp.circuits.replacement_model import EXACT
    from interp.errors import UserError
    from interp.models.device import name_of, parse_dtype

    if name_of(parse_dtype(dtype)) not in EXACT:
        raise UserError(f"--dtype {dtype} is too coarse for exact attribution; choose {' or '.join(EXACT)}.")


def say_graph(graph, pruned) -> None:
    """Certificate, scores and the ten strongest paths in words."""
    certificate = graph.certificate
    say(
        f"Certificate: over {certificate.rows} rows, incoming edges miss the pre-activation by at most "
        f"{certificate.max_relative_error:.2g} of their size ({certificate.max_absolute_error:.2g} absolute, at "
        f"{certificate.worst_row})."
    )
    for without in (False, True) if graph.edges.excluded_positions else (False,):
        where = "without the positions that the dictionaries were not trained on" if without else "all positions"
        say(
            f"Replacement score {graph.replacement_score(without):.3f}, "
            f"completeness {graph.completeness_score(without):.3f} ({where})."
        )
    say(f"Pruned from {len(graph.nodes)} to {len(pruned.nodes)} nodes. The ten strongest paths to the top logit:")
    for path in graph.paths(10):
        say(f"  {path}")
    say("The ten strongest that pass a feature:")
    for path in graph.paths(10, through_features=True):
        say(f"  {path}")


def _token(engine, text: str) -> int:
    from interp.errors import UserError

    if engine.tokenizer is None:
        raise UserError(f"{engine.model.name} has no tokenizer, so --target_token cannot be read.")
    ids = engine.tokenizer(text, add_special_tokens=False).input_ids
    if len(ids) != 1:
        raise UserError(
            f"--target_token {text!r} is {len(ids)} tokens for this tokenizer; give one, with its leading space."
        )
    return int(ids[0])


def main() -> None:
    """Entry point of `interp-trace`."""
    run_command(Trace, run, "interp-trace")


if __name__ == "__main__":
    main()
