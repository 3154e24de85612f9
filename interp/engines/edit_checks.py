"""Whether an edit can do what it says on this model and this prompt: every mistake found before the model runs."""

from collections.abc import Sequence

import torch
from torch import nn

from interp.edits import Edit
from interp.edits.features import Reconstruct, SetFeature
from interp.engines.base import refused
from interp.engines.writing import place_of
from interp.errors import PointRefused, UserError
from interp.models.anatomy import MATRIX_SIDES, Anatomy, Mixer, Refusal, Routing, Tap
from interp.points import POINTS, Address, ModelInfo

_NORMALISED = {
    "resid_pre": ("attn_stream_mix", "attn_stream_write", "attn_stream_collapse", "attn_norm_scale", "attn_normalized"),
    "attn_out": ("attn_post_norm_scale", "attn_post_normalized"),
    "resid_mid": ("mlp_stream_mix", "mlp_stream_write", "mlp_stream_collapse", "mlp_norm_scale", "mlp_normalized"),
    "mlp_out": ("mlp_post_norm_scale", "mlp_post_normalized"),
}
"""Points that the table lists apart, after the point behind which they come in the forward pass."""


def check_edit(
    anatomy: Anatomy, model: ModelInfo, edit: Edit, prompt_ids: Sequence[int], max_new_tokens: int
) -> dict[Address, Tap]:
    """The taps of what the edit writes and reads; raises `UserError` or `PointRefused` where it cannot run.

    Refused are points that are not there or not writable, tensors that do not fit, positions outside the sequence and
    positions that never go through the model.
    """
    taps = check_place(anatomy, model, edit)
    edit.positions.check(prompt_ids, max_new_tokens, f"the edit at {edit.at}")
    length = len(prompt_ids) + max_new_tokens
    if POINTS[edit.at.name].matrix:
        _check_matrix(anatomy, edit, length)
    elif edit.by_position and edit.carried is not None:
        last = edit.positions.last(len(prompt_ids), max_new_tokens)
        if last >= len(edit.carried):
            raise UserError(
                f"The tensor for {edit.at} has {len(edit.carried)} rows, one per position from 0, but the edit reaches "
                f"position {last}."
            )
    if max_new_tokens and taps[edit.at].side in MATRIX_SIDES:
        raise UserError(f"{edit.at} is written on a finished sequence: run it again with max_new_tokens=0.")
    return taps


def check_place(anatomy: Anatomy, model: ModelInfo, edit: Edit) -> dict[Address, Tap]:
    """What of `check_edit` holds for any prompt: the points, their order and the width of what the edit carries."""
    tap = _tap(anatomy, edit.at)
    place = place_of(anatomy, edit.at, tap)
    if isinstance(place, Refusal):
        nearest = f" Nearest: {', '.join(place.nearest)}." if place.nearest else ""
        raise PointRefused(f"{edit.at} can be read but not written: {place.reason}.{nearest}")
    taps = {edit.at: tap} | {read: _tap(anatomy, read) for read in edit.reads}
    for read in edit.reads:
        if taps[read].side not in ("input", "output", "function"):
            raise UserError(f"{read} cannot be read by an edit while the model runs; nearest: the points around it.")
        if _order(anatomy, read) >= _order(anatomy, edit.at):
            raise UserError(
                f"The edit reads {read} and writes {edit.at}, but {read} is computed later; read an earlier point."
            )
    if not POINTS[edit.at.name].matrix:
        _check_shape(anatomy, model, edit)
    if isinstance(edit, (SetFeature, Reconstruct)):
        like = torch.empty(0, dtype=getattr(torch, model.dtype), device=model.device)
        source, output = _shape(anatomy, model, edit.source), _shape(anatomy, model, edit.at)
        if source[:-1] != output[:-1]:
            raise UserError(
                f"The edit encodes {edit.source}, {source} per position, for {edit.at}, {output} per position; "
                "name one head, or points of one shape."
            )
        edit.check_widths(source[-1], output[-1], like)
    return taps


