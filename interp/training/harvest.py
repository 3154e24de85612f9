"""One pass of the model over rows of tokens; the activations of many points go to disk as they come.

Each point is one file of float16 [tokens, d], divided by a power of two per point that puts the largest value of its
first batch near 256. Relative to what varies, float16 then errs by at most 2⁻¹¹, which adds below 10⁻⁶ to any fraction
of variance unexplained, at half the disk of float32 (which can be chosen). Training tokens come first, held-out
tokens after them. Tokens that dictionaries are not trained on are never stored.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from interp.engines.base import Engine, Request
from interp.errors import InterpError, UserError
from interp.training.progress import Progress, ProgressCallback, ignore
from interp.training.tokens import Row, TokenRows

StoreDtype = Literal["float16", "float32"]


@dataclass(frozen=True)
class TokenIndex:
    """Which token each stored activation belongs to."""

    rows: np.ndarray
    """int32 [tokens]: index of the row, training rows first."""
    positions: np.ndarray
    """int32 [tokens]: position in that row, the prefix counted."""
    token_ids: np.ndarray
    """int32 [tokens]"""
    n_train: int
    """The first n_train tokens are for training, the rest is held out."""


class ActivationStore:
    """Activations on disk. `train(point)` and `held_out(point)` read one point's tokens back as float32."""

    def __init__(
        self, folder: Path, index: TokenIndex, widths: dict[str, int], scales: dict[str, float], dtype: StoreDtype
    ) -> None:
        self.folder, self.index, self.dtype = folder, index, dtype
        self._widths, self._scales = widths, scales

    def train(self, point: str) -> Float[Tensor, "tokens d"]:
        """Training activations of `point`, in memory."""
        return self._read(point, 0, self.index.n_train)

    def held_out(self, point: str) -> Float[Tensor, "tokens d"]:
        """Held-out activations of `point`, in memory."""
        return self._read(point, self.index.n_train, len(self.index.rows))

    def _read(self, point: str, start: int, stop: int) -> Tensor:
        width, itemsize = self._widths[point], np.dtype(self.dtype).itemsize
        count = (stop - start) * width
        raw = np.fromfile(self.folder / point, dtype=self.dtype, count=count, offset=start * width * itemsize)
        if len(raw) != count:
            raise InterpError(
                f"{self.folder / point} is shorter than the harvest that wrote it; run the harvest again."
            )
        return torch.from_numpy(raw.reshape(-1, width)).float().mul_(self._scales[point])


def harvest(
    engine: Engine,
    rows: TokenRows,
    points: Sequence[str],
    folder: str | Path,
    *,
    excluded_token_ids: Collection[int] = (),
    batch_tokens: int = 2048,
    dtype: StoreDtype = "float16",
    progress: ProgressCallback = ignore,
) -> ActivationStore:
    """Run every row once and store `points` (texts of Addresses) at every token that is not excluded.

    Rows of similar length share a batch of about `batch_tokens` tokens. The folder must exist; one file per point.
    """
    all_rows = rows.train + rows.held_out
    is_train = [True] * len(rows.train) + [False] * len(rows.held_out)
    order = sorted(range(len(all_rows)), key=lambda i: (not is_train[i], -len(all_rows[i].tokens)))
    total = sum(len(row.tokens) for row in all_rows)
    excluded = np.array(sorted(excluded_token_ids), dtype=np.int64)
    index: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    n_train = done = 0
    progress(Progress("harvest", 0, total))
    with _Writer(Path(folder), points, dtype) as writer:
        for batch in _batches(order, all_rows, is_train, batch_tokens):
            results = engine.run([Request(tokens=all_rows[i].tokens, capture=points) for i in batch])
            for i, result in zip(batch, results, strict=True):
                tokens = np.array(all_rows[i].tokens)
                kept = np.flatnonzero(~np.isin(tokens, excluded))
                index.append((np.full(len(kept), i), kept, tokens[kept]))
                n_train += len(kept) if is_train[i] else 0
                done += len(tokens)
                writer.keep(kept, result.capture.__getitem__)
            writer.flush()
            progress(Progress("harvest", done, total))
    if n_train == 0 or n_train == sum(len(kept) for _, kept, _ in index):
        raise UserError("Every token of the training or held-out text is excluded from training; give a longer text.")
    columns = [np.concatenate(column).astype(np.int32) for column in zip(*index, strict=True)]
    return ActivationStore(Path(folder), TokenIndex(*columns, n_train=n_train), writer.widths, writer.scales, dtype)


def _batches(order: list[int], rows: list[Row], is_train: list[bool], batch_tokens: int) -> list[list[int]]:
    """Consecutive rows of `order`, padded size at most `batch_tokens`, training and held-out rows apart."""
    batches: list[list[int]] = []
    for i in order:
        last = batches[-1] if batches else []
        if last and is_train[last[0]] == is_train[i] and (len(last) + 1) * len(rows[last[0]].tokens) <= batch_tokens:
            last.append(i)
        else:
            batches.append([i])
    return batches


class _Writer:
    """Appends batches of captured rows to one file per point."""

    def __init__(self, folder: Path, points: Sequence[str], dtype: StoreDtype) -> None:
        self.widths: dict[str, int] = {}
        self.scales: dict[str, float] = {}
        self._dtype = dtype
        self._files: dict[str, IO[bytes]] = {point: (folder / point).open("wb") for point in points}
        self._pending: dict[str, list[Tensor]] = {point: [] for point in points}

    def keep(self, kept: np.ndarray, captured: Callable[[str], Tensor]) -> None:
        """Hold the rows `kept` of each point's captured tensor [pos, d] until `flush`."""
        chosen = torch.from_numpy(kept)
        for point, pending in self._pending.items():
            tensor = captured(point)
            pending.append(tensor[chosen.to(tensor.device)].float().cpu())

    def flush(self) -> None:
        """Write what is held."""
        for point, pending in self._pending.items():
            values = torch.cat(pending)
            pending.clear()
            if len(values) == 0:
                continue
            if not bool(torch.isfinite(values).all()):
                raise InterpError(f"The model gave values at {point} that are not finite; try another dtype.")
            if point not in self.scales:
                self.widths[point] = values.shape[1]
                largest = float(values.abs().max())
                half = self._dtype == "float16" and largest > 0
                self.scales[point] = 2.0 ** (math.ceil(math.log2(largest)) - 8) if half else 1.0
            stored = (values / self.scales[point]).to(getattr(torch, self._dtype))
            if not bool(torch.isfinite(stored).all()):
                raise InterpError(
                    f"Activations at {point} exceed what float16 holds; store them with store_dtype=float32."
                )
            self._files[point].write(stored.numpy().tobytes())

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
