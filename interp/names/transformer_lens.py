"""TransformerLens' hook names: `transformer_lens` is its bridge (3.x), `transformer_lens_legacy` the HookedTransformer
of 2.x without folding or centring.

A hook name is a place in a component of TransformerLens, and its components are filled from the model's own modules:
what a name means follows from which norm, projection or sublayer the model has there. Read from the sources of
transformer-lens 3.9.0 (`model_bridge/generalized_components`) and 2.16.1 (`components`), and tested against what the
former caches.
"""

import re
from collections.abc import Callable, Iterator

from interp.names.answer import Answer, NameRefused, depends, from_module, served
from interp.names.layout import BlockFacts, Layout, NormFacts
from interp.points import Address

Rule = Callable[[Layout, BlockFacts, int, str], Answer]

EVERYWHERE = {
    "hook_resid_pre": "resid_pre",
    "hook_resid_mid": "resid_mid",
    "hook_resid_post": "resid_post",
    "hook_attn_out": "attn_out_post",
    "hook_mlp_out": "mlp_out_post",
    "attn.hook_z": "z",
    "attn.hook_pattern": "attn_probs",
}
"""Names of both generations with one meaning on every family."""
BRIDGE_EVERYWHERE = {
    "hook_in": "resid_pre",
    "hook_out": "resid_post",
    "attn.hook_in": "attn_in",
    "mlp.hook_in": "mlp_in",
    "attn.o.hook_in": "z",
    "attn.o.hook_out": "attn_out",
    "attn.q_norm.hook_in": "q_norm_in",
    "attn.q_norm.hook_out": "q_norm_out",
    "attn.hook_q_normed": "q_norm_out",
    "attn.k_norm.hook_in": "k_norm_in",
    "attn.k_norm.hook_out": "k_norm_out",
    "attn.hook_k_normed": "k_norm_out",
}
HEAD_NORMS = ("q_norm_in", "q_norm_out", "k_norm_in", "k_norm_out")
"""Points whose axes the bridge orders in its own way."""
LEGACY_EVERYWHERE = {
    "attn.hook_q": "query",
    "attn.hook_k": "key",
    "attn.hook_v": "value",
    "attn.hook_attn_scores": "attn_scores",
}
LEGACY_STREAM = {
    "hook_attn_in": "use_attn_in",
    **{f"hook_{x}_input": "use_split_qkv_input" for x in ("q", "k", "v")},
}
"""Names of 2.x for the stream before the norm, one copy per head, and the switch that makes them exist."""
NO_POINT = {
    "attn.hook_cos": ("the rotation's cosines are no point", "query_rot, key_rot"),
    "attn.hook_sin": ("the rotation's sines are no point", "query_rot, key_rot"),
    "attn.q_norm.hook_scale": ("the denominator of the query's norm is no point", "q_norm_in, q_norm_out"),
    "attn.k_norm.hook_scale": ("the denominator of the key's norm is no point", "k_norm_in, k_norm_out"),
    "attn.q_norm.hook_normalized": ("the query before its norm's gain is no point", "q_norm_in, q_norm_out"),
    "attn.k_norm.hook_normalized": ("the key before its norm's gain is no point", "k_norm_in, k_norm_out"),
    "mlp.hook_router_scores": ("the router's scores are no point", "router_logits, expert_weights"),
    "mlp.hook_expert_weights": ("the softmax over all experts is no point", "router_logits, expert_weights"),
}
"""Names that never have an equivalent: why, and what comes nearest in the same layer."""
TRUNK_NO_POINT = {
    "embed.hook_in": "the token ids are no point; nearest: embeddings",
    "hook_tokens": "the token ids are no point; nearest: embeddings",
    "pos_embed.hook_in": "the positions are no point; nearest: resid_pre.0",
    "pos_embed.hook_out": "the position embedding is no point; nearest: embeddings, resid_pre.0",
    "hook_pos_embed": "the position embedding is no point; nearest: embeddings, resid_pre.0",
    "rotary_emb.hook_in": "what the rotation is computed from only lends its dtype and device; nearest: resid_pre.0",
    "rotary_emb.hook_cos": "the rotation's cosines are no point; nearest: query_rot.0, key_rot.0",
    "rotary_emb.hook_sin": "the rotation's sines are no point; nearest: query_rot.0, key_rot.0",
    "embed_ln.hook_normalized": "the norm of the embeddings has no points; nearest: embeddings, resid_pre.0",
    "embed_ln.hook_scale": "the norm of the embeddings has no points; nearest: embeddings, resid_pre.0",
}
LAYER_NORM = "a LayerNorm of 2.x fires it after gain and bias; the same class in 3.x before them"
NORM_HOOKS = ("hook_in", "hook_out", "hook_normalized", "hook_scale")
SLOTS = ("ln1", "ln1_post", "ln2", "ln2_post")


