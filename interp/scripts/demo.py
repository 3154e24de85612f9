"""`interp demo`: from a real model to an attribution graph in the browser, every step said and timed."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from interp.scripts.console import check_output, console, say
from interp.scripts.doctor import print_claims, summary
from interp.scripts.loading import Loading
from interp.scripts.trace import check_exact
from interp.scripts.train_transcoders import train

QUICK_TOKENS = 8_000
FULL_TOKENS = 40_000


@dataclass
class Demo(Loading):
    """Run the whole pipeline on a real model: points, proofs, transcoders, attribution graph, page."""

    model: str = "gemma-3-270m"
    """Packaged name (gemma-3-270m, smollm2-135m-instruct), checkpoint directory, GGUF file or hub id."""
    prompt: str = "Paris is the capital of"
    """Text whose next token is explained."""
    text: Path | None = None
    """Text to train on (.txt, .jsonl, .parquet or a folder); the shipped public-domain sample if left out."""
    output_dir: Path = Path("demo")
    """Folder for graph, page and dictionaries."""
    quick: bool = False
    """Train on few tokens with few latents: shows every step, explains less."""
    dtype: str = field(default="float32", kw_only=True)
    """float32 or float64: in less, edges do not sum to what they explain."""


def run(config: Demo) -> None:
    """The five steps."""
    started = time.perf_counter()
    check_output(config.output_dir)
    check_exact(config.dtype)
    documents = _documents(config)
    with _step("Model", "find the checkpoint, convert it once to a plain directory, load it"):
        engine = config.load(config.model, prove=False)
        engine.check_prompt(config.prompt)
    with _step("Points", "resolve which module plays which role, and prove it by arithmetic on every layer"):
        _points(engine)
    folder = config.output_dir / ("transcoders-quick" if config.quick else "transcoders")
    folder = folder / engine.model.name.replace("/", "--")
    with _step("Transcoders", "harvest mlp_in and mlp_out of every layer in one pass, train a transcoder per layer"):
        train(engine, _training(config), documents, folder)
    with _step("Circuit", f"replace the MLPs, trace {config.prompt!r} to what feeds its next token"):
        _circuit(config, engine, folder)
    say(f"Done in {time.perf_counter() - started:.0f} s. Open {config.output_dir / 'graph.html'} in a browser.")


@contextmanager
def _step(name: str, what: str) -> Iterator[None]:
    console.rule(f"[bold]{name}", align="left")
    say(f"{what[0].upper()}{what[1:]}.")
    started = time.perf_counter()
    yield
    say(f"{name}: {time.perf_counter() - started:.1f} s.")


def _documents(config: Demo) -> list[str]:
    """The text to train on, checked before anything slow begins."""
    from interp.training import read_documents

    return read_documents(config.text or Path(__file__).parents[1] / "data" / "sample.txt.gz")


def _training(config: Demo):
    from interp.training import TranscoderTrainingConfig

    if config.quick:
        return TranscoderTrainingConfig(total_tokens=QUICK_TOKENS, held_out_tokens=1_500, expansion_factor=2, epochs=3)
    return TranscoderTrainingConfig(total_tokens=FULL_TOKENS)


def _points(engine) -> None:
    """Proofs, then the trap: raw output against contribution, and which of them each tool's name means."""
    from interp.engines.doctor import refuse_unproven

    with console.status("proving"):
        claims = refuse_unproven(engine)
    print_claims(claims)
    say(summary(claims))
    _trap(engine)


def _trap(engine) -> None:
    import torch

    from interp.engines.base import Request
    from interp.names import TOOLS, names_of
    from interp.points import Address

    layers = sorted({0, engine.model.n_layers // 2, engine.model.n_layers - 1})
    pairs = [(Address("mlp_out", layer), Address("mlp_out_post", layer)) for layer in layers]
    text = "The raw output of an MLP is not always what is added to the residual stream."
    (result,) = engine.run([Request(text, capture=[address for pair in pairs for address in pair])])
    raw, added = ([result.capture[pair[i]].float().flatten() for pair in pairs] for i in (0, 1))
    figures = [
        f"layer {layer}: identical"
        if torch.equal(a, b)
        else f"layer {layer}: cosine {torch.cosine_similarity(a, b, dim=0):.2f}"
        for layer, a, b in zip(layers, raw, added, strict=True)
    ]
    say(f"The trap: raw MLP output (mlp_out) against what is added to the stream (mlp_out_post): {'; '.join(figures)}.")
    for point, meaning in (("mlp_out", "raw"), ("mlp_out_post", "added")):
        address = Address(point, layers[1])
        names = [
            f"{title} {name[0]}" for tool, title in TOOLS.items() if (name := names_of(address, tool, engine.layout))
        ]
        say(f"  {address} ({meaning}) is called: {', '.join(names)}.")


def _circuit(config: Demo, engine, folder: Path) -> None:
    from interp.circuits.attribution import AttributionConfig
    from interp.dictionaries import load_dictionaries
    from interp.scripts.trace import write_graph

    write_graph(
        engine,
        load_dictionaries(folder),
        folder,
        config.prompt,
        config.output_dir / "graph.json",
        AttributionConfig(),
        node_threshold=0.8,
        edge_threshold=0.98,
        html=True,
    )
