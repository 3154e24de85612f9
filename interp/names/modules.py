"""Names that are places in the module tree: Hugging Face, nnsight, nnterp, sparsify, dictionary_learning.

With a model, a place is looked up among the tensors of its recorded pass. Without one, only what every family with that
spelling shares is answered.
"""

import re
from collections.abc import Iterator

from interp.names.answer import Answer, NameRefused, depends, from_held, from_module, served
from interp.names.layout import Layout, Place, Side
from interp.points import Address

INSIDE = "whether that module adds the residual inside (BLOOM, MPT, DBRX)"
_SIDED = re.compile(r"(?P<path>.*?)(?:^|[ .:])(?P<side>inputs?|outputs?)(?P<rest>(?:\[[^\]]*\]|\.[0-9]+)*)", re.ASCII)
_HIDDEN = re.compile(r"(?:.*\.)?hidden_states\[(?P<index>-?[0-9]+)\]", re.ASCII)
_BLOCK = re.compile(
    r"(?P<before>(?:[a-z_]\w*\.)*?)(?P<list>layers|h|blocks)\.(?P<layer>[0-9]+)(?:\.(?P<child>[a-z_]+))?", re.ASCII
)
_RENAMED = re.compile(r"(?P<list>\w+?)_(?P<side>input|output)\[(?P<layer>[0-9]+)\]", re.ASCII)
_TRAINED = re.compile(r"(?P<site>resid_post|mlp_out|attn_out|attention_out)_layer_(?P<layer>[0-9]+)", re.ASCII)

ATTENTION = ("self_attn", "attn", "self_attention", "attention", "norm_attn_norm")
MLP = ("mlp", "block_sparse_moe", "ffn")
"""How nnterp 1.3.0 knows a block's attention and MLP (`rename_utils.py`)."""


def read_hf(name: str, layout: Layout | None) -> Answer:
    """`model.layers.5.mlp output`, also with a dot or colon before the side; `hidden_states[5]`."""
    if (match := _HIDDEN.fullmatch(name)) is not None:
        return served(layout, name, _hidden_state(name, int(match["index"]), layout))
    return _read_place(name, layout)


def read_nnsight(name: str, layout: Layout | None) -> Answer:
    """`model.layers[5].mlp.output`, with `[0]` where the module returns a tuple."""
    return _read_place(name, layout)


def read_sparsify(name: str, layout: Layout | None) -> Answer:
    """`layers.3.mlp`: a path below the base model, whose output a dictionary reads (a transcoder: its input, too)."""
    answer = _read_output(name, layout)
    note = "a transcoder of that name reads the module's input and predicts this output"
    return answer if answer.note or ".mlp" not in name else answer._replace(note=note)


def read_dictionary_learning(name: str, layout: Layout | None) -> Answer:
    """`resid_post_layer_3`, `mlp_out_layer_3`, `attn_out_layer_3`, or the path of the module whose output is read."""
    match = _TRAINED.fullmatch(name)
    if match is None:
        return _read_output(name, layout)
    layer = int(match["layer"])
    if match["site"] == "resid_post":
        return served(layout, name, Answer(Address("resid_post", layer)))
    if layout is None:
        raise depends(name, INSIDE)
    if layer >= len(layout.blocks):
        raise NameRefused(f"{name!r} is beyond the model: it has layers 0 to {len(layout.blocks) - 1}.")
    path = layout.blocks[layer].mlp if match["site"] == "mlp_out" else layout.blocks[layer].attn
    if path is None:
        raise NameRefused(f"{name!r} is no point: that block has no one such module; nearest: resid_post.{layer}.")
    return from_module(layout, path, "output", name)


def read_nnterp(name: str, layout: Layout | None) -> Answer:
    """`layers_output[5]`, `mlps_input[5]`, `attention_probabilities[5]`, `token_embeddings`, `logits`, …"""
    trunk = {
        "token_embeddings": "embeddings",
        "embed_tokens.output": "embeddings",
        "lm_head.output": "lm_head",
        "logits": "logits",
        "output.logits": "logits",
    }
    if name in trunk:
        return served(layout, name, Answer(Address(trunk[name])))
    if name == "ln_final.output":
        return served(layout, name, Answer(Address("final_norm")))
    if (match := re.fullmatch(r"attention_probabilities\[([0-9]+)\]", name, re.ASCII)) is not None:
        return served(layout, name, Answer(Address("attn_probs", int(match[1]))))
    match = _RENAMED.fullmatch(name)
    if match is None or match["list"] not in ("layers", "attentions", "mlps"):
        raise NameRefused(
            f"{name!r} has no meaning that is known here as an accessor of nnterp; those are layers_input[i], "
            "layers_output[i], attentions_input[i], attentions_output[i], mlps_input[i], mlps_output[i], "
            "attention_probabilities[i], token_embeddings, ln_final.output, lm_head.output and logits."
        )
    return _read_accessor(name, match["list"], match["side"] == "input", int(match["layer"]), layout)


