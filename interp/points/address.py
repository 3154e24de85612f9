"""How one place inside a model is written down: a point's name, a layer, and where it applies a head or a stream."""

import re
from dataclasses import dataclass

from interp.errors import UserError
from interp.points.table import POINTS, STREAM_POINTS, nearest_names

_TEXT = re.compile(r"(?P<name>[a-z_0-9]*[a-z_])(\.(?P<layer>\d+))?(\.(?P<axis>head|stream)-(?P<index>\d+))?")


@dataclass(frozen=True, slots=True)
class Address:
    """One place: `Address("mlp_out_post", 4)`, written `mlp_out_post.4`; `z.3.head-2`; `final_norm`.

    Layers count from 0 through all groups of blocks. Raises `UserError` for a name that is no point, a layer on a
    trunk-level point or none on a layer-level one, and a head or stream on a point that has no such axis.
    """

    name: str
    layer: int | None = None
    head: int | None = None
    stream: int | None = None

    def __post_init__(self) -> None:
        point = POINTS.get(self.name)
        if point is None:
            raise UserError(f"No point is called {self.name!r}; nearest: {', '.join(nearest_names(self.name))}.")
        if point.per_layer and self.layer is None:
            raise UserError(f"{self.name} exists once per layer: write it with one, as in {self.name}.0.")
        if not point.per_layer and self.layer is not None:
            raise UserError(f"{self.name} exists once per model: write it without a layer.")
        if self.layer is not None and self.layer < 0:
            raise UserError(f"Layers count from 0: {self.name} cannot have layer {self.layer}.")
        if self.head is not None and not point.has_heads:
            raise UserError(f"{self.name} has no head axis: its shape per token is {point.shape_text}.")
        if self.stream is not None and "streams" not in point.shape and self.name not in STREAM_POINTS:
            raise UserError(f"{self.name} has no stream axis: its shape per token is {point.shape_text}.")

    @classmethod
    def parse(cls, text: "str | Address") -> "Address":
        """The Address that `text` writes; an Address passes through. Raises `UserError` on anything else."""
        if isinstance(text, Address):
            return text
        match = _TEXT.fullmatch(text)
        if match is None:
            raise UserError(f"{text!r} is no address; write a point and a layer, as in mlp_out_post.4 or z.3.head-2.")
        layer, axis, index = match["layer"], match["axis"], match["index"]
        return cls(
            match["name"],
            None if layer is None else int(layer),
            head=int(index) if axis == "head" else None,
            stream=int(index) if axis == "stream" else None,
        )

    def __str__(self) -> str:
        parts = [self.name]
        if self.layer is not None:
            parts.append(str(self.layer))
        if self.head is not None:
            parts.append(f"head-{self.head}")
        if self.stream is not None:
            parts.append(f"stream-{self.stream}")
        return ".".join(parts)

    @property
    def whole(self) -> "Address":
        """The same point with every head and stream."""
        return self if self.head is None and self.stream is None else Address(self.name, self.layer)
