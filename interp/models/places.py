"""Which points the inputs and outputs of every module are: one recorded pass, for the translation of names."""

from collections import defaultdict
from itertools import takewhile
from typing import Literal

import torch
from torch import Tensor, nn

from interp.models.anatomy import Anatomy, Block, Mixer, Neurons, Projection, Refusal, Sublayer, Tap
from interp.models.norms import Norm
from interp.models.probe import Call, Key, Trace
from interp.models.resolve import N_POS, probe_pass
from interp.models.transforms import Channels, HeadsFirst, OneHead, Step
from interp.names.layout import BlockFacts, Held, Layout, NormFacts, Place, Side
from interp.points import POINTS, Address, ModelInfo

RANK = {name: rank for rank, name in enumerate(POINTS)}


def layout_of(anatomy: Anatomy, info: ModelInfo) -> Layout:
    """The Layout of a resolved model, from one pass over a few random tokens."""
    model = anatomy.model
    trace, _ = probe_pass(model, info.d_vocab)
    taps, refused = _every_tap(anatomy)
    calls = {path: calls[0] for path, _ in model.named_modules() if len(calls := trace.calls_of(path)) == 1}
    head, start = anatomy.lm_head, anatomy.start
    return Layout(
        model=info.name,
        blocks=tuple(_block(trace, block) for block in anatomy.blocks),
        held=_held(trace, calls, taps, [block.path for block in anatomy.blocks]),
        paths=frozenset(path for path, _ in model.named_modules() if path),
        first={path: key for path, call in calls.items() if (key := next(iter(call.inputs), None)) is not None},
        where={address: _where(tap) for address, tap in taps.items()},
        refused=refused,
        base=_base(model),
        embedding=anatomy.embeddings.path,
        start_norm=None if isinstance(start, Refusal) or start.norm is None else start.norm.path,
        final_norm=_norm(anatomy.final_norm),
        head=None if isinstance(head, Refusal) else head.path,
    )


def _every_tap(anatomy: Anatomy) -> tuple[dict[Address, Tap], dict[Address, str]]:
    taps, refused = {}, {}
    for point in POINTS.values():
        for layer in range(len(anatomy.blocks)) if point.per_layer else [None]:
            address = Address(point.name, layer)
            tap = anatomy.tap(address)
            if isinstance(tap, Refusal):
                nearest = f"; nearest: {', '.join(tap.nearest)}" if tap.nearest else ""
                refused[address] = f"{tap.reason}{nearest}"
            else:
                taps[address] = tap
    return taps, refused


def _held(
    trace: Trace, calls: dict[str, Call], taps: dict[Address, Tap], blocks: list[str]
) -> dict[Place, tuple[Held, ...]]:
    """Points by place: a place holds a point if it has the elements of the point's own place, in the same order."""
    homes: dict[int, list[tuple[Address, Tap]]] = defaultdict(list)
    for address, tap in taps.items():
        call = calls.get(tap.path)
        node = None if call is None or tap.side not in ("input", "output") else _node(call, tap)
        if node is not None and all(_keeps_every_element(step, trace.value[node]) for step in tap.steps):
            homes[trace.root(node)].append((address, tap))
    held: dict[Place, tuple[Held, ...]] = {}
    for path, call in calls.items():
        sides: tuple[tuple[Side, dict[Key, int]], ...] = (("input", call.inputs), ("output", call.outputs))
        for side, nodes in sides:
            for key, node in nodes.items():
                found = homes.get(trace.root(node), [])
                ordered = sorted(found, key=lambda item: _strangeness(*item, path, side, blocks))
                if ordered:
                    value = trace.value[node]
                    held[Place(path, side, key)] = tuple(Held(a, _note(value, a, taps[a], trace)) for a, _ in ordered)
    return held


def _node(call: Call, tap: Tap) -> int | None:
    nodes = call.inputs if tap.side == "input" else call.outputs
    return nodes.get(tap.key, next(iter(nodes.values()), None))


def _keeps_every_element(step: Step, value: Tensor) -> bool:
    """Whether a step only names axes anew: a slice of a fused projection or a scaled tensor is not its module's own."""
    if isinstance(step, Channels):
        return torch.equal(step.index.flatten().cpu(), torch.arange(value.shape[-1]))
    return isinstance(step, (HeadsFirst, OneHead))


def _strangeness(address: Address, tap: Tap, path: str, side: str, blocks: list[str]) -> tuple[bool, bool, int, int]:
    """Sorts the points of one tensor: the one at home here, in this layer, nearest in the module tree, in the table."""
    elsewhere = (tap.path, tap.side) != (path, side)
    inside = address.layer is not None and f"{path}.".startswith(f"{blocks[address.layer]}.")
    in_block = any(f"{path}.".startswith(f"{block}.") for block in blocks)
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(tap.path.split("."), path.split("."), strict=False))
    rank = len(RANK) if address.name == "resid_mid" else RANK[address.name]  # read at the MLP's input, where no norm is
    return elsewhere, inside != in_block, -len(list(shared)), rank


