"""From an Address to its Tap: one line per point, given the roles in the Anatomy."""

from collections.abc import Callable
from typing import TypeVar

from interp.models.anatomy import Anatomy, Block, Mixer, Refusal, Sublayer, Tap
from interp.models.norms import Norm
from interp.models.transforms import EveryNth, HeadOutputs, HeadsFirst, Normalized, NormScale
from interp.points import POINTS, STREAM_POINTS, Address

Role = TypeVar("Role")
NO_NORM = "no norm stands there in this model"
ONE_STREAM = "this trunk is one stream, without hyper-connections"


def tap_of(anatomy: Anatomy, address: Address) -> Tap | Refusal:
    """The Tap of `address`, or the Refusal that says why there is none."""
    if address.layer is None:
        return _trunk_tap(anatomy, address.name)
    if (refusal := _of_streams(anatomy, address)) is not None:
        return refusal
    if address.layer >= len(anatomy.blocks):
        return Refusal(
            f"the model has layers 0 to {len(anatomy.blocks) - 1}", (f"{address.name}.{len(anatomy.blocks) - 1}",)
        )
    block = anatomy.blocks[address.layer]
    found = _block_tap(block, address.name)
    if address.head is not None and isinstance(found, Tap) and isinstance(block.mixer, Mixer):
        heads = block.mixer.n_kv_heads if "kv_heads" in POINTS[address.name].shape else block.mixer.n_heads
        if address.head >= heads:
            return Refusal(f"the point has heads 0 to {heads - 1}", (f"{address.whole}.head-{heads - 1}",))
    if isinstance(found, Refusal):
        return Refusal(found.reason, tuple(f"{name}.{address.layer}" for name in found.nearest))
    return found


def _of_streams(anatomy: Anatomy, address: Address) -> Refusal | None:
    """Why the address does not fit a trunk of as many streams as this one has."""
    n, at = anatomy.n_streams, f".{address.layer}"
    if n == 1 and address.stream is not None:
        return Refusal("this trunk is one stream, not several", (str(address.whole),))
    if address.stream is not None and address.stream >= n:
        return Refusal(f"the trunk has streams 0 to {n - 1}", (f"{address.whole}.stream-{n - 1}",))
    if n > 1 and address.stream is None and address.name in STREAM_POINTS:
        return Refusal(f"this trunk carries {n} streams: name one", (f"{address}.stream-0", "resid_streams" + at))
    return None


def _trunk_tap(anatomy: Anatomy, name: str) -> Tap | Refusal:
    match name:
        case "embeddings":
            return anatomy.embeddings
        case "final_norm":
            return anatomy.final_norm_output
        case "final_normalized":
            return _normalized(anatomy.final_norm, anatomy.final_norm_input, Normalized)
        case "final_norm_scale":
            return _normalized(anatomy.final_norm, anatomy.final_norm_input, NormScale)
        case "lm_head":
            return anatomy.lm_head
        case "adapter_out":
            return _adapter_out(anatomy)
        case _:
            return anatomy.logits


def _adapter_out(anatomy: Anatomy) -> Tap | Refusal:
    if len(anatomy.bridges) == 1:
        return next(iter(anatomy.bridges.values())).output
    if not anatomy.bridges:
        return Refusal("the blocks of this model are one group, with no adapter between them", ("embeddings",))
    after = tuple(f"resid_pre.{layer + 1}" for layer in anatomy.bridges)
    return Refusal(f"{len(after)} adapters stand between the groups of this model's blocks", after)


