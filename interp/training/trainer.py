"""The whole training job: text → rows of tokens → activations of all layers in one pass → a transcoder per layer.

Folder that it writes:

    corpus.safetensors                       the rows of tokens (contexts.py)
    train.jsonl                              one line per logged step
    {input point}/final/config.json          the dictionary (FORMAT: interp.dictionaries.storage) with its metrics
    {input point}/final/weights.safetensors
    {input point}/final/contexts.safetensors where each latent fires most

A layer whose `final` was made by the same configuration, text and model is kept and not trained again.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from interp.dictionaries import DictionaryConfig, ModelReference, Transcoder
from interp.dictionaries.storage import FINAL, read_config, write_dictionary
from interp.engines.base import Engine
from interp.errors import PointRefused, UserError
from interp.eval import ReconstructionMeter, SparsityMeter
from interp.files import atomic_dir, check_writable
from interp.points import Address
from interp.training.config import TranscoderTrainingConfig
from interp.training.contexts import CONTEXTS_FILE, ContextCollector, Contexts, Corpus
from interp.training.corpus import read_documents
from interp.training.fit import CHUNK, Fitted, StepReport, fit_transcoder
from interp.training.harvest import ActivationStore, TokenIndex, harvest
from interp.training.progress import Progress, ProgressCallback, ignore
from interp.training.tokens import TokenRows, cut_rows

LOG_EVERY = 10
"""Optimisation steps between two lines of the log."""


@dataclass(frozen=True)
class LayerReport:
    """What one layer's transcoder scored on held-out text."""

    layer: int
    """Which layer."""
    fvu_transcoder: float
    """Fraction of variance unexplained by the transcoder."""
    fvu_linear: float
    """By the least-squares linear map fitted to the same training tokens."""
    fvu_mean: float
    """By the mean of the training tokens."""
    l0: float
    """Latents that fire per token, on average."""
    dead: int
    """Latents that fired at no training token."""
    n_latents: int
    """Latents in all."""
    kept: bool = False
    """Whether it was finished by an earlier run and only read."""


class _Job(NamedTuple):
    layer: int
    input_point: str
    output_point: str


