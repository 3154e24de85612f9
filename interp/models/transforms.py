"""How a point's tensor is made from the tensor that a module receives or returns, and how a new value goes back.

Tensors have leading axes [batch, pos]; a step turns the module's trailing axes into the point's.
"""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from interp.models.linear import Linear
from interp.models.norms import Norm


@runtime_checkable
class Step(Protocol):
    """One reversible or read-only piece of a Tap."""

    writable: bool

    def read(self, x: Tensor) -> Tensor: ...
    def write(self, x: Tensor, new: Tensor) -> Tensor: ...
    def __str__(self) -> str: ...


def same_values(x: Tensor, on_path: Tensor) -> Tensor:
    """The values of `x`, bit for bit, with the gradient of `on_path`, which equals it up to rounding."""
    return x.detach() + (on_path - on_path.detach())


@dataclass(frozen=True, slots=True)
class Scale:
    """Times a constant: a residual multiplier, an embedding scale."""

    factor: float
    writable = True

    def read(self, x: Tensor) -> Tensor:
        return x * self.factor

    def write(self, x: Tensor, new: Tensor) -> Tensor:
        exact = new / self.factor
        kept = torch.where(new == self.read(x), x, exact)  # what is not edited keeps its bits
        return same_values(kept, exact) if exact.requires_grad else kept

    def __str__(self) -> str:
        return f"times {self.factor:g}"


@dataclass(frozen=True, slots=True)
class Clip:
    """Held between two bounds, as some families do with queries, keys and values."""

    low: float | None
    high: float | None
    writable = False

    def read(self, x: Tensor) -> Tensor:
        return x.clamp(self.low, self.high)

    def write(self, x: Tensor, new: Tensor) -> Tensor:
        raise TypeError("the value is clipped inside the attention module; a write before that would be clipped too")

    def __str__(self) -> str:
        return f"clipped to {self.low:g} .. {self.high:g}" if None not in (self.low, self.high) else "clipped"


@dataclass(frozen=True, slots=True, eq=False)
class Channels:
    """Channels of the last axis, picked by index and given the index's shape: heads, slices of a fused projection."""

    index: Tensor
    """[heads, d_head] or [width]: channel numbers in the module's last axis."""
    counts: bool = field(init=False)
    """Whether they are 0, 1, 2, …"""
    writable = True

    def __post_init__(self) -> None:
        counts = torch.equal(self.index.flatten(), torch.arange(self.index.numel()))
        object.__setattr__(self, "counts", counts)

    def _in_order(self, width: int) -> bool:
        return self.counts and self.index.numel() == width

    def read(self, x: Tensor) -> Tensor:
        if self._in_order(x.shape[-1]):
            return x.reshape(*x.shape[:-1], *self.index.shape)
        return x[..., self.index.to(x.device)]

    def write(self, x: Tensor, new: Tensor) -> Tensor:
        if self._in_order(x.shape[-1]):
            return new.reshape(x.shape)
        x = x.clone()
        x[..., self.index.to(x.device)] = new
        return x

    def __str__(self) -> str:
        return "channels as " + " x ".join(str(n) for n in self.index.shape)


@dataclass(frozen=True, slots=True, eq=False)
class HeadsFirst:
    """[batch, heads, pos, d_head] as the attention function holds it, to [batch, pos, heads, d_head]."""

    writable = True

    def read(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)

    def write(self, x: Tensor, new: Tensor) -> Tensor:
        return new.transpose(1, 2)

    def __str__(self) -> str:
        return "heads after positions"


@dataclass(frozen=True, slots=True)
class EveryNth:
    """One of each run of n equal heads, [batch, pos, heads, d_head]."""

    n: int
    writable = True

    def read(self, x: Tensor) -> Tensor:
        return x[:, :, :: self.n]

    def write(self, x: Tensor, new: Tensor) -> Tensor:
        return new.repeat_interleave(self.n, dim=2)

    def __str__(self) -> str:
        return f"each head once of {self.n} times"


