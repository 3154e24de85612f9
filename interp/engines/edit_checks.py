"""Whether an edit fits the model and the sequence, before any forward pass."""

from collections.abc import Sequence

from interp.edits import Edit
from interp.engines.base import refused
from interp.engines.writing import place_of
from interp.errors import PointRefused, UserError
from interp.models.anatomy import Anatomy, Refusal, Routing
from interp.points import POINTS, ModelInfo


def check_edit(anatomy: Anatomy, model: ModelInfo, edit: Edit, prompt: Sequence[int], max_new_tokens: int) -> None:
    """Raises `PointRefused` where the point cannot be written, `UserError` where tensor or positions do not fit."""
    tap = anatomy.tap(edit.at)
    if isinstance(tap, Refusal):
        raise refused(edit.at, tap)
    place = place_of(anatomy, edit.at, tap)
    if isinstance(place, Refusal):
        nearest = f" Nearest: {', '.join(place.nearest)}." if place.nearest else ""
        raise PointRefused(f"{edit.at} can be read but not written: {place.reason}.{nearest}")
    length = len(prompt) + max_new_tokens
    _check_tensor(anatomy, model, edit, length)
    beyond = [p for p in edit.positions or () if not 0 <= p < length]
    if beyond:
        raise UserError(f"Position {beyond[0]} of the edit at {edit.at} is outside the sequence of {length} tokens.")


def _check_tensor(anatomy: Anatomy, model: ModelInfo, edit: Edit, length: int) -> None:
    """Raises `UserError` where the edit's tensor does not fit the point's shape per token, or has too few rows."""
    if edit.tensor is None:
        return
    given, at = list(edit.tensor.shape), edit.at
    if POINTS[at.name].matrix:
        square = [length, length] if at.head is not None else [model.n_heads, length, length]
        if given not in ([length], square):
            raise UserError(f"The tensor for {at} has shape {given}; give {square}, or {[length]} for all queries.")
        return
    shape = [_size(anatomy, model, axis, at.layer) for axis in POINTS[at.name].shape]
    if at.head is not None or (at.stream is not None and POINTS[at.name].shape[0] == "streams"):
        del shape[0]
    if not given or given[-1] != (shape[-1] or given[-1]):
        width = given[-1] if given else 0
        raise UserError(f"The tensor for {at} is {width} wide, but the point is {shape[-1]} wide.")
    rows = given.pop(0) if edit.by_position(len(shape)) else None
    if len(given) > len(shape) or any(n != (size or n) for n, size in zip(given[::-1], shape[::-1], strict=False)):
        raise UserError(
            f"The tensor for {at} has shape {list(edit.tensor.shape)}, but the point is {shape} per position."
        )
    last = length - 1 if edit.positions is None else max(edit.positions, default=-1)
    if rows is not None and last >= rows:
        raise UserError(
            f"The tensor for {at} has {rows} rows, one per position from 0, but the edit reaches position {last}."
        )


def _size(anatomy: Anatomy, model: ModelInfo, axis: str, layer: int | None) -> int | None:
    """How long an axis is; None where it is not known before the model runs."""
    if axis == "d_mlp" and layer is not None:
        neurons = anatomy.blocks[layer].neurons
        return None if isinstance(neurons, Refusal) else neurons.down.shape[1]
    routing = None if layer is None else anatomy.blocks[layer].routing
    if isinstance(routing, Routing) and axis in ("experts", "selected"):
        return routing.n_selected if axis == "selected" else routing.matrix.shape[0]
    sizes = {"d_model": model.d_model, "d_head": model.d_head, "d_vocab": model.d_vocab}
    counts = {"heads": model.n_heads, "kv_heads": model.n_kv_heads, "streams": model.n_streams}
    return (sizes | counts).get(axis)