class Trainer:
    """`Trainer(config, model, corpus, out_dir).fit()` trains, measures and saves one transcoder per layer.

    `corpus` is the path of a text file or folder, or the documents themselves. `progress` is called with every stage's
    progress, `on_report` with each layer's result as it is saved. `fit` raises `UserError` for text that is unusable,
    a folder that cannot be written or a disk too small for the harvest, and `PointRefused` for points that the model
    does not have.
    """

    def __init__(
        self,
        config: TranscoderTrainingConfig,
        model: Engine,
        corpus: str | Path | list[str],
        out_dir: str | Path,
        *,
        progress: ProgressCallback = ignore,
        on_report: Callable[[LayerReport], None] = lambda _: None,
        text_column: str = "text",
    ) -> None:
        self.config, self.engine, self.corpus, self.out_dir = config, model, corpus, Path(out_dir)
        self.progress, self.on_report, self.text_column = progress, on_report, text_column
        # Sparse products exist on CPU and CUDA; a model on another device has its dictionaries fitted on the CPU.
        self.device = torch.device(model.model.device if model.model.device.startswith("cuda") else "cpu")

    def fit(self) -> list[LayerReport]:
        """One report per layer, in order."""
        jobs = self._jobs()
        documents = self.corpus if isinstance(self.corpus, list) else read_documents(self.corpus, self.text_column)
        rows = cut_rows(
            documents,
            self.engine.tokenizer,
            context_len=self.config.context_len,
            train_tokens=self.config.total_tokens,
            held_out_tokens=self.config.held_out_tokens,
            seed=self.config.seed,
        )
        excluded = self._excluded(rows)
        training = self._fingerprint(rows)
        reports = {job.layer: report for job in jobs if (report := self._finished(job, training)) is not None}
        for report in reports.values():
            self.on_report(report)
        todo = [job for job in jobs if job.layer not in reports]
        if not todo:
            return [reports[job.layer] for job in jobs]
        check_writable(self.out_dir)
        Corpus.of(rows.train + rows.held_out).save(self.out_dir)
        activations = self._workspace(rows, todo)
        try:
            points = [point for job in todo for point in (job.input_point, job.output_point)]
            store = harvest(
                self.engine,
                rows,
                points,
                activations,
                excluded_token_ids=excluded,
                batch_tokens=self.config.harvest_batch_tokens,
                dtype=self.config.store_dtype,
                progress=self.progress,
            )
            for job in todo:
                reports[job.layer] = self._layer(job, store, training, excluded)
                self.on_report(reports[job.layer])
        finally:
            shutil.rmtree(activations, ignore_errors=True)
        return [reports[job.layer] for job in jobs]

    def _layer(
        self, job: _Job, store: ActivationStore, training: dict[str, object], excluded: list[int]
    ) -> LayerReport:
        """Fit, measure and save one layer."""
        x, y = store.train(job.input_point).to(self.device), store.train(job.output_point).to(self.device)
        fitted = fit_transcoder(x, y, self.config, self._step(job))
        mean = y.double().mean(0).float()
        del x, y
        x, y = store.held_out(job.input_point).to(self.device), store.held_out(job.output_point).to(self.device)
        report, contexts = _measure(job.layer, fitted, mean, x, y, store.index, self.config.contexts_per_latent)
        self._save(job, fitted, report, contexts, training, excluded)
        return report

    def _save(
        self,
        job: _Job,
        fitted: Fitted,
        report: LayerReport,
        contexts: Contexts,
        training: dict[str, object],
        excluded: list[int],
    ) -> None:
        config = fitted.transcoder.config
        config.input_points, config.output_points = [job.input_point], [job.output_point]
        config.model = ModelReference(id=self.engine.model.name, fingerprint=self.engine.model.fingerprint)
        config.excluded_token_ids = excluded
        config.tokens_seen = fitted.tokens_seen
        config.training = training
        config.metrics = {
            "fvu": report.fvu_transcoder,
            "explained_variance": 1 - report.fvu_transcoder,
            "fvu_linear": report.fvu_linear,
            "fvu_mean": report.fvu_mean,
            "l0": report.l0,
            "dead": report.dead,
        }
        with atomic_dir(self._final(job)) as folder:
            write_dictionary(fitted.transcoder, folder)
            contexts.save(folder / CONTEXTS_FILE)

    def _jobs(self) -> list[_Job]:
        n_layers = self.engine.model.n_layers
        layers = range(n_layers) if self.config.layers is None else sorted(set(self.config.layers))
        if outside := [layer for layer in layers if not 0 <= layer < n_layers]:
            raise UserError(f"{self.engine.model.name} has layers 0 to {n_layers - 1}; there is no layer {outside[0]}.")
        n_latents = self.config.expansion_factor * min(map(self.engine.model.width, layers))
        if self.config.k > n_latents:
            raise UserError(f"k = {self.config.k} exceeds the {n_latents} latents; choose a smaller k.")
        jobs = [
            _Job(i, str(Address(self.config.input_point, i)), str(Address(self.config.output_point, i))) for i in layers
        ]
        for point in (point for job in jobs for point in (job.input_point, job.output_point)):
            support = self.engine.support(point)
            if not support.readable:
                raise PointRefused(f"{point} cannot be harvested: {support.reason}.")
        return jobs

    def _excluded(self, rows: TokenRows) -> list[int]:
        """Tokens whose activations say nothing about text: what the tokenizer puts first, BOS, padding."""
        tokenizer = self.engine.tokenizer
        named = (getattr(tokenizer, "bos_token_id", None), getattr(tokenizer, "pad_token_id", None))
        return sorted({*rows.prefix, *(token for token in named if token is not None)})

    def _fingerprint(self, rows: TokenRows) -> dict[str, object]:
        """Everything that decides what a layer's weights come out as, as it is written into its config."""
        digest = hashlib.sha256()
        for part in (rows.train, rows.held_out):
            for row in part:
                digest.update(np.array([len(row.tokens), *row.tokens], np.int64).tobytes())
            digest.update(b"|")
        settings = asdict(self.config)
        del settings["layers"]
        return {**settings, "rows_sha256": digest.hexdigest()}

    def _finished(self, job: _Job, training: dict[str, object]) -> LayerReport | None:
        try:
            config = read_config(self._final(job))
        except UserError:
            return None
        model = config.model.fingerprint if config.model else None
        complete = (self._final(job) / CONTEXTS_FILE).exists() and config.output_points == [job.output_point]
        if not complete or config.training != training or model != self.engine.model.fingerprint:
            return None
        return _report(job.layer, config)

    def _workspace(self, rows: TokenRows, jobs: list[_Job]) -> Path:
        """An empty folder for the activations, on a disk that holds them."""
        folder = self.out_dir / "activations"
        shutil.rmtree(folder, ignore_errors=True)
        tokens = sum(len(row.tokens) for row in rows.train + rows.held_out)
        itemsize = np.dtype(self.config.store_dtype).itemsize
        needed = tokens * sum(2 * self.engine.model.width(job.layer) for job in jobs) * itemsize
        free = shutil.disk_usage(self.out_dir).free
        if needed > free:
            raise UserError(
                f"The harvest of {tokens:,} tokens needs {needed / 1e9:.1f} GB, and the disk of {self.out_dir} has "
                f"{free / 1e9:.1f} GB free; train fewer layers or tokens, or choose another folder."
            )
        folder.mkdir()
        return folder

    def _final(self, job: _Job) -> Path:
        return self.out_dir / job.input_point / FINAL

    def _step(self, job: _Job) -> Callable[[StepReport], None]:
        def report(step: StepReport) -> None:
            if step.step % LOG_EVERY == 0 or step.step == step.steps:
                with (self.out_dir / "train.jsonl").open("a", encoding="utf-8") as log:
                    log.write(json.dumps({"layer": job.layer, **step._asdict()}) + "\n")
            tokens_per_step = step.tokens // step.step
            self.progress(Progress(f"layer {job.layer}", step.tokens, step.steps * tokens_per_step))

        return report


