"""The door that everything above the engines uses: Request in, Result out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from interp.edits import Edit
from interp.engines.sampling import GREEDY, Sampling, TokenLogprob
from interp.errors import PointRefused
from interp.models.anatomy import Refusal
from interp.points import Address, ModelInfo


@dataclass(frozen=True)
class Request:
    """One prompt, what to read while it runs, what to change, and how far to continue it."""

    tokens: Sequence[int] | Tensor | str
    """Token ids ([pos], or what `to_tokens` gives for one text), or text, with BOS as the tokenizer's own default."""
    capture: Sequence[Address | str] = ()
    edits: Sequence[Edit] = ()
    max_new_tokens: int = 0
    """0 runs the prompt alone."""
    sampling: Sampling = GREEDY
    logprobs: int = 0
    """Of every new token: its log-probability and those of so many likeliest ones."""
    return_logits: bool = False
    grad: bool = False
    """Whether captured tensors lie on the autograd graph of this pass; parameters take no part in it."""


class Capture(Mapping[Address, Tensor]):
    """Captured tensors by Address or by its text; each is a copy that no later pass can change."""

    def __init__(self, tensors: Mapping[Address, Tensor]) -> None:
        self._tensors = dict(tensors)

    def __getitem__(self, address: Address | str) -> Tensor:
        parsed = Address.parse(address)
        if parsed not in self._tensors:
            raise KeyError(f"{parsed} was not captured; captured: {', '.join(map(str, self._tensors)) or 'nothing'}")
        return self._tensors[parsed]

    def __contains__(self, address: object) -> bool:
        return isinstance(address, (Address, str)) and Address.parse(address) in self._tensors

    def __iter__(self) -> Iterator[Address]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"Capture({', '.join(f'{a}: {list(t.shape)}' for a, t in self._tensors.items())})"


@dataclass(frozen=True)
class Source:
    """Where one captured tensor came from."""

    module: str
    side: str
    transform: str


@dataclass(frozen=True)
class Provenance:
    """What produced a Result."""

    engine: str
    """`eager`, `nnsight`, …, with `compiled` behind it where a compiled graph decoded."""
    versions: Mapping[str, str]
    dtype: str
    device: str
    attention: str
    """The attention implementation that ran; requests for attention matrices run the eager one."""
    sources: Mapping[Address, Source]
    seed: int | None
    """What the draws of this request began with; None where nothing was drawn."""


@dataclass(frozen=True)
class Result:
    """What one Request gave."""

    tokens: list[int]
    """Prompt and new tokens, in order."""
    n_prompt: int
    text: str | None
    """The new tokens as text, up to a stop text; None where none were asked for or there is no tokenizer."""
    capture: Capture
    """[pos, ...]: one row per position that went through the model (prompt + new - 1)."""
    logits: Tensor | None
    """[pos, d_vocab] if asked."""
    logprobs: list[TokenLogprob] | None
    """One per new token, if asked."""
    finish_reason: str
    """`prompt` (nothing was generated), `length` or `stop` (an end token or a stop text)."""
    provenance: Provenance


@dataclass(frozen=True)
class Step:
    """One new token of a stream."""

    token: int
    text: str
    """What the text has grown by; held back while it may belong to a stop text or to an unfinished character."""
    capture: Capture
    """The rows of the positions that went through the model for this token: the whole prompt's at the first step."""
    logprob: TokenLogprob | None
    result: Result | None
    """The whole Result, with the last step."""


@dataclass(frozen=True)
class Support:
    """What an engine can do at an address."""

    readable: bool
    writable: bool
    reason: str
    """Why not, in one sentence; empty where both hold."""


@runtime_checkable
class Engine(Protocol):
    """A loaded model that runs Requests."""

    model: ModelInfo
    tokenizer: Any

    def to_tokens(self, text: str | list[str]) -> Int[Tensor, "batch pos"]:
        """Token ids with BOS as the tokenizer's own default; texts of unequal length raise `UserError`."""
        ...

    def support(self, address: Address | str) -> Support:
        """Whether `address` can be read and written here, else why not."""
        ...

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """One Result per Request; raises `UserError` or `PointRefused` before any forward pass."""
        ...

    def stream(self, request: Request) -> Iterator[Step]:
        """The same continuation as `run` gives, token by token; raises what `run` raises before the first."""
        ...

    def unembed(self, resid: Float[Tensor, "... d_model"], layer: int | None = None) -> Float[Tensor, "... d_vocab"]:
        """Logits of the stream of `layer` (the last one where None) through the real final norm, head, scale and cap.

        Where adapters stand between groups of blocks, it goes through those behind that layer first.
        """
        ...

    def close(self) -> None:
        """Free the model."""
        ...


def refused(address: Address, refusal: Refusal) -> PointRefused:
    """The error for an address that cannot be served."""
    nearest = f" Nearest: {', '.join(refusal.nearest)}." if refusal.nearest else ""
    return PointRefused(f"{address} does not exist here: {refusal.reason}.{nearest}")