def _note(value: Tensor, address: Address, tap: Tap, trace: Trace) -> str:
    """How the axes of `value` differ from [batch, pos, *the point's], in words."""
    heads = POINTS[address.name].has_heads
    if value.ndim == 2 and value.shape[0] == N_POS:
        return "batch and position are one axis there"
    if heads and value.ndim == 3:
        return "heads are joined there: [batch, pos, heads x d_head]"
    if heads and value.ndim == 4 and value.shape[2] == N_POS and value.shape[1] != N_POS:
        return "heads come before positions there: [batch, heads, pos, d_head]"
    return ""


def _where(tap: Tap) -> str:
    place = f"{tap.path or 'model'} {tap.side}"
    return f"{place}, {tap.transform}" if tap.transform else place


def _base(model: nn.Module) -> str:
    prefix = str(getattr(model, "base_model_prefix", ""))
    return prefix if prefix and any(path == prefix for path, _ in model.named_modules()) else ""


def _norm(norm: Norm | Refusal | None) -> NormFacts | None:
    return NormFacts(norm.path, norm.centred) if isinstance(norm, Norm) else None


def _block(trace: Trace, block: Block) -> BlockFacts:
    attn = block.attn if isinstance(block.attn, Sublayer) else None
    mlp = block.mlp if isinstance(block.mlp, Sublayer) else None
    mixer = block.mixer if isinstance(block.mixer, Mixer) else None
    neurons = block.neurons if isinstance(block.neurons, Neurons) else None
    parts = [p for p in (mixer.query, mixer.key, mixer.value) if isinstance(p, Projection)] if mixer else []
    return BlockFacts(
        path=block.path,
        parallel=block.parallel,
        attn=_one_module(attn),
        mlp=_one_module(mlp),
        attn_pre_norm=_norm(attn.pre_norm) if attn else None,
        attn_post_norm=_norm(attn.post_norm) if attn else None,
        mlp_pre_norm=_norm(mlp.pre_norm) if mlp else None,
        mlp_post_norm=_norm(mlp.post_norm) if mlp else None,
        dense=neurons is not None,
        gated=neurons is not None and not isinstance(neurons.pre_linear, Refusal),
        fused=len(parts) > 1 and parts[0].linear.path == parts[-1].linear.path,
        direct=len(parts) == 3 and all(part.of_input for part in parts),
        rotation="none" if mixer is None else _rotation(trace, mixer),
        one_key_head=mixer is not None and mixer.n_kv_heads == 1 < mixer.n_heads,
    )


def _one_module(sublayer: Sublayer | None) -> str | None:
    """The sublayer's module, where one module reads and returns everything."""
    if sublayer is None or isinstance(sublayer.read, Refusal):
        return None
    if not f"{sublayer.read.path}.".startswith(f"{sublayer.path}."):
        return None
    return sublayer.path


def _rotation(trace: Trace, mixer: Mixer) -> Literal["none", "halves", "other"]:
    """How the query is rotated, from the pair of cosines and sines that the attention module was called with."""
    calls, events = trace.calls_of(mixer.path), trace.calls_of(f"{mixer.path}@attention")
    rotated = trace.value[events[0].inputs["query"]] if events else None
    values = [*calls[0].args, *calls[0].kwargs.values()] if calls else []
    pairs = [v for v in values if isinstance(v, tuple) and len(v) == 2 and all(isinstance(t, Tensor) for t in v)]
    plain = mixer.query.tap if isinstance(mixer.query, Projection) else mixer.query
    before = mixer.q_norm_tap if isinstance(mixer.q_norm_tap, Tap) else plain
    if not pairs or rotated is None or isinstance(before, Refusal):
        return "none"
    node = _node(trace.calls_of(before.path)[0], before)
    if node is None:
        return "other"
    query = before.read(trace.value[node]).transpose(1, 2)
    cos, sin = (t.reshape(*t.shape[:-2], 1, *t.shape[-2:])[..., : query.shape[-1]] for t in pairs[0])
    width = cos.shape[-1]
    if width % 2 or cos.shape[-2] != query.shape[-2]:
        return "other"
    left, right, rest = query[..., : width // 2], query[..., width // 2 : width], query[..., width:]
    turned = query[..., :width] * cos + torch.cat([-right, left], -1) * sin
    difference = (torch.cat([turned, rest], -1) - rotated).abs().amax()
    return "halves" if difference <= 64 * torch.finfo(query.dtype).eps * query.abs().amax() else "other"