def _point(point: str, note: str = "") -> Rule:
    return lambda layout, block, layer, name: Answer(Address(point, layer), note)


def _output_of(sublayer: str) -> Rule:
    """The sublayer's module, which on some families adds the residual inside."""

    def rule(layout: Layout, block: BlockFacts, layer: int, name: str) -> Answer:
        path = block.attn if sublayer == "attn" else block.mlp
        if path is None:
            raise NameRefused(
                f"{name!r} is no point: {block.path} has no one module there; nearest: resid_post.{layer}."
            )
        return from_module(layout, path, "output", name)

    return rule


def _norm(block: BlockFacts, slot: str, legacy: bool) -> tuple[str, NormFacts] | str:
    """The role and the norm of one of TransformerLens' four slots, or why it is empty."""
    pre, post = (
        (block.attn_pre_norm, block.attn_post_norm) if slot[2] == "1" else (block.mlp_pre_norm, block.mlp_post_norm)
    )
    role = "attn" if slot[2] == "1" else "mlp"
    if slot.endswith("_post"):
        return (f"{role}_post", post) if pre is not None and post is not None else "this block has no such norm"
    if pre is None and post is not None:
        if legacy:
            return "2.x has no blocks whose only norms stand behind the sublayers"
        return f"{role}_post", post
    if pre is None:
        return "this block has no such norm"
    if slot == "ln2" and block.shared_norm and not legacy:
        return "attention and MLP read one norm here, which TransformerLens calls ln1"
    return role, pre


def _norm_rule(slot: str, hook: str, legacy: bool) -> Rule:
    def rule(layout: Layout, block: BlockFacts, layer: int, name: str) -> Answer:
        found = _norm(block, slot, legacy)
        if isinstance(found, str):
            raise NameRefused(f"{name!r} is no point: {found}; nearest: attn_in.{layer}, mlp_in.{layer}.")
        role, norm = found
        if hook == "hook_scale":
            return Answer(Address(f"{role}_norm_scale", layer))
        if hook == "hook_normalized":
            if not legacy or not norm.centred:
                return Answer(Address(f"{role}_normalized", layer))
            answer = from_module(layout, norm.path, "output", name)
            return answer._replace(note=LAYER_NORM)
        return from_module(layout, norm.path, "input" if hook == "hook_in" else "output", name)

    return rule


def _projection(point: str) -> Rule:
    """Query, key or value of the bridge, which splits fused projections itself."""

    def rule(layout: Layout, block: BlockFacts, layer: int, name: str) -> Answer:
        address = Address(point, layer)
        served(layout, name, Answer(address))
        if not block.direct:
            raise NameRefused(
                f"{name!r} is no point: this attention makes its heads from a latent, and the bridge shows them "
                f"at another step; nearest: {address}."
            )
        if block.fused and block.one_key_head:
            raise NameRefused(
                f"{name!r} is no point: where one key head is fused with the queries, the bridge splits them by a rule "
                f"that does not fit every such family; nearest: {address}."
            )
        return Answer(address)

    return rule


def _of_input(layout: Layout, block: BlockFacts, layer: int, name: str) -> Answer:
    if not block.direct:
        raise NameRefused(f"{name!r} is no point: this attention projects a latent; nearest: attn_in.{layer}.")
    return Answer(Address("attn_in", layer))


def _recomputed(point: str, legacy: bool = False) -> Rule:
    """Scores and rotated heads, which the bridge computes beside the model where it knows the attention's form."""

    def rule(layout: Layout, block: BlockFacts, layer: int, name: str) -> Answer:
        answer = served(layout, name, Answer(Address(point, layer)))
        if point == "attn_scores":
            if block.rotation == "other" or not (block.fused or block.rotation == "halves"):
                raise NameRefused(
                    f"{name!r} is not {answer.address} here: the bridge runs this attention as it is and fires the "
                    f"hook on the probabilities, or rotates by a rule of its own; nearest: attn_probs.{layer}."
                )
            return answer._replace(note="masked entries may hold another large negative number")
        if block.rotation != "halves" or not block.direct or (block.fused and not legacy):
            raise NameRefused(
                f"{name!r} is not {answer.address} here: it is where projections are turned by halves, with cosines "
                f"and sines that the attention receives (the bridge: if they are separate); nearest: query.{layer}."
            )
        return answer

    return rule


