"""The most that was held is seen though it is gone again, by the kernel or by samples; weights and cache by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import memory, resident
from tests.families.loaded import F32, engine
from tests.families.tiny import D_HEAD, N_KV_HEADS, N_LAYERS

ROOT = Path(__file__).parents[2]
SIZE = 64 * 1024 * 1024
SPIKE = f"""
import json, sys, time
from pathlib import Path
from benchmarks import resident

def spike():
    held = bytearray(b"1" * 4096) * ({SIZE} // 4096)
    time.sleep(0.05)

resident.CLEAR = Path(sys.argv[1])
spike()
before = resident.held()
with resident.peak() as quiet:
    pass
with resident.peak() as found:
    spike()
figures = quiet.bytes - before, found.bytes - before, resident.held() - before
print(json.dumps([*figures, found.measured]))
"""


@pytest.mark.parametrize("kernel", [True, False])
def test_a_spike_is_seen(kernel: bool) -> None:
    """In a process of its own: in this one, memory that earlier tests have left free would hold the spike."""
    clear = resident.CLEAR if kernel else "/nowhere/clear_refs"
    done = subprocess.run([sys.executable, "-c", SPIKE, clear], cwd=ROOT, check=True, capture_output=True, text=True)
    quiet, found, after, measured = json.loads(done.stdout)
    assert quiet < SIZE / 4, "an earlier peak counts no more"
    assert 0.9 * SIZE < found < 1.5 * SIZE
    assert after < SIZE / 4
    assert measured.startswith("samples") != (kernel and os.access(resident.CLEAR, os.W_OK))


def test_weights_count_tied_ones_once() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    assert memory.weights(module) == 2 * 8 * 8 * 4
    module[1].weight = module[0].weight
    assert memory.weights(module) == 8 * 8 * 4


def test_the_cache_has_keys_and_values_of_every_layer() -> None:
    assert memory.kv_cache(engine("llama", F32), 7) == 7 * 2 * N_LAYERS * N_KV_HEADS * D_HEAD * 4
