"""The most that was held is seen though it is gone again, by the kernel or by samples; weights and cache by hand."""

import time
from pathlib import Path

import pytest
import torch

from benchmarks import memory, resident
from tests.families.loaded import F32, engine
from tests.families.tiny import D_HEAD, N_KV_HEADS, N_LAYERS

SIZE = 64 * 1024 * 1024


def spike() -> None:
    held = torch.ones(SIZE // 4)
    time.sleep(0.05)
    del held


@pytest.mark.parametrize("kernel", [True, False])
def test_a_spike_is_seen(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernel:
        monkeypatch.setattr(resident, "CLEAR", Path("/nowhere/clear_refs"))
    spike()
    before = resident.held()
    with resident.peak() as quiet:
        pass
    with resident.peak() as found:
        spike()
    assert quiet.bytes - before < SIZE / 4, "an earlier peak counts no more"
    assert 0.9 * SIZE < found.bytes - before < 1.5 * SIZE
    assert resident.held() - before < SIZE / 4
    if not kernel:
        assert found.measured.startswith("samples")


def test_weights_count_tied_ones_once() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    assert memory.weights(module) == 2 * 8 * 8 * 4
    module[1].weight = module[0].weight
    assert memory.weights(module) == 8 * 8 * 4


def test_the_cache_has_keys_and_values_of_every_layer() -> None:
    assert memory.kv_cache(engine("llama", F32), 7) == 7 * 2 * N_LAYERS * N_KV_HEADS * D_HEAD * 4
