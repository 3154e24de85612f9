"""What one request asks of a model, with every mistake found before the model runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from interp.edits import Edit
from interp.engines.base import Request, refused
from interp.engines.edit_checks import check_edit
from interp.errors import UserError
from interp.models.anatomy import MATRIX_SIDES, Anatomy, Refusal, Tap
from interp.points import Address, ModelInfo


class Kind(NamedTuple):
    """What sets passes apart."""

    needs_matrix: bool
    generates: bool
    grad: bool


@dataclass(frozen=True)
class Plan:
    """A request whose prompt is ids and whose addresses are found."""

    request: Request
    prompt: list[int]
    captured: tuple[Address, ...]
    edits: tuple[Edit, ...]
    taps: Mapping[Address, Tap]
    """Of every address that is read or written."""

    @property
    def needs_matrix(self) -> bool:
        """Whether a point lies inside the attention function, which then runs where it can be watched."""
        return any(tap.side in MATRIX_SIDES for tap in self.taps.values())

    @property
    def kind(self) -> "Kind":
        """Requests of one kind can share a forward pass."""
        return Kind(self.needs_matrix, self.request.max_new_tokens > 0, self.request.grad)


def plan(request: Request, anatomy: Anatomy, model: ModelInfo, tokenizer: Any) -> Plan:
    """The plan of `request`; raises `UserError` or `PointRefused`."""
    prompt = ids_of(request.tokens, model, tokenizer)
    _check_length(request, prompt, model)
    if request.grad and request.max_new_tokens:
        raise UserError("grad=True runs a finished sequence: set max_new_tokens=0.")
    if request.logprobs < 0:
        raise UserError(f"logprobs counts the likeliest tokens to report; {request.logprobs} is below 0.")
    if request.sampling.stop and tokenizer is None:
        raise UserError(f"{model.name} has no tokenizer, so stop texts cannot be recognised; use max_new_tokens alone.")
    captured = tuple(map(Address.parse, request.capture))
    taps = {address: _tap(anatomy, address) for address in captured}
    if request.max_new_tokens and any(tap.side in MATRIX_SIDES for tap in taps.values()):
        raise UserError("Attention matrices are captured on a finished sequence: run it again with max_new_tokens=0.")
    for edit in request.edits:
        taps |= check_edit(anatomy, model, edit, prompt, request.max_new_tokens)
    return Plan(request, prompt, captured, tuple(request.edits), taps)


def ids_of(tokens: Any, model: ModelInfo, tokenizer: Any) -> list[int]:
    """Token ids of a prompt given as text, as ids, or as `to_tokens` gives them for one text."""
    if isinstance(tokens, str):
        return encode(tokens, model, tokenizer)
    ids = torch.as_tensor(tokens)
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1 or (len(ids) and (ids.is_floating_point() or ids.is_complex())):
        raise UserError(f"A Request is one prompt of token ids; these have shape {list(ids.shape)} and {ids.dtype}.")
    return ids.tolist()


def encode(text: str, model: ModelInfo, tokenizer: Any) -> list[int]:
    """Ids of a text, with BOS as the tokenizer's own default."""
    if tokenizer is None:
        raise UserError(f"{model.name} has no tokenizer; pass token ids instead of text.")
    if not text:
        raise UserError("The prompt is empty: there is no token whose activations could be read; write some text.")
    return list(tokenizer(text).input_ids)


def _check_length(request: Request, prompt: list[int], model: ModelInfo) -> None:
    if not prompt:
        raise UserError("A prompt needs at least one token.")
    if request.max_new_tokens < 0:
        raise UserError(f"max_new_tokens counts new tokens; {request.max_new_tokens} is below 0.")
    length = len(prompt) + request.max_new_tokens
    if model.n_ctx is not None and length > model.n_ctx:
        raise UserError(
            f"The prompt and its continuation take {length} tokens, but the model's context is {model.n_ctx}."
        )
    bad = next((t for t in prompt if not 0 <= t < model.d_vocab), None)
    if bad is not None:
        raise UserError(f"Token id {bad} is outside the vocabulary of {model.d_vocab} tokens.")


def _tap(anatomy: Anatomy, address: Address) -> Tap:
    tap = anatomy.tap(address)
    if isinstance(tap, Refusal):
        raise refused(address, tap)
    return tap
