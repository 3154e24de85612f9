"""A model's tensors, its dtype and its device as a forward pass has them, wherever the weights are kept between passes.

Weights that do not fit the device are kept in memory or on disk by accelerate: outside their module's forward they are
empty tensors on the device `meta`. Whatever reads a weight outside a forward asks here.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from interp.errors import InterpError, UserError


def own(module: nn.Module, name: str) -> Tensor | None:
    """The parameter or buffer `name` of this very module, fetched if it is kept elsewhere; None if it has none."""
    tensor = getattr(module, name, None)
    if not isinstance(tensor, Tensor):
        return None
    if tensor.device.type != "meta":
        return tensor
    from accelerate.utils import align_module_device

    with torch.no_grad(), align_module_device(module):
        tensor = getattr(module, name)
    if tensor.device.type == "meta":
        raise InterpError(
            f"{name} of this {type(module).__name__} is on the device meta, and nothing says where its values are: "
            "load the model through accelerate, or with its weights."
        )
    return tensor


def kept_elsewhere(module: nn.Module) -> bool:
    """Whether a tensor of this very module is fetched for its forward alone."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.device.type == "meta" for tensor in tensors)


def packs(module: nn.Module) -> bool:
    """Whether the module holds numbers that are no weights as they are: integers, or one byte each."""
    tensors = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    held = any(t.dtype.itemsize == 1 or not t.is_floating_point() for t in tensors if t.dtype != torch.bool)
    return held and not any(True for _ in module.children())


def stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What the model's state dict holds, by name, one tensor in memory at a time."""
    modules = dict(model.named_modules())
    for key, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, Tensor) and tensor.device.type == "meta":
            path, _, name = key.rpartition(".")
            fetched = own(modules[path], name)
            assert fetched is not None
            tensor = fetched
        if isinstance(tensor, Tensor):
            yield key, tensor


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype that the model computes in: that of its first parameter which is not packed."""
    found = (p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype.itemsize > 1)
    stated: Any = getattr(getattr(model, "config", None), "dtype", None)
    return next(found, stated if isinstance(stated, torch.dtype) else torch.get_default_dtype())


def device_of(model: nn.Module) -> torch.device:
    """Where the model takes its inputs: where its first parameter is when it is used."""
    for module in model.modules():
        for tensor in module._parameters.values():
            if tensor is None:
                continue
            place = tensor.device
            if place.type == "meta":
                place = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
            if place is not None:
                return _device(place)
    return torch.device("cpu")


def devices_of(model: nn.Module) -> dict[str, str]:
    """Which module is on which device or on disk, as it was loaded; empty where all of it is on one device."""
    given: Any = getattr(model, "hf_device_map", None) or {}
    placed = {str(path): "disk" if place == "disk" else str(_device(place)) for path, place in given.items()}
    return {} if {str(device_of(model))}.issuperset(placed.values()) else placed


@contextmanager
def seeded() -> Iterator[None]:
    """Inside, what is drawn on the CPU is the same every time; outside, nothing is changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def refuse_shards(model: nn.Module) -> None:
    """Raises `UserError` where this process holds a part of a weight: its activations would be parts, too."""
    size = getattr(model, "_tp_size", None) or 1
    setting = f"tp_size={size}" if size > 1 else ""
    if not setting and "torch.distributed.tensor" in sys.modules:  # without it there is no DTensor
        from torch.distributed.tensor import DTensor

        sharded = next((name for name, p in model.named_parameters() if isinstance(p, DTensor)), None)
        setting = "" if sharded is None else f"{sharded} is a DTensor"
    if setting:
        raise UserError(
            f"{type(model).__name__} is split over processes ({setting}), so its points would be shards: load it "
            "without tp_plan, and with device_map='auto' where it is larger than one device."
        )


def _device(place: Any) -> torch.device:
    """accelerate names a GPU by its number alone."""
    if isinstance(place, int):
        current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return torch.device("cuda" if current is None else current.type, place)
    return torch.device(place)
