"""The strongest contexts are those that a plain search over everything finds."""

from pathlib import Path

import numpy as np
import pytest
import torch

from interp.errors import UserError
from interp.training.contexts import ContextCollector, Contexts, Corpus
from interp.training.tokens import Row

N, TOP, ROWS, LENGTH = 9, 4, 12, 10


def test_against_a_plain_search() -> None:
    generator = torch.Generator().manual_seed(0)
    dense = torch.relu(torch.randn(ROWS * LENGTH, N, generator=generator) - 1)
    dense[:, 5] = 0
    dense[LENGTH:, 6] = 0
    rows, positions = np.repeat(np.arange(ROWS), LENGTH), np.tile(np.arange(LENGTH), ROWS)
    order = torch.randperm(ROWS * LENGTH, generator=generator).numpy()
    collector = ContextCollector(N, TOP)
    for part in np.array_split(order, 5):
        values, indices = dense[part].topk(N)
        collector.add(values, indices, rows[part], positions[part])
    found = collector.result()
    for latent in range(N):
        table = dense[:, latent].view(ROWS, LENGTH)
        best = sorted(
            ((float(row.max()), r, int(row.argmax())) for r, row in enumerate(table) if row.max() > 0), reverse=True
        )
        expected = best[:TOP] + [(0.0, -1, -1)] * (TOP - len(best))
        assert (
            list(zip(found.values[latent].tolist(), found.rows[latent], found.positions[latent], strict=True))
            == expected
        )


def test_windows_show_the_text_around_the_peak(tmp_path: Path) -> None:
    corpus = Corpus.of([Row([1, 10, 11, 12], 0), Row([1, 20, 21, 22, 23, 24], 4)])
    corpus.save(tmp_path)
    corpus = Corpus.load(tmp_path)
    contexts = Contexts(
        np.array([[1, 0, -1]], np.int32), np.array([[3, 1, -1]], np.int32), np.array([[2.0, 1.0, 0.0]], np.float32)
    )
    contexts.save(tmp_path / "contexts.safetensors")
    windows = corpus.windows(Contexts.load(tmp_path), 0, before=2, after=1)
    assert windows == [([20, 21, 22, 23], 2, 2.0), ([1, 10, 11], 1, 1.0)]


def test_missing_and_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        Corpus.load(tmp_path)
    (tmp_path / "contexts.safetensors").write_bytes(b"1234")
    with pytest.raises(UserError, match="truncated"):
        Contexts.load(tmp_path)
