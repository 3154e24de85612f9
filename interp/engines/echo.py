"""P7: whether a write at a point is one, from passes in which every writable point is written.

A row of the batch writes at one point in every layer, at all positions. With b for what stood there and v for what was
written:

1. the point reads back as v;
2. every equation that computes something from the point holds with v in it;
3. every equation that gives the point holds with b in it: what is given has moved by v - b, what gives it has not;
   equations without the point hold as before;
4. where no equation computes from the point, two unlike prompts with the same v agree in what follows from it alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from interp.edits import Edit
from interp.engines.base import Capture, Request
from interp.engines.editing import select
from interp.engines.local import LocalEngine
from interp.engines.running import HEAD_POINTS
from interp.engines.writing import Place, place_of
from interp.models.anatomy import Anatomy, Mixer, Refusal
from interp.models.equations import Equation, Sides
from interp.models.proofs import (
    Captured,
    Claim,
    block_equations_at,
    boundary_equations,
    embedding_equations,
    final_norm_equations,
    judged,
    needed,
    reader,
    unembedded,
)
from interp.points import POINTS, Address

N_POS = 5
OUTER = ("final_norm", "lm_head")
"""Points behind the trunk, in a batch of their own: no other needs the head, whose output is the widest."""
STARTS = ("embeddings", "resid_pre")
FOLLOWS = {
    "embeddings": Address("resid_pre", 0),
    "attn_in": "attn_out",
    "query": "query_rot",
    "q_norm_out": "query_rot",
    "key": "key_rot",
    "k_norm_out": "key_rot",
    "mlp_in": "mlp_out",
}
"""What is a function of the point and of the positions alone, in words of the same layer."""


@dataclass(frozen=True, eq=False)
class Write(Edit):
    """Noise of the size of what stands there, the same at every use; what stood there is kept, once per use."""

    before: list[Tensor] = field(default_factory=list)
    value: list[Tensor] = field(default_factory=list)

    def change(self, value: Tensor, positions: Tensor) -> Tensor:
        self.before.append(value.clone())
        if not self.value:
            generator = torch.Generator().manual_seed(1 + (self.at.layer or 0))
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
            self.value.append(self._new(value, noise).to(value))
        return self.value[0]

    def _new(self, value: Tensor, noise: Tensor) -> Tensor:
        """Other probabilities stay positive where they were, and what is masked stays so."""
        if self.at.name == "attn_probs":
            return value * (0.5 + noise.sigmoid())
        seen = value > torch.finfo(value.dtype).min / 2
        if self.at.name == "attn_scores":
            return torch.where(seen, value + noise, value.double())
        return noise * (float(value.double().square().mean().sqrt()) or 1.0)


class Row(NamedTuple):
    """The writes of one request: one point, in every layer that has it; one head of it, or all."""

    name: str
    writes: tuple[Write, ...]


def echo(engine: LocalEngine) -> list[Claim]:
    """Every claim of P7 about the points that the engine offers for writing, in two or three forward passes."""
    rows, capture = _rows(engine), needed(engine.anatomy)
    inner = [a for a in capture if a.name not in HEAD_POINTS]
    outer = [a for a in capture if a.name in HEAD_POINTS or a.layer in (None, engine.model.n_layers - 1)]
    claims: list[Claim] = []
    unread: list[tuple[Row, Write, Capture]] = []
    for chosen, captured in (
        ([row for row in rows if row.name not in OUTER], inner),
        ([row for row in rows if row.name in OUTER], outer),
    ):
        requests = [_request(engine, 1, captured, row.writes) for row in chosen]
        results = engine.run(requests) if requests else []
        plain = next((dict(r.capture) for row, r in zip(chosen, results, strict=True) if row.name not in STARTS), {})
        for row, result in zip(chosen, results, strict=True):
            for write in row.writes:
                found, read = _around(engine, write, dict(result.capture), plain)
                claims += found
                if not read and write.at.head is None:
                    unread.append((row, write, result.capture))
    return claims + _functions(engine, unread)


def _request(engine: LocalEngine, seed: int, capture: Sequence[Address], writes: Sequence[Write]) -> Request:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, engine.model.d_vocab, (N_POS,), generator=generator).tolist()
    return Request(tokens, capture=capture, edits=writes)


def _rows(engine: LocalEngine) -> list[Row]:
    rows = []
    for point in POINTS.values():
        layers = range(engine.model.n_layers) if point.per_layer else [None]
        places = [a for a in (Address(point.name, layer) for layer in layers) if engine.support(a).writable]
        rows.append(Row(point.name, tuple(Write(address) for address in places)))
        if engine.model.n_streams > 1 and point.name == "resid_pre":
            one = [Address(point.name, i, stream=i % engine.model.n_streams) for i in range(engine.model.n_layers)]
            rows.append(Row(point.name, tuple(Write(address) for address in one if engine.support(address).writable)))
        if point.has_heads:
            rows.append(Row(point.name, tuple(Write(_one_head(engine.anatomy, address)) for address in places)))
    return [row for row in rows if row.writes]


def _one_head(anatomy: Anatomy, address: Address) -> Address:
    """A head of the point, another one in each layer."""
    layer = address.layer or 0
    mixer = anatomy.blocks[layer].mixer
    assert isinstance(mixer, Mixer)
    heads = mixer.n_kv_heads if "kv_heads" in POINTS[address.name].shape else mixer.n_heads
    return replace(address, head=layer % heads)


def _around(engine: LocalEngine, write: Write, captured: Captured, plain: Captured) -> tuple[list[Claim], bool]:
    """The claims about one write, and whether an equation computes something from the point."""
    anatomy, at, read = engine.anatomy, write.at, False
    one = "one head of " if at.head is not None else "one stream of " if at.stream is not None else ""
    name = one + at.name
    claims = list(_claim(anatomy, at, f"{name} reads back as written", _read_back(engine, write, captured)))
    undone = dict(captured) | {_held(at): _undone(captured[_held(at)], at, write.before[0])}
    with_v, with_b = (list(_equations(anatomy, at, tensors, plain)) for tensors in (captured, undone))
    beside: list[Claim] = []
    for (_, text, _, sides), (_, _, _, other) in zip(with_v, with_b, strict=True):
        if sides is None or other is None:
            continue
        gives = not torch.equal(sides.right, other.right)
        if not torch.equal(sides.left, other.left) and not (sides.fitted and gives):
            claims += _claim(anatomy, at, f"{text}, with {name} written", sides)
            read = True
        elif gives:
            claims += _claim(anatomy, at, f"{text}, but for what was written at {name}", other)
        else:
            beside += _claim(anatomy, at, f"{text}, beside what was written at {name}", sides)
    claims += sorted(beside, key=lambda claim: claim.difference / claim.tolerance)[-1:]
    return claims, read


def _claim(anatomy: Anatomy, at: Address, text: str, sides: Sides | None) -> Iterator[Claim]:
    yield from judged(anatomy, at.layer, ("P7", text, at.name, sides))


def _read_back(engine: LocalEngine, write: Write, captured: Captured) -> Sides:
    at, (value,) = write.at, write.value
    tap = engine.anatomy.tap(_held(at))
    place = tap if isinstance(tap, Refusal) else place_of(engine.anatomy, at.whole, tap)
    magnitude = value.double().abs()
    if isinstance(place, Place) and place.stream is not None:
        magnitude = magnitude + captured[Address("resid_pre", at.layer)].double().abs()
    read = captured[at] if at.stream is not None else select(captured[at.whole], at)
    return Sides(value.double(), read.double(), magnitude, 4)


def _held(at: Address) -> Address:
    """The address under which what was written is captured."""
    return at if at.stream is not None else at.whole


def _undone(held: Tensor, at: Address, before: Tensor) -> Tensor:
    if at.head is None:
        return before
    held = held.clone()
    held[at.head if POINTS[at.name].matrix else (slice(None), at.head)] = before
    return held


def _equations(anatomy: Anatomy, at: Address, captured: Captured, plain: Captured) -> Iterator[Equation]:
    """Those in which the point may stand."""
    get, last = reader(anatomy, captured), len(anatomy.blocks) - 1
    if at.name in STARTS and at.layer in (0, None):
        yield from embedding_equations(anatomy, [captured, plain])
    if at.name == "adapter_out":
        yield from boundary_equations(anatomy, get, next(iter(anatomy.bridges)))
    if at.layer is None:
        yield from final_norm_equations(anatomy, get)
        yield from _head_equations(anatomy, captured) if at.name in OUTER else ()
        return
    if at.layer > 0:
        yield from boundary_equations(anatomy, get, at.layer - 1)
    yield from block_equations_at(anatomy, get, at.layer)
    if at.name != "resid_pre":  # it is written in the next layer, too
        yield from boundary_equations(anatomy, get, at.layer)
    if at.name == "resid_post" and at.layer == last:
        yield from final_norm_equations(anatomy, get)


def _head_equations(anatomy: Anatomy, captured: Captured) -> Iterator[Equation]:
    """P4 link by link, each from what was captured before it."""
    head, get = anatomy.head, reader(anatomy, captured)
    norm, own, logits = get("final_norm"), get("lm_head"), get("logits")
    if isinstance(head, Refusal) or own is None:
        return
    if norm is not None:
        left, magnitude, widest = unembedded(head, norm)
        yield "P4", "W final_norm + b = lm_head", "final_norm lm_head", Sides(left, own, magnitude, widest)
    if logits is not None:
        magnitude = own.abs() * abs(head.scale) + logits.abs()
        yield "P4", "scale and cap of lm_head = logits", "lm_head logits", Sides(head.logits(own), logits, magnitude, 4)


def _reads_tokens(anatomy: Anatomy, at: Address) -> bool:
    """Whether the MLP that reads the point is handed the token ids, too."""
    mlp = anatomy.blocks[at.layer or 0].mlp
    return at.name == "mlp_in" and not isinstance(mlp, Refusal) and mlp.by_token


def _functions(engine: LocalEngine, unread: Sequence[tuple[Row, Write, Capture]]) -> list[Claim]:
    """The same writes on another prompt: what follows from the point alone must be the same."""
    rows: dict[int, list[tuple[Write, Capture, Address]]] = {}
    for row, write, captured in unread:
        after = None if _reads_tokens(engine.anatomy, write.at) else FOLLOWS.get(write.at.name)
        after = Address(after, write.at.layer) if isinstance(after, str) else after
        if after is not None and engine.support(after).readable:
            rows.setdefault(id(row), []).append((write, captured, after))
    capture = list(dict.fromkeys(after for row in rows.values() for _, _, after in row))
    requests = [_request(engine, 2, capture, [write for write, _, _ in row]) for row in rows.values()]
    claims: list[Claim] = []
    for row, result in zip(rows.values(), engine.run(requests), strict=True):
        for write, captured, after in row:
            left, right = captured[after].double(), result.capture[after].double()
            magnitude = left.abs().amax(-1, keepdim=True).expand_as(left)
            sides = Sides(left, right, magnitude, left.shape[-1])
            claims += _claim(engine.anatomy, write.at, f"{after.name} follows from {write.at.name} as written", sides)
    return claims
