"""A tensor as a value: a copy of its own that compares, hashes and travels by its content."""

import base64
import hashlib
import math
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from interp.errors import UserError


class Values:
    """A detached copy of a tensor, a numpy array or nested lists; lists of Python floats are kept in float64.

    Two are equal if dtype, shape and every byte agree: NaN equals itself, 0.0 and -0.0 differ.
    """

    __slots__ = ("_digest", "_tensor")
    _tensor: Tensor
    _digest: bytes | None

    def __init__(self, tensor: Any) -> None:
        object.__setattr__(self, "_tensor", _copy(tensor))
        object.__setattr__(self, "_digest", None)

    @classmethod
    def of(cls, tensor: Any) -> "Values":
        """`tensor` as it is if it is wrapped already."""
        return tensor if isinstance(tensor, cls) else cls(tensor)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("Values do not change; make new ones.")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._tensor,)

    @property
    def tensor(self) -> Tensor:
        """The tensor itself, to be read only."""
        return self._tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self._tensor.shape)

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return self._tensor.ndim

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self._tensor.dtype

    @property
    def digest(self) -> bytes:
        """SHA-256 of dtype, shape and bytes."""
        if self._digest is None:
            found = hashlib.sha256(f"{self.dtype} {self.shape} ".encode() + _bytes(self._tensor)).digest()
            object.__setattr__(self, "_digest", found)
        assert self._digest is not None
        return self._digest

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Values):
            return NotImplemented
        same_form = self.dtype == other.dtype and self.shape == other.shape
        return self is other or (same_form and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def to_json(self) -> dict[str, str]:
        """`{"safetensors": base64}`, one tensor called `tensor`."""
        content = save({"tensor": self._tensor.cpu().contiguous()})
        return {"safetensors": base64.b64encode(content).decode("ascii")}

    @classmethod
    def from_json(cls, data: Any) -> "Values":
        """What `to_json` wrote, bit for bit, on the CPU. Raises `UserError` on anything else."""
        if not isinstance(data, dict) or set(data) != {"safetensors"} or not isinstance(data["safetensors"], str):
            raise UserError('A tensor in JSON is {"safetensors": "..."}, base64 of a safetensors file.')
        try:
            tensors = load(base64.b64decode(data["safetensors"], validate=True))
        except (ValueError, SafetensorError) as error:
            raise UserError(f"A tensor in this JSON cannot be read: {error}.") from None
        if set(tensors) != {"tensor"}:
            raise UserError(f"A tensor in JSON is called 'tensor' in its file; this one holds {sorted(tensors)}.")
        return cls(tensors["tensor"])


TensorLike = Values | Tensor | np.ndarray | list | tuple
"""What an edit takes as a tensor."""


def number(value: Any, what: str) -> float:
    """`value` as a finite float; raises `UserError` where it is none."""
    try:
        if isinstance(value, (bool, str)):
            raise TypeError
        found = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{what} is a number, not {value!r}.") from None
    if not math.isfinite(found):
        raise UserError(f"{what} is a finite number, not {found}.")
    return found


def _copy(tensor: Any) -> Tensor:
    try:
        found = tensor if isinstance(tensor, Tensor) else torch.from_numpy(np.array(tensor))
    except (TypeError, ValueError) as error:
        raise UserError(f"This is no tensor: {error}.") from None
    if found.is_meta or found.layout != torch.strided:
        raise UserError("An edit holds dense tensors with data; this one is on the meta device or sparse.")
    if found.is_quantized:
        raise UserError("An edit holds plain tensors; dequantise this one first.")
    return found.detach().clone(memory_format=torch.contiguous_format)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
