"""Edits through a dictionary: z = encode(x), D(x) = decode(z).

SetFeature    y + decode(z′) − decode(z), where z′ is z with one latent changed and y is x itself, or another point
Reconstruct   D(x); with keep_error y as it is, written D(x) + (y − D(x)) with the bracket held constant

Whatever the dictionary does not explain, x − D(x), thus stays in the stream under SetFeature.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from interp.edits.base import Context, Edit
from interp.edits.coders import Coder, coder_of, source_of
from interp.edits.values import number
from interp.errors import UserError
from interp.points import Address

WAYS = ("value", "delta", "scale")


class _ThroughDictionary(Edit, ABC):
    """An edit that reads one point, encodes it, and writes the same point or a later one."""

    portable: ClassVar[bool] = True
    dictionary: Any

    @property
    @abstractmethod
    def source(self) -> Address:
        """The point that is encoded."""

    @property
    def reads(self) -> tuple[Address, ...]:
        return () if self.source == self.at else (self.source,)

    def coder(self, like: Tensor) -> Coder:
        """The dictionary, on the device and in the dtype of `like` where it is loaded from a folder."""
        return coder_of(self.dictionary, like.dtype, like.device)

    def _of_source(self, value: Tensor, context: Context) -> Tensor:
        return context.held[self.source] if self.reads else value

    def _check_vectors(self) -> None:
        for at in (self.at, *self.reads):
            edit = Edit(at)
            if edit.matrix:
                raise UserError(f"A dictionary encodes vectors, and {at} is an attention matrix.")

    def check_widths(self, d_in: int | None, d_out: int | None, like: Tensor) -> None:
        """Raises `UserError` where the dictionary does not map `d_in` to `d_out` channels; None is not known yet."""
        if d_in is None:
            return
        coder, x = self.coder(like), like.new_zeros(1, d_in)
        try:
            with torch.no_grad():
                latents = coder.encode(x)
                width = coder.decode(latents, x).shape[-1]
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            first = str(error).strip().split("\n")[0].rstrip(".")
            raise UserError(f"{coder} does not encode {self.source}, {d_in} wide: {first}.") from None
        if d_out is not None and width != d_out:
            raise UserError(f"{coder} gives {width} channels, but {self.at} is {d_out} wide.")
        self._check_latents(latents.shape[-1])

    def _check_latents(self, n: int) -> None:
        pass


@dataclass(frozen=True, repr=False)
class SetFeature(_ThroughDictionary):
    """y + decode(z′) − decode(z): one latent set to `value`, moved by `delta` or multiplied by `scale`.

    z is encoded at `address`; the change is written there too, or at `output` for a transcoder.
    """

    dictionary: Any
    """A folder, or an object with encode and decode."""
    latent: int
    value: float | int | None = field(default=None, kw_only=True)
    delta: float | int | None = field(default=None, kw_only=True)
    scale: float | int | None = field(default=None, kw_only=True)
    output: Address | str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [way for way in WAYS if getattr(self, way) is not None]
        if len(given) != 1:
            raise UserError(f"SetFeature takes one of value, delta and scale; got {', '.join(given) or 'none'}.")
        if isinstance(self.latent, bool) or not hasattr(self.latent, "__index__") or int(self.latent) < 0:
            raise UserError(f"A latent is counted from 0; {self.latent!r} is none.")
        output = None if self.output is None else Address.parse(self.output)
        self._set(dictionary=source_of(self.dictionary), latent=int(self.latent), output=output)
        self._set(**{given[0]: number(getattr(self, given[0]), given[0])})
        self._check_vectors()

    @property
    def at(self) -> Address:
        return self.source if self.output is None else Address.parse(self.output)

    @property
    def source(self) -> Address:
        return Address.parse(self.address)

    @property
    def static(self) -> tuple[Any, ...]:
        return self.source, self.dictionary, self.latent

    @cached_property
    def _operands(self) -> dict[str, Any]:
        return {way: getattr(self, way) for way in WAYS if getattr(self, way) is not None}

    def _check_latents(self, n: int) -> None:
        if self.latent >= n:
            raise UserError(f"Latent {self.latent} does not exist: {self.dictionary} has {n}, counted from 0.")

    def compute(self, value: Tensor, context: Context) -> Tensor:
        x, i = self._of_source(value, context), self.latent
        coder = self.coder(x)
        z = coder.encode(x)
        own = z[..., i : i + 1]
        ((way, amount),) = self._operands.items()
        new = own + amount if way == "delta" else own * amount if way == "scale" else torch.zeros_like(own) + amount
        changed = torch.cat([z[..., :i], new, z[..., i + 1 :]], dim=-1)
        return value + (coder.decode(changed, x) - coder.decode(z, x)).to(value)


@dataclass(frozen=True, repr=False, init=False)
class Reconstruct(_ThroughDictionary):
    """D(x) of the point `input` in place of the point `output`: splices a dictionary into the model.

    With `keep_error` the output keeps its value, up to rounding, and gradients flow through the dictionary.
    """

    dictionary: Any
    input: Address
    keep_error: bool = False

    def __init__(
        self,
        input: Address | str,
        output: Address | str,
        dictionary: Any,
        keep_error: bool = False,
        *,
        positions: Any = None,
    ) -> None:
        if not isinstance(keep_error, bool):
            raise UserError(f"keep_error is True or False, not {keep_error!r}.")
        self._set(address=output, input=Address.parse(input), dictionary=source_of(dictionary))
        self._set(keep_error=keep_error, positions=positions)
        self.__post_init__()
        self._check_vectors()

    @property
    def output(self) -> Address:
        """The address that is written."""
        return self.at

    @property
    def source(self) -> Address:
        return self.input

    @property
    def static(self) -> tuple[Any, ...]:
        return self.input, self.dictionary, self.keep_error

    def compute(self, value: Tensor, context: Context) -> Tensor:
        x = self._of_source(value, context)
        coder = self.coder(x)
        found = coder.decode(coder.encode(x), x).to(value)
        return found + (value - found).detach() if self.keep_error else found