@dataclass(frozen=True, slots=True, eq=False)
class OneHead:
    """[batch, 1, pos, ...], as a latent shared by all heads is held, to [batch, pos, ...]."""

    writable = True

    def read(self, x: Tensor) -> Tensor:
        return x.squeeze(1)

    def write(self, x: Tensor, new: Tensor) -> Tensor:
        return new.unsqueeze(1)

    def __str__(self) -> str:
        return "of the one head"


@dataclass(frozen=True, slots=True)
class OneOfSeveral:
    """A tensor that its module is given as several arguments: an edit of one would leave the others."""

    writable = False

    def read(self, x: Tensor) -> Tensor:
        return x

    def write(self, x: Tensor, new: Tensor) -> Tensor:
        raise TypeError("the module takes this tensor as several arguments; a write would change one of them")

    def __str__(self) -> str:
        return "given as several arguments"


@dataclass(frozen=True, slots=True, eq=False)
class Transposed:
    """The last two axes exchanged."""

    writable = True

    def read(self, x: Tensor) -> Tensor:
        return x.transpose(-1, -2)

    def write(self, x: Tensor, new: Tensor) -> Tensor:
        return new.transpose(-1, -2)

    def __str__(self) -> str:
        return "transposed"


@dataclass(frozen=True, slots=True, eq=False)
class Normalized:
    """A norm's input over its scale, before gain and bias."""

    norm: Norm
    writable = False

    def read(self, x: Tensor) -> Tensor:
        return self.norm.normalized(x)

    def write(self, x: Tensor, new: Tensor) -> Tensor:
        raise TypeError("a norm computes its input over its scale inside; it cannot be written")

    def __str__(self) -> str:
        return "over the norm's scale"


@dataclass(frozen=True, slots=True, eq=False)
class NormScale:
    """A norm's denominator."""

    norm: Norm
    writable = False

    def read(self, x: Tensor) -> Tensor:
        return self.norm.scale(x)

    def write(self, x: Tensor, new: Tensor) -> Tensor:
        raise TypeError("a norm computes its denominator inside; it cannot be written")

    def __str__(self) -> str:
        return "the norm's scale"


@dataclass(frozen=True, slots=True, eq=False)
class HeadOutputs:
    """z [.., heads, d_head] to each head's share of the attention output [.., heads, d_model], without its bias."""

    output: Linear
    n_heads: int
    writable = False

    def read(self, x: Tensor) -> Tensor:
        weight = self.output.weight.unflatten(1, (self.n_heads, -1))
        return torch.einsum("...hd,mhd->...hm", x, weight.to(x.device))

    def write(self, x: Tensor, new: Tensor) -> Tensor:
        raise TypeError("the heads' shares are summed inside the output projection; write z instead")

    def __str__(self) -> str:
        return "each head through the output projection"


@dataclass(frozen=True, slots=True, eq=False)
class Largest:
    """The largest entries of the last axis, in falling order: the weights of the selected among all experts.

    A write keeps the meaning for the rest of the pass only while the order stays: not open to edits.
    """

    n: int
    writable = False

    def read(self, x: Tensor) -> Tensor:
        return x.topk(self.n).values

    def write(self, x: Tensor, new: Tensor) -> Tensor:
        return x.scatter(-1, x.topk(self.n).indices, new)

    def __str__(self) -> str:
        return f"the {self.n} largest"


@dataclass(frozen=True, slots=True, eq=False)
class LargestIndices:
    """Where the largest entries of the last axis are: which of all experts are selected."""

    n: int
    writable = False

    def read(self, x: Tensor) -> Tensor:
        return x.topk(self.n).indices

    def write(self, x: Tensor, new: Tensor) -> Tensor:
        return torch.zeros_like(x).scatter(-1, new.long(), x.topk(self.n).values)

    def __str__(self) -> str:
        return f"places of the {self.n} largest"
