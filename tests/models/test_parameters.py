"""Weights that are kept on disk or in memory are fetched whole, and dtype and device are those of the pass."""

from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from torch import nn

from interp.errors import InterpError
from interp.models.parameters import device_of, devices_of, dtype_of, kept_elsewhere, own, packs, stored


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False)).to(torch.bfloat16)


@pytest.fixture(params=["disk", "memory"])
def offloaded(request: pytest.FixtureRequest, tmp_path: Path) -> nn.Module:
    model = made()
    if request.param == "disk":
        return disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    return cpu_offload(model, execution_device=torch.device("cpu"))


def test_a_weight_is_fetched_and_left_where_it_is(offloaded: nn.Module) -> None:
    first = offloaded.get_submodule("0")
    for name in ("weight", "bias"):
        fetched = own(first, name)
        assert fetched is not None and torch.equal(fetched, getattr(made()[0], name))
    assert own(offloaded.get_submodule("2"), "bias") is None
    assert kept_elsewhere(first) and not kept_elsewhere(offloaded)
    assert all(parameter.device.type == "meta" for parameter in offloaded.parameters())


def test_all_of_a_state_dict_in_the_order_of_its_names(offloaded: nn.Module) -> None:
    expected = made().state_dict()
    found = dict(stored(offloaded))
    assert list(found) == sorted(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


def test_dtype_and_device_are_those_of_the_pass(offloaded: nn.Module) -> None:
    assert dtype_of(offloaded) == torch.bfloat16 and device_of(offloaded) == torch.device("cpu")


def test_a_model_of_packed_weights_computes_in_the_dtype_of_those_that_are_not() -> None:
    model = made()
    model[0].weight = nn.Parameter(torch.zeros(7, 5, dtype=torch.uint8), requires_grad=False)
    model[0].bias = nn.Parameter(torch.zeros(7, dtype=torch.float8_e4m3fn), requires_grad=False)
    assert dtype_of(model) == torch.bfloat16
    assert packs(model[0]) and not packs(model[1]) and not packs(model)


def test_places_are_told_apart_from_one_device() -> None:
    model = made()
    assert devices_of(model) == {}
    model.hf_device_map = {"": "cpu"}  # type: ignore[assignment]
    assert devices_of(model) == {}
    model.hf_device_map = {"0": torch.device("cpu"), "1": "disk", "2": "cpu"}  # type: ignore[assignment]
    assert devices_of(model) == {"0": "cpu", "1": "disk", "2": "cpu"}


def test_a_weight_that_is_nowhere_is_said() -> None:
    with torch.device("meta"):
        module = nn.Linear(3, 4)
    with pytest.raises(InterpError, match="nothing says where its values are"):
        own(module, "weight")