def train_transcoders(
    engine: Engine,
    config: TranscoderTrainingConfig,
    corpus: str | Path | list[str],
    out_dir: str | Path,
    progress: ProgressCallback = ignore,
    *,
    on_report: Callable[[LayerReport], None] = lambda _: None,
    text_column: str = "text",
) -> list[LayerReport]:
    """`Trainer(...).fit()` as one call; see `Trainer` for the arguments and errors."""
    trainer = Trainer(config, engine, corpus, out_dir, progress=progress, on_report=on_report, text_column=text_column)
    return trainer.fit()


def _measure(
    layer: int, fitted: Fitted, mean: Tensor, x: Tensor, y: Tensor, index: TokenIndex, top: int
) -> tuple[LayerReport, Contexts]:
    """Score a fitted transcoder on held-out (x, y), and collect where its latents fire in all of the text."""
    transcoder: Transcoder = fitted.transcoder
    n_latents = transcoder.config.n_latents
    by_transcoder, by_linear, by_mean = ReconstructionMeter(), ReconstructionMeter(), ReconstructionMeter()
    trained, tested = SparsityMeter(n_latents), SparsityMeter(n_latents)
    contexts = ContextCollector(n_latents, top)
    for start in range(0, index.n_train, CHUNK):
        part = slice(start, min(start + CHUNK, index.n_train))
        values, indices = fitted.values[part], fitted.indices[part]
        trained.add(values, indices)
        contexts.add(values, indices, index.rows[part], index.positions[part])
    for start in range(0, len(x), CHUNK):
        inputs, targets = x[start : start + CHUNK], y[start : start + CHUNK]
        values, indices = transcoder.encode_sparse(inputs)
        by_transcoder.add(targets, transcoder.decode_sparse(values, indices, inputs))
        by_linear.add(targets, fitted.linear(inputs))
        by_mean.add(targets, mean.expand_as(targets))
        tested.add(values, indices)
        at = slice(index.n_train + start, index.n_train + start + len(inputs))
        contexts.add(values, indices, index.rows[at], index.positions[at])
    report = LayerReport(
        layer=layer,
        fvu_transcoder=by_transcoder.result().fvu,
        fvu_linear=by_linear.result().fvu,
        fvu_mean=by_mean.result().fvu,
        l0=tested.result().l0,
        dead=trained.result().dead,
        n_latents=n_latents,
    )
    return report, contexts.result()


def _report(layer: int, config: DictionaryConfig) -> LayerReport | None:
    metrics = config.metrics
    try:
        read = LayerReport(
            layer=layer,
            fvu_transcoder=metrics["fvu"],
            fvu_linear=metrics["fvu_linear"],
            fvu_mean=metrics["fvu_mean"],
            l0=metrics["l0"],
            dead=int(metrics["dead"]),
            n_latents=config.n_latents,
        )
    except KeyError:
        return None
    return replace(read, kept=True)
