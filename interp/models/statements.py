"""What can be said by hand about which module plays which role; `by_hand.anatomy` makes an Anatomy of it."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

from torch import Tensor


@dataclass(frozen=True)
class Slice:
    """Some channels of a projection's output: one part of a fused projection."""

    module: str
    """Path of the projection, below the block."""
    channels: Sequence[int] | Tensor
    """Channel numbers in the order of heads, then of the channels in a head."""


@dataclass(frozen=True)
class Sublayer:
    """One addition to the stream: multiplier · post_norm(module(norm(stream))). Paths are those below the block."""

    module: str
    """Path of the module that it is; empty where the block's own forward computes it."""
    _: KW_ONLY
    norm: str | None = None
    """Path of the norm between the stream and the module."""
    post_norm: str | None = None
    """Path of the norm between the module and the stream."""
    multiplier: float = 1.0
    """Constant that its output is added with."""
    reads: str | None = None
    """Path of the module that receives what the sublayer reads, where that is another."""
    returns: str | None = None
    """Path of the module whose output is the sublayer's, where that is another."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The inside of softmax attention. Paths are those below the block."""

    query: str | Slice
    """The projection to queries."""
    key: str | Slice
    """The projection to keys."""
    value: str | Slice
    """The projection to values."""
    output: str
    """Path of the projection that reads the mixed values, head by head."""
    n_heads: int
    """Heads of queries."""
    n_kv_heads: int | None = None
    """Heads of keys and values, where they are fewer."""
    q_norm: str | None = None
    """Path of the norm on queries."""
    k_norm: str | None = None
    """Path of the norm on keys."""
    gate: str | None = None
    """Path of the projection whose activation multiplies the mixed values."""


@dataclass(frozen=True, kw_only=True)
class Neurons:
    """The inside of a dense MLP: multiplier · down(activation(pre) · pre_linear). Paths are those below the block."""

    down: str
    """Path of the projection that reads the neurons."""
    pre: str | Slice
    """The projection to the activation's argument."""
    pre_linear: str | Slice | None = None
    """The projection to the other factor, where there is one."""
    activation: Callable[[Tensor], Tensor] | None = None
    """The activation; found among the known ones, and the modules in the MLP, where it is left out."""
    multiplier: float = 1.0
    """Constant between the output of `down` and what the MLP returns."""


@dataclass(frozen=True)
class Block:
    """One block of the trunk."""

    path: str
    """Path of the module."""
    _: KW_ONLY
    attn: Sublayer | None = None
    """The sublayer that mixes tokens; where neither it nor `mlp` is written, all of the block is resolved."""
    mlp: Sublayer | None = None
    """The sublayer that does not."""
    attention: Attention | None = None
    """The inside of `attn`; resolved where it is left out."""
    neurons: Neurons | None = None
    """The inside of `mlp`; resolved where it is left out."""
    parallel: bool = False
    """Whether both read the stream as it enters the block; else the MLP reads what attention has been added to."""
    group: int = 0
    """Which of several groups of blocks it belongs to, as in models made of two."""
