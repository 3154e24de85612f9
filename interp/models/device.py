"""On which device and in which dtype a model runs, chosen once and said in one line."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from interp.errors import UserError

_DTYPES = {
    torch.float64: ("float64", "fp64", "f64", "double"),
    torch.float32: ("float32", "fp32", "f32", "float"),
    torch.bfloat16: ("bfloat16", "bf16"),
    torch.float16: ("float16", "fp16", "f16", "half"),
}
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
"""Of splitting a model over what is there, by accelerate's names."""
_BY_NAME = {name: dtype for dtype, names in _DTYPES.items() for name in names}

_log = logging.getLogger("interp").info


def choose(
    device: str | None,
    dtype: str | None,
    checkpoint_dtype: "torch.dtype | str | None",
    report: Callable[[str], None] = _log,
) -> tuple[torch.device, torch.dtype]:
    """The device and dtype to run in.

    Device: the one asked for, else CUDA, else MPS, else CPU. Dtype: the one asked for, else the checkpoint's, except
    where the device cannot hold that safely: then float32, with the reason in the report. `None` and "auto" leave the
    choice to us.

    Raises `UserError` for an unknown name, a device that is not there, or a dtype that the device does not have.
    """
    chosen, device_reason = _choose_device(device)
    wish = None if dtype in (None, "auto") else parse_dtype(dtype)
    if wish is not None:
        lacking = _cannot_hold(chosen, wish)
        if lacking is not None:
            raise UserError(f"{name_of(wish)} was asked for, but {lacking}; choose float32.")
        kept, dtype_reason = wish, "as asked"
    else:
        kept, dtype_reason = _keep_checkpoint_dtype(chosen, checkpoint_dtype)
    report(f"Running on {chosen} ({device_reason}) in {name_of(kept)} ({dtype_reason}).")
    return chosen, kept


def first_device(device_map: str | dict[str, Any]) -> str | None:
    """The device that a split model computes on first: that of the first module which is not in memory or on disk.

    Raises `UserError` for a strategy that accelerate does not know.
    """
    if isinstance(device_map, str):
        if device_map not in STRATEGIES:
            known = ", ".join(STRATEGIES)
            raise UserError(f"Unknown device_map {device_map!r}; choose {known}, or name a device for each module.")
        return None
    places = [f"cuda:{place}" if isinstance(place, int) else str(place) for place in device_map.values()]
    return next((place for place in places if place not in ("cpu", "disk")), "cpu")


def parse_dtype(name: str) -> torch.dtype:
    """The dtype of a name such as "float32", "bf16" or "torch.float16"; `UserError` for another."""
    dtype = _BY_NAME.get(name.lower().removeprefix("torch."))
    if dtype is None:
        raise UserError(f"Unknown dtype {name!r}; choose {', '.join(names[0] for names in _DTYPES.values())}.")
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """E.g. "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _choose_device(device: str | None) -> tuple[torch.device, str]:
    if device in (None, "auto"):
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device()), "CUDA is there"
        if torch.backends.mps.is_available():
            return torch.device("mps"), "no CUDA, MPS is there"
        return torch.device("cpu"), "neither CUDA nor MPS is there"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise UserError(f"Unknown device {device!r}; choose cuda, cuda:N, mps or cpu.") from None
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError(
                f"Device {device} was asked for, but PyTorch sees no CUDA device; choose cpu or leave it out."
            )
        if chosen.index is not None and chosen.index >= torch.cuda.device_count():
            last = torch.cuda.device_count() - 1
            raise UserError(f"Device {device} was asked for, but the last CUDA device is cuda:{last}.")
        if chosen.index is None:
            chosen = torch.device("cuda", torch.cuda.current_device())
    elif chosen.type == "mps":
        if not torch.backends.mps.is_available():
            raise UserError(f"Device {device} was asked for, but MPS is not there; choose cpu or leave it out.")
    elif chosen.type != "cpu":
        raise UserError(f"Unknown device {device!r}; choose cuda, cuda:N, mps or cpu.")
    return chosen, "as asked"


def _keep_checkpoint_dtype(device: torch.device, stated: "torch.dtype | str | None") -> tuple[torch.dtype, str]:
    if stated is None:
        return torch.float32, "the checkpoint states no dtype"
    name = name_of(stated) if isinstance(stated, torch.dtype) else stated.removeprefix("torch.")
    dtype = _BY_NAME.get(name)
    if dtype is None:
        return torch.float32, f"the checkpoint's {name} is a storage format, not a dtype to compute in"
    lacking = _cannot_hold(device, dtype) or _unsafe(device, dtype)
    if lacking is not None:
        return torch.float32, f"not the checkpoint's {name}: {lacking}"
    return dtype, "the checkpoint's own"


def _cannot_hold(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type == "mps" and dtype == torch.float64:
        return "MPS has no float64"
    if device.type == "mps" and dtype == torch.bfloat16 and not torch.backends.mps.is_macos_or_newer(14, 0):
        return "MPS has bfloat16 only from macOS 14 on"
    return None


def _unsafe(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type == "cpu" and dtype == torch.float16:
        return "float16 on the CPU is slow and its narrow range overflows"
    if (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        return "this GPU only emulates bfloat16"
    return None
