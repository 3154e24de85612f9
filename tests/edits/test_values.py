"""A wrapped tensor is a copy that compares, hashes and travels by its content, to the bit."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from interp.edits import Values
from interp.errors import UserError

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
shapes = st.lists(st.integers(0, 4), max_size=3)


@given(st.sampled_from(DTYPES), shapes, st.randoms(use_true_random=False))
def test_any_bits_come_back_from_json(dtype: torch.dtype, shape: list[int], random: Any) -> None:
    """Bytes are drawn, not numbers: NaN payloads, infinities, subnormals and -0.0 among them."""
    n = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
    raw = torch.tensor([random.randrange(2 if dtype == torch.bool else 256) for _ in range(n)], dtype=torch.uint8)
    values = Values(raw.view(dtype).reshape(shape))
    again = Values.from_json(values.to_json())
    assert again == values and hash(again) == hash(values)
    assert (again.dtype, again.shape) == (dtype, tuple(shape))
    assert torch.equal(again.tensor.reshape(-1).view(torch.uint8), raw)


def test_equality_is_that_of_the_bytes() -> None:
    nan = Values(torch.tensor([1.0, float("nan")]))
    assert nan == Values(torch.tensor([1.0, float("nan")])) and len({nan, Values(nan.tensor)}) == 1
    assert Values(torch.tensor([0.0])) != Values(torch.tensor([-0.0]))
    quiet = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert quiet.isnan().all() and Values(quiet[:1]) != Values(quiet[1:])
    assert Values(torch.zeros(2)) != Values(torch.zeros(2, dtype=torch.float64))
    assert Values(torch.zeros(2, 3)) != Values(torch.zeros(3, 2))
    assert Values(torch.zeros(2)) != "float32[2]"


def test_it_is_a_copy_without_a_graph() -> None:
    source = torch.ones(3, requires_grad=True)
    values = Values(source)
    with torch.no_grad():
        source.mul_(5)
    assert torch.equal(values.tensor, torch.ones(3)) and not values.tensor.requires_grad
    with pytest.raises(AttributeError, match="do not change"):
        values.tensor = source  # type: ignore[misc]
    transposed = torch.arange(6.0).view(2, 3).T
    assert Values(transposed) == Values(transposed.contiguous())


def test_arrays_and_lists_are_taken_as_exactly_as_they_are() -> None:
    assert Values([0.1, 2]).dtype == torch.float64 and Values([0.1]).tensor[0].item() == 0.1
    assert Values(np.array([1, 2], np.float16)) == Values(torch.tensor([1, 2], dtype=torch.float16))
    assert Values.of(values := Values([1.0])) is values
    assert pickle.loads(pickle.dumps(values)) == values
    assert repr(Values(torch.zeros(2, 3))) == "float32[2, 3]"


@pytest.mark.parametrize("bad", ["text", [[1.0], [1.0, 2.0]], None, torch.zeros(2, device="meta")])
def test_what_is_no_tensor_is_refused(bad: Any) -> None:
    with pytest.raises(UserError):
        Values(bad)


@pytest.mark.parametrize("data", [{}, "x", {"safetensors": 3}, {"safetensors": "AAAA"}, {"safetensors": "%%"}])
def test_json_that_holds_no_tensor_is_refused(data: Any) -> None:
    with pytest.raises(UserError):
        Values.from_json(data)
