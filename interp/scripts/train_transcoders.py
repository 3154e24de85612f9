"""`interp train-transcoders` (also `interp-train-transcoders`): a transcoder per layer from one pass over a text."""

from dataclasses import dataclass
from pathlib import Path

from interp.scripts.console import bars, check_output, console, run_command, say
from interp.scripts.loading import Loading


@dataclass
class TrainTranscoders(Loading):
    """Train TopK skip transcoders from mlp_in to the raw mlp_out."""

    model_path: str
    """Packaged name, checkpoint directory, GGUF file or hub id."""
    dataset_name: str
    """A local .txt, .jsonl, .parquet file (also .gz) or a folder of them."""
    checkpoint_dir: Path = Path("checkpoints/transcoders")
    """Folder to write to: {input point}/final/ per layer. A finished layer is kept."""
    train_all: bool = False
    """Train every layer; else name some with --layers."""
    layers: tuple[int, ...] = ()
    """Layers to train."""
    expansion_factor: int = 32
    """Latents per input dimension."""
    activation_fn: str = "topk"
    """Nonlinearity of the latents; topk is the one that trains so far."""
    k: int = 64
    """Latents that may fire per token."""
    total_tokens: int = 200_000_000
    """Tokens of training text; fewer if the text is shorter."""
    text_column: str = "text"
    """Column of the text in .jsonl and .parquet files."""
    context_len: int = 128
    """Tokens per row, BOS included."""
    lr: float = 1e-3
    """Peak learning rate of Adam."""
    batch_size: int = 512
    """Tokens per optimisation step."""
    seed: int = 0
    """Fixes the choice of documents, the initial weights and the order of tokens."""


def run(config: TrainTranscoders) -> None:
    """Train, and print the table of what each layer scored on held-out text."""
    from interp.errors import UserError
    from interp.training import TranscoderTrainingConfig, read_documents

    if config.train_all == bool(config.layers):
        raise UserError("Name the layers with --layers, or train every one with --train_all.")
    if config.activation_fn != "topk":
        raise UserError(f"--activation_fn {config.activation_fn} does not train yet; topk does.")
    training = TranscoderTrainingConfig(
        layers=config.layers or None,
        total_tokens=config.total_tokens,
        context_len=config.context_len,
        expansion_factor=config.expansion_factor,
        k=config.k,
        lr=config.lr,
        batch_size=config.batch_size,
        seed=config.seed,
    )
    check_output(config.checkpoint_dir)
    documents = read_documents(config.dataset_name, config.text_column)
    engine = config.load(config.model_path)
    train(engine, training, documents, config.checkpoint_dir)


def train(engine, training, documents: list[str], out_dir: Path) -> None:
    """Harvest, train and evaluate with progress bars, then print the table."""
    from interp.training import Trainer

    with bars() as update:
        trainer = Trainer(
            training,
            engine,
            documents,
            out_dir,
            progress=lambda p: update(p.stage, p.done, p.total, p.unit),
        )
        reports = trainer.fit()
    print_reports(reports)


def print_reports(reports) -> None:
    """Fraction of variance unexplained on held-out text, per layer."""
    from rich.table import Table

    table = Table(
        "layer",
        "transcoder",
        "best linear map",
        "mean",
        "L0",
        "dead",
        title="Fraction of variance unexplained, held-out text",
    )
    for r in reports:
        numbers = [f"{value:.3f}" for value in (r.fvu_transcoder, r.fvu_linear, r.fvu_mean)]
        table.add_row(str(r.layer), *numbers, f"{r.l0:.1f}", f"{r.dead} of {r.n_latents}")
    console.print(table)
    worse = [str(r.layer) for r in reports if r.fvu_transcoder >= r.fvu_linear]
    say(
        "Every transcoder beats the best linear map."
        if not worse
        else f"No better than linear: layers {', '.join(worse)}."
    )


def main() -> None:
    """Entry point of `interp-train-transcoders`."""
    run_command(TrainTranscoders, run, "interp-train-transcoders")


if __name__ == "__main__":
    main()
