"""Names in the configs of published dictionaries: SAELens, circuit-tracer, Gemma Scope 1 and 2."""

import re
from collections.abc import Iterator
from dataclasses import replace

from interp.names.answer import Answer, DependsOnModel, NameRefused, depends, from_module, served
from interp.names.layout import Layout
from interp.names.modules import read_hf
from interp.names.transformer_lens import hooks_bridge, hooks_legacy, read_bridge, read_legacy
from interp.points import POINTS, Address

_HEAD = re.compile(r"(?P<hook>\S+?)[ ,;]*hook_head_index\s*[=: ]\s*(?P<head>[0-9]+)", re.ASCII)
_SCOPE = re.compile(
    r"(?:.*?-(?P<repo>res|mlp|att|transcoders)/)?layer_(?P<layer>[0-9]+)(?:/(?P<site>res|mlp|att|transcoders))?(?:/.*)?",
    re.ASCII,
)
_SCOPE_2 = re.compile(
    r"(?:.*/)?(?P<site>resid_post|mlp_out|attn_out|transcoder)(?:_all)?/layer_(?P<layer>[0-9]+)(?:_.*)?", re.ASCII
)

SCOPE = {"res": "resid_post", "mlp": "mlp_out_post", "att": "z", "transcoders": "mlp_normalized"}
"""What the dictionaries of Gemma Scope 1 read, by repository (arXiv 2408.05147, section 3); all for Gemma 2."""
SCOPE_2 = {"resid_post": "resid_post", "mlp_out": "mlp_out_post", "attn_out": "z", "transcoder": "mlp_in"}
"""What those of Gemma Scope 2 read, by folder: the configs' `hf_hook_point_in`; all for Gemma 3."""
SCOPE_NOTES = {
    "att": "heads are joined there",
    "attn_out": "the config reads the output projection's input; heads are joined there",
    "transcoders": "it predicts mlp_out_post of the same layer",
    "transcoder": "it predicts mlp_out_post of the same layer",
}


def read_sae_lens(name: str, layout: Layout | None) -> Answer:
    """A hook name of either generation of TransformerLens, with `hook_head_index=2` for one head, or a module's output.

    Configs do not say which generation the dictionary was trained with, so both must mean the same tensor.
    """
    if (match := _HEAD.fullmatch(name)) is not None:
        answer = read_sae_lens(match["hook"], layout)
        if not POINTS[answer.address.name].has_heads:
            raise NameRefused(
                f"{name!r} picks a head of {answer.address}, which has none; nearest: z.{answer.address.layer}."
            )
        return Answer(replace(answer.address, head=int(match["head"])))
    if not re.match(r"blocks\.|hook_|ln_final\.|embed\.|unembed\.", name):
        return read_hf(name if re.search(r"(input|output)", name) else f"{name} output", layout)
    answers: list[Answer] = []
    errors: list[NameRefused] = []
    for read in (read_bridge, read_legacy):
        try:
            answers.append(read(name, layout))
        except NameRefused as error:
            errors.append(error)
    unsure = next((error for error in errors if isinstance(error, DependsOnModel)), None)
    if unsure is not None or not answers:
        raise unsure or errors[0]
    if any(answer.address != answers[0].address for answer in answers):
        meanings = f"{answers[0].address} in the bridge and {answers[1].address} in the HookedTransformer of 2.x"
        raise NameRefused(f"{name!r} is {meanings}, and a config does not say which it was trained with.")
    answer = answers[0]
    if POINTS[answer.address.name].has_heads and not answer.note:
        return answer._replace(note="without hook_head_index a dictionary reads all heads joined")
    return answer


def read_circuit_tracer(name: str, layout: Layout | None) -> Answer:
    """`feature_input_hook` and `feature_output_hook` of one layer: `blocks.5.hook_mlp_out`.

    Its model is TransformerLens' HookedTransformer without folding, whose MLPs have hooks of their own on both ends.
    """
    declared = name.split(":")[-1].strip()
    if not declared.startswith("blocks."):
        raise NameRefused(f"{name!r} is declared for every layer at once: say which, as in blocks.5.{declared}.")
    match = re.fullmatch(r"blocks\.([0-9]+)\.mlp\.hook_(in|out)", declared, re.ASCII)
    if match is None:
        return read_legacy(declared, layout)
    layer = int(match[1])
    if match[2] == "in":
        return served(layout, name, Answer(Address("mlp_in", layer)))
    if layout is None:
        raise depends(name, "whether the MLP module adds the residual inside (BLOOM, MPT)")
    path = layout.blocks[layer].mlp if layer < len(layout.blocks) else None
    if path is None:
        raise NameRefused(f"{name!r} is no point: layer {layer} has no such module; nearest: resid_post.{layer}.")
    return from_module(layout, path, "output", name)


def read_gemma_scope(name: str, layout: Layout | None) -> Answer:
    """`gemma-scope-2b-pt-res/layer_12/…` or `layer_12/res` of the first, `resid_post/layer_12_…` of the second."""
    first, second = _SCOPE.fullmatch(name), _SCOPE_2.fullmatch(name)
    if second is not None:
        site, layer = second["site"], int(second["layer"])
        _check_scope(name, layout, "Gemma 3", ("attn_post_normalized", "mlp_post_normalized", "q_norm_in"), layer)
        return served(layout, name, Answer(Address(SCOPE_2[site], layer), SCOPE_NOTES.get(site, "")))
    if first is None or not (first["repo"] or first["site"]):
        raise NameRefused(
            f"{name!r} has no meaning that holds on every family: a name of Gemma Scope says its site and layer, "
            "as gemma-scope-2b-pt-mlp/layer_12 (first) or mlp_out/layer_12 (second) do."
        )
    site, layer = first["repo"] or first["site"], int(first["layer"])
    _check_scope(name, layout, "Gemma 2", ("attn_post_normalized", "mlp_post_normalized"), layer)
    return served(layout, name, Answer(Address(SCOPE[site], layer), SCOPE_NOTES.get(site, "")))


def _check_scope(name: str, layout: Layout | None, family: str, points: tuple[str, ...], layer: int) -> None:
    """Refused on a model that lacks what every model of the release has."""
    missing = [] if layout is None else [p for p in points if Address(p, layer) not in layout.where]
    if layout is not None and missing and layer < len(layout.blocks):
        raise NameRefused(
            f"{name!r} is a dictionary for {family}, whose blocks have {missing[0]}; {layout.model} has no such point."
        )


def sae_lens_names(address: Address, layout: Layout | None) -> Iterator[str]:
    """Hook names that both generations share, with the head where the Address has one."""
    head = "" if address.head is None else f" hook_head_index={address.head}"
    seen: set[str] = set()
    for name in (*hooks_legacy(address.layer), *hooks_bridge(address.layer)):
        if name not in seen:
            seen.add(name)
            yield f"{name}{head}"


def circuit_tracer_names(address: Address, layout: Layout | None) -> Iterator[str]:
    """Hooks that a transcoder set can declare, with the layer."""
    if address.layer is not None:
        hooks = ("hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_out", "hook_mlp_out", "mlp.hook_in")
        yield from (f"blocks.{address.layer}.{hook}" for hook in (*hooks, "mlp.hook_out", "ln2.hook_normalized"))


def gemma_scope_names(address: Address, layout: Layout | None) -> Iterator[str]:
    """Sites of the first and the second release."""
    if address.layer is not None:
        yield from (f"layer_{address.layer}/{site}" for site in SCOPE)
        yield from (f"{site}/layer_{address.layer}" for site in SCOPE_2)