def _block_tap(block: Block, name: str) -> Tap | Refusal:
    attn, mlp, mixer, neurons = block.attn, block.mlp, block.mixer, block.neurons
    match name:
        case "resid_pre":
            return block.input
        case "resid_mid":
            return block.mid
        case "resid_post":
            return block.output
        case "attn_in":
            return _part(attn, lambda s: s.read)
        case "attn_out":
            return _part(attn, lambda s: s.raw)
        case "attn_out_post":
            return _part(attn, lambda s: s.contribution)
        case "mlp_in":
            return _part(mlp, lambda s: s.read)
        case "mlp_out":
            return _part(mlp, lambda s: s.raw)
        case "mlp_out_post":
            return _part(mlp, lambda s: s.contribution)
        case "attn_normalized":
            return _part(attn, lambda s: _normalized(s.pre_norm, s.pre_norm_input, Normalized, s.unknown))
        case "attn_norm_scale":
            return _part(attn, lambda s: _normalized(s.pre_norm, s.pre_norm_input, NormScale, s.unknown))
        case "attn_post_normalized":
            return _part(attn, lambda s: _normalized(s.post_norm, s.post_norm_input, Normalized))
        case "attn_post_norm_scale":
            return _part(attn, lambda s: _normalized(s.post_norm, s.post_norm_input, NormScale))
        case "mlp_normalized":
            return _part(mlp, lambda s: _normalized(s.pre_norm, s.pre_norm_input, Normalized, s.unknown))
        case "mlp_norm_scale":
            return _part(mlp, lambda s: _normalized(s.pre_norm, s.pre_norm_input, NormScale, s.unknown))
        case "mlp_post_normalized":
            return _part(mlp, lambda s: _normalized(s.post_norm, s.post_norm_input, Normalized))
        case "mlp_post_norm_scale":
            return _part(mlp, lambda s: _normalized(s.post_norm, s.post_norm_input, NormScale))
        case "query":
            return _part(mixer, lambda m: _part(m.query, lambda p: p.tap))
        case "key":
            return _part(mixer, lambda m: _part(m.key, lambda p: p.tap))
        case "value":
            return _part(mixer, lambda m: _part(m.value, lambda p: p.tap))
        case "q_norm_in" | "q_norm_out":
            return _part(mixer, lambda m: _side(m.q_norm_tap, name))
        case "k_norm_in" | "k_norm_out":
            return _part(mixer, lambda m: _side(m.k_norm_tap, name))
        case "query_rot":
            return _part(mixer, lambda m: _rotated(m, "query"))
        case "key_rot":
            return _part(mixer, lambda m: _rotated(m, "key"))
        case "attn_scores" | "attn_probs":
            return _part(mixer, lambda m: Tap(m.path, m.module, m.side, name.removeprefix("attn_")))
        case "z":
            return _part(mixer, lambda m: m.z)
        case "attn_gate":
            return _part(mixer, lambda m: _part(m.gate, lambda gate: gate.tap))
        case "head_out":
            return _part(mixer, _head_out)
        case "mlp_act":
            return _part(neurons, lambda n: n.act)
        case "mlp_pre":
            return _part(neurons, lambda n: n.pre)
        case "extra_out_post":
            return block.extra
        case "mlp_pre_linear":
            return _part(neurons, lambda n: n.pre_linear)
        case "router_logits":
            return _part(block.routing, lambda r: r.logits)
        case "expert_weights":
            return _part(block.routing, lambda r: r.weights)
        case "expert_indices":
            return _part(block.routing, lambda r: r.indices)
        case "expert_out":
            return _part(block.routing, lambda r: r.shares)
        case "resid_streams":
            return block.output if _stacked(block) else Refusal(ONE_STREAM, ("resid_post",))
        case "attn_stream_collapse" | "attn_stream_write" | "attn_stream_mix":
            return _part(attn, lambda s: _on_stack(s, name))
        case "mlp_stream_collapse" | "mlp_stream_write" | "mlp_stream_mix":
            return _part(mlp, lambda s: _on_stack(s, name))
        case _:
            return Refusal("this block has nothing of that kind", ("mlp_out", "resid_post"))


def _stacked(block: Block) -> bool:
    return any(isinstance(s, Sublayer) and s.stack is not None for s in (block.attn, block.mlp))


def _on_stack(sublayer: Sublayer, name: str) -> Tap | Refusal:
    if sublayer.stack is None:
        return Refusal(ONE_STREAM, ("resid_pre", "resid_post"))
    return {"collapse": sublayer.stack.collapse, "write": sublayer.stack.write, "mix": sublayer.stack.mix}[
        name.rpartition("_")[2]
    ]


def _part(role: Role | Refusal, choose: Callable[[Role], Tap | Refusal]) -> Tap | Refusal:
    return role if isinstance(role, Refusal) else choose(role)


def _normalized(
    norm: Norm | Refusal | None,
    source: Tap | Refusal | None,
    step: type[Normalized] | type[NormScale],
    unknown: str = "",
) -> Tap | Refusal:
    if isinstance(norm, Refusal):
        return norm
    if norm is None or source is None or isinstance(source, Refusal):
        return Refusal(unknown or NO_NORM)
    return source.then(step(norm))


def _side(tap: Tap | Refusal, name: str) -> Tap | Refusal:
    if isinstance(tap, Refusal):
        return tap
    if name.endswith("_in"):
        return Tap(tap.path, tap.module, "input", 0, tap.steps)
    return Tap(tap.path, tap.module, "output", None, tap.steps)


def _rotated(mixer: Mixer, name: str) -> Tap | Refusal:
    if mixer.scaling is None and mixer.side == "softmax":
        return Refusal("this attention module multiplies queries and keys inside, where nothing shows them", (name,))
    tap = Tap(mixer.path, mixer.module, mixer.side, name, (HeadsFirst(),))
    return tap.then(EveryNth(mixer.key_repeats)) if name == "key" and mixer.key_repeats > 1 else tap


def _head_out(mixer: Mixer) -> Tap | Refusal:
    if isinstance(mixer.z, Refusal):
        return mixer.z
    if isinstance(mixer.output, Refusal):
        return mixer.output
    if mixer.output.refusal:
        return Refusal(mixer.output.refusal, ("z", "attn_out"))
    return mixer.z.then(HeadOutputs(mixer.output, mixer.n_heads))