def _read_accessor(name: str, which: str, enters: bool, layer: int, layout: Layout | None) -> Answer:
    point = {"layers": "resid_", "attentions": "attn_", "mlps": "mlp_"}[which]
    if which == "layers":
        return served(layout, name, Answer(Address(point + ("pre" if enters else "post"), layer)))
    if layout is None:
        if not enters:
            raise depends(name, INSIDE)
        return Answer(Address(point + "in", layer))
    if layer >= len(layout.blocks):
        raise NameRefused(f"{name!r} is beyond the model: it has layers 0 to {len(layout.blocks) - 1}.")
    block = layout.blocks[layer].path
    known = [f"{block}.{child}" for child in (ATTENTION if which == "attentions" else MLP)]
    path = next((path for path in known if path in layout.paths), None)
    if path is None:
        raise NameRefused(
            f"{name!r} does not exist: no module of {block} has a name by which nnterp knows its {which[:-1]}; "
            f"nearest: {point}in.{layer}, {point}out.{layer}."
        )
    return from_module(layout, path, "input" if enters else "output", name)


def _hidden_state(name: str, index: int, layout: Layout | None) -> Answer:
    """hidden_states has one entry more than there are layers; the last one has gone through the final norm."""
    if layout is None:
        if index == 0:
            return Answer(Address("resid_pre", 0))
        if index == -1:
            return Answer(Address("final_norm"))
        raise depends(name, f"whether the model has more than {index} layers (the last entry is normed)")
    n = len(layout.blocks)
    at = index + n + 1 if index < 0 else index
    if not 0 <= at <= n:
        raise NameRefused(f"{name!r} does not exist: {layout.model} returns hidden_states[0] to hidden_states[{n}].")
    return Answer(Address("final_norm")) if at == n else Answer(Address("resid_pre", at))


def _read_place(name: str, layout: Layout | None) -> Answer:
    match = _SIDED.fullmatch(name)
    if match is None:
        raise NameRefused(f"{name!r} names a module and no side of it: say input or output, as in {name}.output.")
    path, side = _dotted(match["path"]), match["side"]
    keys = re.findall(r"\[([^\]]*)\]|\.([0-9]+)", match["rest"])
    subscripts = [(a or b).strip("'\"") for a, b in keys]
    enters = side.startswith("input")
    if layout is None:
        return _without_model(name, path, "input" if enters else "output")
    found = _resolve(path, layout, name)
    if enters:
        return _input(name, found, side == "inputs", subscripts, layout)
    return _output(name, found, subscripts, layout)


def _input(name: str, path: str, every: bool, subscripts: list[str], layout: Layout) -> Answer:
    """`.input` is the first argument; `.inputs[0][i]` and `.inputs[1]['key']` any."""
    if every and len(subscripts) == 2:
        subscripts = subscripts[1:]
    key = (
        layout.first.get(path) if not subscripts else int(subscripts[0]) if subscripts[0].isdecimal() else subscripts[0]
    )
    held = layout.held.get(Place(path, "input", key), ()) if key is not None else ()
    if not held and subscripts[:1] == ["0"]:
        held = layout.at(path, "input")
    return from_held(held, name, f"{path} input", layout)


def _output(name: str, path: str, subscripts: list[str], layout: Layout) -> Answer:
    if not subscripts:
        answer = from_module(layout, path, "output", name)
        note = "the first element of the tuple that this module returns"
        return answer._replace(note=note) if layout.is_tuple(path) and not answer.note else answer
    if Place(path, "output", None) in layout.held:
        raise NameRefused(
            f"{name!r} is one row of the batch: {path} returns a bare tensor on {layout.model}, "
            "so write it without [0]."
        )
    key = int(subscripts[0]) if subscripts[0].isdecimal() else subscripts[0]
    return from_held(layout.held.get(Place(path, "output", key), ()), name, f"{path} output", layout)


def _read_output(name: str, layout: Layout | None) -> Answer:
    """A path without a side, whose output is meant."""
    path = _dotted(name)
    if layout is None:
        return _without_model(name, path, "output")
    return from_module(layout, _resolve(path, layout, name), "output", name)


def _dotted(path: str) -> str:
    """`model.layers[5].mlp` as `model.layers.5.mlp`."""
    return re.sub(r"\[([0-9]+)\]", r".\1", path).strip(". ")


