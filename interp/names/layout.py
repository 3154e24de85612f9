"""What translating a name needs to know about one model: which points its modules' tensors are, as pure facts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from interp.points import Address

Side = Literal["input", "output"]


class Place(NamedTuple):
    """One tensor of a module's call."""

    path: str
    """The module's path from the model's root, as `named_modules` spells it."""
    side: Side
    key: int | str | None
    """Positional index, keyword or tuple element; None for a bare output."""


class Held(NamedTuple):
    """A point that a place holds."""

    address: Address
    note: str = ""
    """How its axes are joined there, in words; empty where the shapes are the same."""


@dataclass(frozen=True, slots=True)
class NormFacts:
    """A norm before or after a sublayer."""

    path: str
    centred: bool
    """Whether it is a LayerNorm, which subtracts the mean and may add a bias, and not an RMSNorm."""


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """One block."""

    path: str
    parallel: bool
    attn: str | None
    """Path of the token mixer; None where it is not one module, or there is none."""
    mlp: str | None
    attn_pre_norm: NormFacts | None = None
    attn_post_norm: NormFacts | None = None
    mlp_pre_norm: NormFacts | None = None
    mlp_post_norm: NormFacts | None = None
    dense: bool = False
    """Whether the MLP has neurons of its own, and not experts."""
    gated: bool = False
    fused: bool = False
    """Whether one projection gives query, key and value."""
    direct: bool = False
    """Whether query, key and value are projections of what the attention receives, and not of a latent."""
    rotation: Literal["none", "halves", "other"] = "none"
    """`halves` where the attention receives cosines and sines and turns channel i with channel i + half by them."""
    one_key_head: bool = False

    @property
    def shared_norm(self) -> bool:
        """Whether attention and MLP read one norm's output."""
        return self.attn_pre_norm is not None and self.attn_pre_norm == self.mlp_pre_norm


@dataclass(frozen=True, slots=True)
class Layout:
    """One model."""

    model: str
    blocks: tuple[BlockFacts, ...]
    held: Mapping[Place, tuple[Held, ...]]
    """Points by place, the one that the place is known for first."""
    paths: frozenset[str]
    """Every module."""
    first: Mapping[str, int | str]
    """Key of the first tensor that a module receives, by path."""
    where: Mapping[Address, str]
    """Where a served point lives and what is done to the tensor there, in words."""
    refused: Mapping[Address, str]
    """Why a point is not served, in one sentence with the nearest points."""
    base: str
    """Path of what `AutoModel` loads, without the head; empty where the model has no such part."""
    embedding: str
    start_norm: str | None
    """Path of the norm between the embeddings and the first block, where there is one."""
    final_norm: NormFacts | None
    head: str | None

    def at(self, path: str, side: Side) -> tuple[Held, ...]:
        """What a module's first input, or its output (the first element of a tuple), holds; empty where nothing."""
        keys = (None, 0, "last_hidden_state", "logits") if side == "output" else (self.first.get(path),)
        return next((self.held[place] for key in keys if (place := Place(path, side, key)) in self.held), ())

    def note(self, address: Address) -> str:
        """How the axes of a point are joined at its own place; empty where they are the point's."""
        path, _, side = self.where.get(address, "").split(",")[0].rpartition(" ")
        if side not in ("input", "output"):
            return ""
        return next((held.note for held in self.at(path, side) if held.address == address), "")  # type: ignore[arg-type]

    def is_tuple(self, path: str) -> bool:
        """Whether the module returns a tuple of which the first element is a point."""
        return Place(path, "output", 0) in self.held