def _hidden_states(layout: Layout, block: BlockFacts, layer: int, name: str) -> Answer:
    if not block.fused:
        raise NameRefused(
            f"{name!r} exists only where one projection gives query, key and value; see attn_out.{layer}."
        )
    return _output_of("attn")(layout, block, layer, name)


def _neurons(dense: str, sparse: Rule | None, gated: bool | None = None, mixed: bool | None = None) -> Rule:
    """A part of an MLP: on neurons a point, on experts another or none."""

    def rule(layout: Layout, block: BlockFacts, layer: int, name: str) -> Answer:
        if not block.dense and sparse is not None:
            return sparse(layout, block, layer, name)
        if not block.dense or (gated is not None and block.gated != gated):
            kind = "one branch" if block.dense else "experts"
            raise NameRefused(f"{name!r} is no point: this MLP has {kind}; nearest: mlp_in.{layer}, mlp_out.{layer}.")
        if mixed is not None and mixed != any(not other.dense for other in layout.blocks):
            spelling = "dense_in, dense_gate and dense_out" if not mixed else "in, gate and out"
            raise NameRefused(f"{name!r} does not exist: on this model the parts are called {spelling}.")
        branch = "mlp_pre_linear" if block.gated else "mlp_pre"
        address = Address(branch if dense == "mlp_pre_linear or mlp_pre" else dense, layer)
        return Answer(address, layout.note(address))

    return rule


def _router(layout: Layout, block: BlockFacts, layer: int, name: str) -> Answer:
    answer = served(layout, name, Answer(Address("router_logits", layer)))
    return answer._replace(note="batch and position are one axis there")


def _mlp_branch(layout: Layout, block: BlockFacts, layer: int, name: str) -> Answer:
    note = "exists once use_hook_mlp_in is set"
    if block.shared_norm:
        raise NameRefused(f"{name!r} is no point: the bridge has no ln2 in this block; nearest: resid_pre.{layer}.")
    if block.mlp_pre_norm is None:
        return Answer(Address("mlp_in", layer), note)
    return Answer(Address("resid_pre" if block.parallel else "resid_mid", layer), note)


def _legacy_mlp_in(layout: Layout, block: BlockFacts, layer: int, name: str) -> Answer:
    return Answer(Address("resid_pre" if block.parallel else "resid_mid", layer), "exists once use_hook_mlp_in is set")


def _attn_branch(flag: str) -> Rule:
    def rule(layout: Layout, block: BlockFacts, layer: int, name: str) -> Answer:
        if block.attn_pre_norm is None or not block.direct:
            raise NameRefused(
                f"{name!r} is no point: the bridge taps it before ln1, which does not stand before this attention; "
                f"nearest: resid_pre.{layer}, attn_in.{layer}."
            )
        return Answer(Address("resid_pre", layer), f"repeated for every head; exists once {flag} is set")

    return rule


