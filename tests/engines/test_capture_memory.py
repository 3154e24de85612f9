"""Captured tensors lie in memory of earlier runs that nobody holds any more, and in none that anybody holds."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from interp.engines import capture_memory
from interp.engines.base import Request
from interp.engines.capture_memory import RUNS, SMALL, CaptureMemory
from interp.engines.eager import EagerEngine
from interp.engines.load import wrap
from tests.families.tiny import build

CPU = torch.device("cpu")
POINTS = ["resid_post.1", "attn_normalized.1", "mlp_out.1"]
SHAPE = (4, SMALL // 4)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> EagerEngine:
    """An engine of its own, because what it keeps depends on what it has run; tiny captures are lent, too."""
    monkeypatch.setattr(capture_memory, "SMALL", 1024)
    return wrap(build("llama", torch.float32), prove=False)


def tokens(seed: int) -> list[int]:
    return torch.randint(0, 100, (40,), generator=torch.Generator().manual_seed(seed)).tolist()


def captured(model: EagerEngine, seed: int, points: list[str] = POINTS) -> dict[str, Tensor]:
    (result,) = model.run([Request(tokens(seed), capture=points)])
    return {point: result.capture[point] for point in points}


def filled(memory: CaptureMemory, value: float) -> Tensor:
    return memory.empty(SHAPE, torch.float32, CPU).fill_(value)


def places(tensors: dict[str, Tensor]) -> set[int]:
    return {tensor.data_ptr() for tensor in tensors.values()}


def test_the_next_run_captures_into_the_memory_of_the_last_one(model: EagerEngine) -> None:
    captured(model, 0)
    first = captured(model, 0)
    before = places(first)
    del first
    assert places(captured(model, 1)) == before


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "the tensor": lambda x: x,
    "a slice": lambda x: x[3:5],
    "one element": lambda x: x[-1, -1],
    "a transposed view": lambda x: x.T,
    "a NumPy array": lambda x: x.numpy(),
    "a slice of a NumPy array": lambda x: x.numpy()[2:4],
    "an array through the buffer protocol": lambda x: x.numpy().data,
    "a storage": lambda x: x.untyped_storage(),
    "an autograd graph": lambda x: torch.ones_like(x, requires_grad=True) * x,
    "another library, through DLPack": lambda x: np.from_dlpack(x),
    "its detached alias": lambda x: x.detach(),
}


def values(held: Any) -> Tensor:
    """A copy of what a holder sees."""
    if isinstance(held, torch.UntypedStorage):
        return torch.tensor(held.tolist(), dtype=torch.uint8)
    if isinstance(held, Tensor) and held.grad_fn is not None:
        return held.grad_fn._saved_other.clone()  # type: ignore[attr-defined]
    return torch.from_numpy(np.array(held)) if not isinstance(held, Tensor) else held.clone()


@pytest.mark.parametrize("name", HOLDERS)
def test_what_anybody_holds_is_not_lent_again(model: EagerEngine, name: str) -> None:
    captured(model, 0)
    held = {point: HOLDERS[name](tensor) for point, tensor in captured(model, 0).items()}
    before = {point: values(x) for point, x in held.items()}
    for seed in (1, 2, 3):
        captured(model, seed)
    for point, x in held.items():
        assert torch.equal(values(x), before[point]), point


def test_a_result_outlives_its_engine_and_a_capture_its_result(model: EagerEngine) -> None:
    (result,) = model.run([Request(tokens(0), capture=POINTS)])
    one, right = result.capture[POINTS[0]], result.capture[POINTS[0]].clone()
    del result
    captured(model, 1)
    model.close()
    del model
    gc.collect()
    assert torch.equal(one, right)


def test_one_row_of_a_batch_keeps_its_values_when_the_other_is_dropped(model: EagerEngine) -> None:
    requests = [Request(tokens(seed), capture=POINTS) for seed in (0, 1)]
    model.run(requests)
    kept, dropped = (result.capture for result in model.run(requests))
    right = {point: tensor.clone() for point, tensor in kept.items()}
    del dropped
    model.run(requests[::-1])
    assert all(torch.equal(kept[point], tensor) for point, tensor in right.items())


def test_steps_of_a_stream_and_runs_between_them_change_nothing_of_each_other(model: EagerEngine) -> None:
    request = Request(tokens(0), capture=POINTS, max_new_tokens=4)
    (whole,) = model.run([request])
    steps, others = [], []
    for number, step in enumerate(model.stream(request)):
        steps.append(step.capture)
        others.append(captured(model, number))
        captured(model, 7)
    for point in POINTS:
        rows = torch.cat([capture[point] for capture in steps])
        torch.testing.assert_close(rows, whole.capture[point], rtol=1e-5, atol=1e-6)
    for number, other in enumerate(others):
        again = captured(model, number)
        assert all(torch.equal(again[point], tensor) for point, tensor in other.items())


def test_recycled_memory_does_not_show_in_what_is_captured(model: EagerEngine) -> None:
    fresh = {point: tensor.clone() for point, tensor in captured(model, 0).items()}
    for point, tensor in captured(model, 1).items():
        assert not torch.equal(tensor, fresh[point])
        tensor.fill_(float("nan"))  # a caller may write into its copies
    assert all(torch.equal(tensor, fresh[point]) for point, tensor in captured(model, 0).items())


def test_memory_that_another_process_shares_is_not_lent_again() -> None:
    memory = CaptureMemory()
    memory.settle()
    shared = filled(memory, 1)
    shared.share_memory_()  # moves the tensor: what comes back is the memory that it has left
    memory.settle()
    later = [filled(memory, 2) for _ in range(3)]
    assert shared.is_shared() and bool((shared == 1).all())
    assert shared.data_ptr() not in {tensor.data_ptr() for tensor in later}


def test_at_most_as_much_waits_as_one_run_has_taken() -> None:
    memory = CaptureMemory()
    size = filled(memory, 0).nbytes
    memory.settle()
    held = []
    for _ in range(5):  # five runs, whose results are dropped together
        held.append([filled(memory, 0) for _ in range(3)])
        memory.settle()
    held.clear()
    assert memory.waiting == 3 * size
    lent = [filled(memory, 0)]
    memory.settle()
    del lent
    assert memory.waiting == 3 * size  # large runs may alternate with small ones
    for _ in range(RUNS - 1):
        filled(memory, 0)
        memory.settle()
    assert memory.waiting == size


def test_a_run_of_other_shapes_frees_what_it_cannot_use() -> None:
    memory = CaptureMemory()
    lent = [filled(memory, 0) for _ in range(4)]
    memory.settle()
    size = lent[0].nbytes
    lent.clear()
    assert memory.waiting == 4 * size
    other = memory.empty((3 * size,), torch.uint8, CPU)
    assert memory.waiting + other.nbytes <= 4 * size


def test_close_frees_everything_and_takes_nothing_back(model: EagerEngine) -> None:
    captured(model, 0)
    held = captured(model, 0)
    memory = model._capture_memory
    captured(model, 1)
    assert memory.waiting > 0
    model.close()
    assert memory.waiting == 0
    held.clear()
    assert memory.waiting == 0


def test_tensors_do_not_keep_the_memory_of_a_dropped_engine() -> None:
    memory = CaptureMemory()
    one, gone = filled(memory, 1), weakref.ref(memory)
    del memory
    gc.collect()
    assert gone() is None and bool((one == 1).all())


def test_threads_that_take_and_drop_at_once_never_get_the_same_memory() -> None:
    memory, wrong = CaptureMemory(), []

    def work(number: int) -> None:
        for turn in range(200):
            value = number * 1000 + turn
            mine = [filled(memory, value) for _ in range(3)]
            memory.settle()
            if not all(bool((tensor == value).all()) for tensor in mine):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_a_loan_is_an_ordinary_tensor(dtype: torch.dtype) -> None:
    memory = CaptureMemory()
    one = memory.empty((3, SMALL), dtype, CPU)
    assert one.shape == (3, SMALL) and one.dtype == dtype and one.is_contiguous()
    assert one.untyped_storage().nbytes() == one.nbytes and one.storage_offset() == 0