def _tap(anatomy: Anatomy, address: Address) -> Tap:
    tap = anatomy.tap(address)
    if isinstance(tap, Refusal):
        raise refused(address, tap)
    return tap


def _check_matrix(anatomy: Anatomy, edit: Edit, length: int) -> None:
    """An attention matrix is given for all its queries, or one row of keys for all of them."""
    if edit.carried is None:
        return
    given, at = list(edit.carried.shape), edit.at
    mixer = anatomy.blocks[at.layer or 0].mixer
    square = [length, length] if at.head is not None or isinstance(mixer, Refusal) else [mixer.n_heads, length, length]
    if given not in ([length], square):
        raise UserError(f"The tensor for {at} has shape {given}; give {square}, or {[length]} for all queries.")


def _check_shape(anatomy: Anatomy, model: ModelInfo, edit: Edit) -> None:
    """The edit's tensor against the point's shape per token."""
    if edit.carried is None:
        return
    given, at = list(edit.carried.shape), edit.at
    shape = _shape(anatomy, model, at)
    if not given or given[-1] != (shape[-1] or given[-1]):
        width = given[-1] if given else 0
        raise UserError(f"The tensor for {at} is {width} wide, but the point is {shape[-1]} wide.")
    if edit.by_position:
        del given[0]
    if len(given) > len(shape) or any(n != (size or n) for n, size in zip(given[::-1], shape[::-1], strict=False)):
        raise UserError(
            f"The tensor for {at} has shape {list(edit.carried.shape)}, but the point is {shape} per position."
        )


def _shape(anatomy: Anatomy, model: ModelInfo, at: Address) -> list[int | None]:
    """The shape per token of what an address names; None for an axis that is not known before the model runs."""
    if at.name == "embeddings":  # of the first stream, which may be narrower than the last, or what is widened to it
        table = anatomy.embeddings.module
        return [table.embedding_dim if isinstance(table, nn.Embedding) else None]
    names = POINTS[at.name].shape
    part = at.head is not None or (at.stream is not None and names[0] == "streams")
    return [_size(anatomy, model, axis, at.layer) for axis in names[part:]]


def _size(anatomy: Anatomy, model: ModelInfo, axis: str, layer: int | None) -> int | None:
    if axis == "d_mlp" and layer is not None:
        neurons = anatomy.blocks[layer].neurons
        return None if isinstance(neurons, Refusal) else neurons.down.shape[1]
    routing = None if layer is None else anatomy.blocks[layer].routing
    if isinstance(routing, Routing) and axis in ("experts", "selected"):
        return routing.n_selected if axis == "selected" else routing.matrix.shape[0]
    d_model = model.d_model if layer is None else anatomy.width(layer)
    sizes = {"1": 1, "d_model": d_model, "d_vocab": model.d_vocab, "streams": model.n_streams}
    mixer = Refusal("") if layer is None else anatomy.blocks[layer].mixer
    if isinstance(mixer, Mixer):
        sizes |= {"heads": mixer.n_heads, "kv_heads": mixer.n_kv_heads, "d_head": mixer.d_head}
    return sizes.get(axis)


def _order(anatomy: Anatomy, address: Address) -> tuple[int, int]:
    """When a point is computed: its layer, then its place in the block's computation."""
    if address.layer is not None:
        return address.layer, _FORWARD.index(address.name)
    layers = {"embeddings": -1, "adapter_out": min(anatomy.bridges, default=0)}
    return layers.get(address.name, len(anatomy.blocks)), len(_FORWARD) + _FORWARD.index(address.name)


def _forward_order() -> list[str]:
    moved = {name for names in _NORMALISED.values() for name in names}
    order: list[str] = []
    for name in POINTS:
        order += [] if name in moved else [name, *_NORMALISED.get(name, ())]
    return order


_FORWARD = _forward_order()