BRIDGE: dict[str, tuple[Rule, str]] = {
    "attn.hook_out": (_output_of("attn"), "whether the attention module adds the residual inside (BLOOM)"),
    "attn.hook_hidden_states": (_hidden_states, "whether one projection gives query, key and value"),
    "mlp.hook_out": (_output_of("mlp"), "whether the MLP module adds the residual inside (BLOOM, MPT)"),
    "attn.hook_q": (_projection("query"), "how the query is projected"),
    "attn.q.hook_out": (_projection("query"), "how the query is projected"),
    "attn.hook_k": (_projection("key"), "how the key is projected"),
    "attn.k.hook_out": (_projection("key"), "how the key is projected"),
    "attn.hook_v": (_projection("value"), "how the value is projected"),
    "attn.v.hook_out": (_projection("value"), "how the value is projected"),
    **{f"attn.{x}.hook_in": (_of_input, "whether the projections read a latent") for x in "qkv"},
    "attn.hook_rot_q": (_recomputed("query_rot"), "the kind of attention"),
    "attn.hook_rot_k": (_recomputed("key_rot"), "the kind of attention"),
    "attn.hook_attn_scores": (_recomputed("attn_scores"), "the kind of attention"),
    "mlp.hook_pre": (_neurons("mlp_pre", _point("mlp_in")), "whether the block has neurons or experts"),
    "mlp.hook_post": (_neurons("mlp_act", _output_of("mlp")), "whether the block has neurons or experts"),
    "mlp.hook_pre_linear": (_neurons("mlp_pre_linear", None, gated=True), "whether the block has neurons or experts"),
    "mlp.gate.hook_in": (
        _neurons("mlp_in", _point("mlp_in", "batch and position are one axis there"), gated=True, mixed=False),
        "whether the block has neurons or experts",
    ),
    "mlp.gate.hook_out": (
        _neurons("mlp_pre", _router, gated=True, mixed=False),
        "whether the block has neurons or experts",
    ),
    "hook_mlp_in": (_mlp_branch, "the block's norms, and whether it is parallel"),
    "hook_attn_in": (_attn_branch("use_attn_in"), "where the block has its norms"),
    **{
        f"hook_{x}_input": (_attn_branch("use_split_qkv_input"), "where the block has its norms")
        for x in ("q", "k", "v")
    },
    **{
        f"mlp.{prefix}{part}": (
            _neurons(point, None, gated=True if "gate" in part else None, mixed=bool(prefix)),
            "whether the block has neurons or experts",
        )
        for prefix in ("", "dense_")
        for part, point in (
            ("in.hook_in", "mlp_in"),
            ("in.hook_out", "mlp_pre_linear or mlp_pre"),
            ("out.hook_in", "mlp_act"),
            ("out.hook_out", "mlp_out"),
            ("gate.hook_in", "mlp_in"),
            ("gate.hook_out", "mlp_pre"),
        )
        if (prefix, part.split(".")[0]) != ("", "gate")
    },
    **{
        f"{slot}.{hook}": (_norm_rule(slot, hook, legacy=False), "where the block has its norms")
        for slot in SLOTS
        for hook in NORM_HOOKS
    },
}
LEGACY: dict[str, tuple[Rule, str]] = {
    "attn.hook_rot_q": (_recomputed("query_rot", legacy=True), "the kind of attention"),
    "attn.hook_rot_k": (_recomputed("key_rot", legacy=True), "the kind of attention"),
    "attn.hook_result": (_point("head_out", "exists once use_attn_result is set"), "the kind of attention"),
    "mlp.hook_pre": (_neurons("mlp_pre", None), "whether the block has neurons or experts"),
    "mlp.hook_post": (_neurons("mlp_act", None), "whether the block has neurons or experts"),
    "mlp.hook_pre_linear": (_neurons("mlp_pre_linear", None, gated=True), "whether the block has neurons or experts"),
    "hook_mlp_in": (_legacy_mlp_in, "whether attention and MLP run in parallel"),
    **{
        f"{slot}.{hook}": (_norm_rule(slot, hook, legacy=True), "the kind of the norm and where the block has it")
        for slot in SLOTS
        for hook in ("hook_normalized", "hook_scale")
    },
}


def _start(layout: Layout, name: str) -> Answer:
    if layout.start_norm is None:
        return Answer(Address("embeddings"))
    return from_module(layout, layout.start_norm, "output", name)


def _final_in(layout: Layout, name: str) -> Answer:
    if layout.final_norm is None:
        raise NameRefused(f"{name!r} is no point: no norm stands between the last block and the head.")
    return from_module(layout, layout.final_norm.path, "input", name)


def _head_in(layout: Layout, name: str) -> Answer:
    if layout.head is None:
        raise NameRefused(f"{name!r} is no point: no linear map ends in the logits; nearest: final_norm.")
    return from_module(layout, layout.head, "input", name)


def _legacy_final(layout: Layout, name: str) -> Answer:
    if layout.final_norm is None or not layout.final_norm.centred:
        return Answer(Address("final_normalized"))
    return Answer(Address("final_norm"), LAYER_NORM)