def _resolve(path: str, layout: Layout, name: str) -> str:
    """The module that is meant: the path may start at the base model, or with the name of a wrapper's variable."""
    below = path.partition(".")[2]
    for candidate in (path, f"{layout.base}.{path}" if layout.base else path, below):
        if candidate in layout.paths:
            return candidate
    raise NameRefused(
        f"{name!r} does not exist: {layout.model} has no module {path!r}; `interp points` prints its paths."
    )


def _without_model(name: str, path: str, side: Side) -> Answer:
    named = {"embed_tokens": "embeddings", "norm": "final_norm", "lm_head": "lm_head"}
    last = path.rpartition(".")[2]
    if side == "output" and path in ("model.embed_tokens", "model.norm", "embed_tokens", "norm", "lm_head"):
        return Answer(Address(named[last]))
    match = _BLOCK.fullmatch(path)
    if match is None:
        raise depends(name, "what the model calls its modules")
    layer, child = int(match["layer"]), match["child"]
    if child is None:
        return Answer(Address("resid_pre" if side == "input" else "resid_post", layer))
    sublayer = "mlp" if child in MLP else "attn" if child in ATTENTION else None
    if sublayer is None:
        raise depends(name, f"what {child} is in that block")
    if side == "output" and match["list"] != "layers":  # the families that add the residual inside spell it otherwise
        raise depends(name, INSIDE)
    return Answer(Address(f"{sublayer}_{'in' if side == 'input' else 'out'}", layer))


def _places(address: Address, layout: Layout) -> Iterator[Place]:
    """Where the point is held: its own place first, then the others in the order of the pass."""
    fits = [place for place, held in layout.held.items() if any(one.address == address for one in held)]
    home = layout.where.get(address, "").split(",")[0]
    yield from sorted(fits, key=lambda place: (f"{place.path} {place.side}" != home, place.path.count(".")))


def hf_names(address: Address, layout: Layout | None) -> Iterator[str]:
    """Places of the module tree, as `path side`."""
    if layout is None:
        yield from _llama_names(address, " ")
        return
    if address.name == "resid_pre" and address.layer is not None:
        yield f"hidden_states[{address.layer}]"
    for place in _places(address, layout):
        yield f"{place.path} {place.side}{_subscript(place, layout)}"
    if address.name == "final_norm":
        yield f"hidden_states[{len(layout.blocks)}]"


def _subscript(place: Place, layout: Layout) -> str:
    if place.side == "input":
        return "" if place.key == layout.first.get(place.path) else f"[{place.key!r}]"
    return "" if place.key is None else f"[{place.key!r}]"


def nnsight_names(address: Address, layout: Layout | None) -> Iterator[str]:
    """Places of the module tree as nnsight's envoys spell them."""
    if layout is None:
        return
    for place in _places(address, layout):
        path = re.sub(r"\.([0-9]+)(?=\.|$)", r"[\1]", place.path)
        if place.side == "output":
            yield f"{path}.output{_subscript(place, layout)}".lstrip(".")
        elif place.key == layout.first.get(place.path):
            yield f"{path}.input".lstrip(".")
        else:
            yield f"{path}.inputs[{int(isinstance(place.key, str))}][{place.key!r}]".lstrip(".")


def sparsify_names(address: Address, layout: Layout | None) -> Iterator[str]:
    """Modules whose output the point is, below the base model."""
    if layout is None:
        yield from (name.removesuffix(" output").removeprefix("model.") for name in _llama_names(address, " "))
        return
    for place in _places(address, layout):
        if place.side == "output" and place.path.startswith(f"{layout.base}."):
            yield place.path.removeprefix(f"{layout.base}.")


def dictionary_learning_names(address: Address, layout: Layout | None) -> Iterator[str]:
    """The names that its demo scripts give submodules, and the paths of modules whose output is read."""
    if address.layer is not None:
        yield from (f"{site}_layer_{address.layer}" for site in ("resid_post", "mlp_out", "attn_out"))
    if layout is not None:
        yield from (place.path for place in _places(address, layout) if place.side == "output" and place.path)


def nnterp_names(address: Address, layout: Layout | None) -> Iterator[str]:
    """nnterp's accessors."""
    if address.layer is None:
        yield from ("token_embeddings", "ln_final.output", "lm_head.output", "logits")
        return
    for which in ("layers", "attentions", "mlps"):
        yield from (f"{which}_{side}[{address.layer}]" for side in ("input", "output"))
    yield f"attention_probabilities[{address.layer}]"


def _llama_names(address: Address, between: str) -> Iterator[str]:
    """The spelling of most families; each is read back before it is handed out."""
    if address.layer is None:
        yield from (f"{path}{between}output" for path in ("model.embed_tokens", "model.norm", "lm_head"))
        return
    for child in ("", ".self_attn", ".mlp"):
        yield from (f"model.layers.{address.layer}{child}{between}{side}" for side in ("output", "input"))
