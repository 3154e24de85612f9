"""Where in the text each latent fires most: the strongest rows of tokens per latent.

`corpus.safetensors`, once per run: `tokens` int32 [all], `offsets` int64 [rows + 1]; row r is
tokens[offsets[r]:offsets[r + 1]], its prefix (BOS) included.
`contexts.safetensors`, beside a dictionary: `rows` int32, `positions` int32 and `values` float32, each
[n_latents, top], strongest first; one entry per row of text; where a latent fired in fewer rows, row −1, position −1
and value 0.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from interp.errors import UserError
from interp.files import atomic_path
from interp.training.tokens import Row

CONTEXTS_FILE = "contexts.safetensors"
CORPUS_FILE = "corpus.safetensors"


class Window(NamedTuple):
    """A stretch of text around one token at which a latent fires."""

    token_ids: list[int]
    """The tokens, in order."""
    peak: int
    """Index into `token_ids` of the token at which the latent fires."""
    value: float
    """The latent's value there."""


class ContextCollector:
    """Keeps, for each latent, the `top` rows in which it fires most, over batches in any order."""

    def __init__(self, n_latents: int, top: int = 6) -> None:
        self._n, self._top = n_latents, top
        self._kept = _Firings(
            np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32)
        )

    def add(self, values: torch.Tensor, indices: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> None:
        """Count a batch of sparse latents [tokens, m] at the tokens (rows [tokens], positions [tokens])."""
        fires = (values > 0).cpu().numpy()
        token = np.nonzero(fires)[0]
        fresh = _Firings(
            indices.cpu().numpy()[fires].astype(np.int32),
            rows[token].astype(np.int32),
            positions[token].astype(np.int32),
            values.float().cpu().numpy()[fires],
        )
        found = _Firings(*(np.concatenate(pair) for pair in zip(self._kept, fresh, strict=True)))
        found = found.at(np.lexsort((found.position, -found.value, found.row, found.latent)))
        best_of_row = np.ones(len(found.latent), bool)
        best_of_row[1:] = (np.diff(found.latent) != 0) | (np.diff(found.row) != 0)
        found = found.at(best_of_row)
        found = found.at(np.lexsort((found.row, -found.value, found.latent)))
        self._kept = found.at(found.rank() < self._top)

    def result(self) -> "Contexts":
        """The strongest contexts of everything added."""
        latent, rank = self._kept.latent, self._kept.rank()
        rows = np.full((self._n, self._top), -1, np.int32)
        positions = np.full((self._n, self._top), -1, np.int32)
        values = np.zeros((self._n, self._top), np.float32)
        rows[latent, rank] = self._kept.row
        positions[latent, rank] = self._kept.position
        values[latent, rank] = self._kept.value
        return Contexts(rows, positions, values)


class _Firings(NamedTuple):
    """Columns of one table: a latent, the token at which it fired, how strongly."""

    latent: np.ndarray
    row: np.ndarray
    position: np.ndarray
    value: np.ndarray

    def at(self, chosen: np.ndarray) -> "_Firings":
        return _Firings(*(column[chosen] for column in self))

    def rank(self) -> np.ndarray:
        """How many entries of the same latent stand before each; the table is sorted by latent."""
        return np.arange(len(self.latent)) - np.searchsorted(self.latent, self.latent, side="left")


class Contexts(NamedTuple):
    """The strongest contexts of every latent of one dictionary."""

    rows: np.ndarray
    """int32 [n_latents, top]: row of the corpus, −1 where there is none."""
    positions: np.ndarray
    """int32 [n_latents, top]: position in that row."""
    values: np.ndarray
    """float32 [n_latents, top]: the latent's value there, descending."""

    def save(self, path: str | Path) -> None:
        """Write the file of this name."""
        save_file(self._asdict(), str(path))

    @classmethod
    def load(cls, folder: str | Path) -> "Contexts":
        """The contexts beside the dictionary in `folder`. Raises `UserError` where there are none."""
        tensors = _load(Path(folder) / CONTEXTS_FILE)
        return cls(tensors["rows"], tensors["positions"], tensors["values"])


class Corpus(NamedTuple):
    """The rows of tokens of one run."""

    tokens: np.ndarray
    """int32 [all]: every row's tokens, one after the other."""
    offsets: np.ndarray
    """int64 [rows + 1]: where each row begins."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Corpus":
        """From rows as `cut_rows` gives them, in the order in which they are numbered."""
        lengths = [len(row.tokens) for row in rows]
        tokens = np.concatenate([np.array(row.tokens, np.int32) for row in rows])
        return cls(tokens, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))

    def save(self, folder: str | Path) -> None:
        """Write `corpus.safetensors` into the run's folder, whole or not at all."""
        with atomic_path(Path(folder) / CORPUS_FILE) as temporary:
            save_file(self._asdict(), str(temporary))

    @classmethod
    def load(cls, folder: str | Path) -> "Corpus":
        """The corpus of the run in `folder`. Raises `UserError` where there is none."""
        tensors = _load(Path(folder) / CORPUS_FILE)
        return cls(tensors["tokens"], tensors["offsets"])

    def windows(self, contexts: Contexts, latent: int, before: int = 12, after: int = 6) -> list[Window]:
        """The text around the strongest contexts of `latent`, strongest first."""
        found = []
        for row, position, value in zip(*(column[latent] for column in contexts), strict=True):
            if row < 0:
                break
            ids = self.tokens[self.offsets[row] : self.offsets[row + 1]]
            start = max(0, int(position) - before)
            found.append(Window(ids[start : position + after + 1].tolist(), int(position) - start, float(value)))
        return found


def _load(path: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(str(path))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; it is written when dictionaries are trained.") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"Cannot read {path}, which may be truncated: {error}.") from None