TRUNK_EVERYWHERE = {
    "embed.hook_out": "embeddings",
    "ln_final.hook_scale": "final_norm_scale",
    "ln_final.hook_normalized": "final_normalized",
    "ln_final.hook_out": "final_norm",
    "unembed.hook_out": "lm_head",
    "hook_unembed": "lm_head",
}
TRUNK: dict[str, tuple[Callable[[Layout, str], Answer], str]] = {
    "hook_embed": (_start, "whether a norm stands behind the embedding (BLOOM)"),
    "ln_final.hook_in": (_final_in, "how many layers the model has"),
    "unembed.hook_in": (_head_in, "what stands between the final norm and the head"),
}
LEGACY_TRUNK_EVERYWHERE = {"ln_final.hook_scale": "final_norm_scale"}
LEGACY_TRUNK: dict[str, tuple[Callable[[Layout, str], Answer], str]] = {
    "hook_embed": (_start, "whether a norm stands behind the embedding (BLOOM)"),
    "ln_final.hook_normalized": (_legacy_final, "the kind of the final norm"),
}
_BLOCK = re.compile(r"blocks\.(?P<layer>[0-9]+)\.(?P<hook>.+)", re.ASCII)


def read_bridge(name: str, layout: Layout | None) -> Answer:
    """What a hook name of the bridge means."""
    return _read(name, layout, legacy=False)


def read_legacy(name: str, layout: Layout | None) -> Answer:
    """What a hook name of the HookedTransformer of 2.x means, without folding or centring."""
    return _read(name, layout, legacy=True)


def hooks_bridge(layer: int | None) -> Iterator[str]:
    """Every hook name of the bridge that may have a meaning, the usual ones first."""
    if layer is None:
        return iter([*TRUNK_EVERYWHERE, *TRUNK])
    return (f"blocks.{layer}.{hook}" for hook in (*EVERYWHERE, *BRIDGE_EVERYWHERE, *BRIDGE))


def hooks_legacy(layer: int | None) -> Iterator[str]:
    """Every hook name of the HookedTransformer that may have a meaning."""
    if layer is None:
        return iter([*LEGACY_TRUNK_EVERYWHERE, *LEGACY_TRUNK])
    return (f"blocks.{layer}.{hook}" for hook in (*EVERYWHERE, *LEGACY_EVERYWHERE, *LEGACY, *LEGACY_STREAM))


def _read(name: str, layout: Layout | None, legacy: bool) -> Answer:
    match = _BLOCK.fullmatch(name)
    answer = _trunk(name, layout, legacy) if match is None else _block(name, match, layout, legacy)
    return served(layout, name, answer)


def _trunk(name: str, layout: Layout | None, legacy: bool) -> Answer:
    everywhere, rules = (LEGACY_TRUNK_EVERYWHERE, LEGACY_TRUNK) if legacy else (TRUNK_EVERYWHERE, TRUNK)
    if name in everywhere:
        return Answer(Address(everywhere[name]))
    if name in TRUNK_NO_POINT:
        raise NameRefused(f"{name!r} is no point: {TRUNK_NO_POINT[name]}.")
    if name not in rules:
        raise _unknown(name, legacy)
    rule, on = rules[name]
    if layout is None:
        raise depends(name, on)
    return rule(layout, name)


def _block(name: str, match: re.Match[str], layout: Layout | None, legacy: bool) -> Answer:
    layer, hook = int(match["layer"]), match["hook"]
    everywhere = EVERYWHERE | (LEGACY_EVERYWHERE if legacy else BRIDGE_EVERYWHERE)
    rules = LEGACY if legacy else BRIDGE
    if hook in everywhere:
        address = Address(everywhere[hook], layer)
        return Answer(address, _axes(layout, address) if address.name in HEAD_NORMS else "")
    if legacy and hook in LEGACY_STREAM:
        switch = LEGACY_STREAM[hook]
        return Answer(Address("resid_pre", layer), f"repeated for every head; exists once {switch} is set")
    if hook in NO_POINT:
        why, nearest = NO_POINT[hook]
        raise NameRefused(f"{name!r} is no point: {why}; nearest: {nearest} of layer {layer}.")
    if hook not in rules:
        raise _unknown(name, legacy)
    rule, on = rules[hook]
    if layout is None:
        raise depends(name, on)
    if layer >= len(layout.blocks):
        raise NameRefused(f"{name!r} is beyond the model: it has layers 0 to {len(layout.blocks) - 1}.")
    return rule(layout, layout.blocks[layer], layer, name)


def _axes(layout: Layout | None, address: Address) -> str:
    """A norm per head runs with the heads before the positions in the bridge, whatever the module does."""
    note = "" if layout is None else layout.note(address)
    return note if "joined" in note else "heads come before positions there: [batch, heads, pos, d_head]"


def _unknown(name: str, legacy: bool) -> NameRefused:
    tool = "TransformerLens 2.x" if legacy else "TransformerLens' bridge"
    return NameRefused(f"{name!r} has no meaning that is known here as a hook of {tool}.")
