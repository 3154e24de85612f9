"""What a translation gives: an Address for a name, a name for an Address, and a note where their shapes differ."""

from collections.abc import Sequence
from typing import NamedTuple

from interp.errors import UserError
from interp.names.layout import Held, Layout, Side
from interp.points import Address


class Answer(NamedTuple):
    """What a name means."""

    address: Address
    note: str = ""
    """How the tool's tensor differs in shape, or what must be switched on for the name to exist; mostly empty."""
    also: tuple[Address, ...] = ()
    """Further points that are this very tensor on this model."""


class Spelling(NamedTuple):
    """One name of one tool."""

    name: str
    note: str = ""


class NameRefused(UserError):
    """A name or an Address has no faithful equivalent; the sentence says why and what comes nearest."""


class DependsOnModel(NameRefused):
    """A name means different points on different models, and no model is given."""


def depends(name: str, on: str) -> DependsOnModel:
    """The refusal that says what would decide."""
    return DependsOnModel(f"{name!r} has no meaning that holds on every family: it depends on {on}; name a model.")


def served(layout: Layout | None, name: str, answer: Answer) -> Answer:
    """`answer`, if the model serves that point."""
    if layout is not None and answer.address.whole not in layout.where:
        reason = layout.refused.get(answer.address.whole) or _beyond(layout, answer.address)
        what = answer.address if name == str(answer.address) else f"{name!r} is {answer.address}, which"
        raise NameRefused(f"{what} does not exist on {layout.model}: {reason}.")
    return answer


def _beyond(layout: Layout, address: Address) -> str:
    return f"it has layers 0 to {len(layout.blocks) - 1}, and {address.layer} is none of them"


def from_module(layout: Layout, path: str, side: Side, name: str) -> Answer:
    """What a module's tensor is on this model."""
    return from_held(layout.at(path, side), name, f"{path} {side}", layout)


def from_held(held: Sequence[Held], name: str, place: str, layout: Layout) -> Answer:
    """The point that a place is known for. Refused where it holds none."""
    if held:
        return Answer(held[0].address, held[0].note, tuple(one.address for one in held[1:]))
    here = place.split(" ")[0]
    parts = [str(address) for address, where in layout.where.items() if where.split(" ")[0] == here]
    why = f"; what is made of that module's tensors: {', '.join(parts[:6])}" if parts else ""
    raise NameRefused(f"{name!r} is no point: the {_side_of(place)} of {here} is none on {layout.model}{why}.")


def _side_of(place: str) -> str:
    return place.rpartition(" ")[2]
