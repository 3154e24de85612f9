"""From a live model to its Anatomy: one recorded pass over a few random tokens, read backwards from the logits."""

import torch
from torch import nn

from interp.errors import InterpError
from interp.models.anatomy import (
    Add,
    Anatomy,
    Block,
    Refusal,
    Remix,
    Renorm,
    Start,
    StreamStep,
    Tap,
    Term,
    Weigh,
    scaled,
)
from interp.models.attention import AttentionCall, observed
from interp.models.between import bridges_of
from interp.models.calling import calling_of
from interp.models.float64 import numerics
from interp.models.flow import Remixing, Renorming, Stage, Weighing, norm_behind, sources, stages
from interp.models.head import head_of
from interp.models.mixer import mixer_of
from interp.models.neurons import neurons_of
from interp.models.parameters import device_of, dtype_of
from interp.models.probe import Call, Trace, recording
from interp.models.proofs import needed
from interp.models.recognise import linear_of, norm_of
from interp.models.routing import routing_of
from interp.models.sublayers import Part, input_tap, output_tap, parts_of

N_POS = 11
"""Length of the probe: unlike any head count or head width, so that the position axis shows itself."""
NO_ATTN = Refusal("this block has no token mixer", ("mlp_in", "mlp_out"))
NO_MLP = Refusal("this block has no MLP", ("attn_in", "attn_out"))


def resolve(model: nn.Module, d_vocab: int) -> Anatomy:
    """The Anatomy of a causal language model, read from one forward pass.

    Raises `InterpError` where the pass shows no trunk of blocks or no head.
    """
    trace, tokens = probe_pass(model, d_vocab)
    with numerics(dtype_of(model)):
        anatomy = _read(trace, model, tokens)
    refuse_repeated(trace, anatomy)
    return anatomy


def probe_pass(model: nn.Module, d_vocab: int) -> tuple[Trace, torch.Tensor]:
    """One recorded pass over a few random tokens, attention functions as calls of their own; the tokens, [1, pos]."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, d_vocab, (1, N_POS), generator=generator).to(device_of(model))
    paths = {id(module): path for path, module in model.named_modules()}
    with recording(model) as trace:

        def watch(module: nn.Module, call: AttentionCall) -> None:
            tensors = {name: getattr(call, name) for name in ("query", "key", "value")}
            constants = {"scaling": call.scaling, "softcap": call.softcap, "sink": call.sink}
            event = trace.enter(f"{paths[id(module)]}@attention", module, (), tensors | constants)
            trace.leave(event, {"output": call.output, "probs": call.probs})

        with observed(model, watch), numerics(dtype_of(model)):
            model(**calling_of(model).inputs(tokens))
    return trace, tokens


def refuse_repeated(trace: Trace, anatomy: Anatomy) -> None:
    """A module that runs several times in a pass shows several tensors (Llama 4 norms queries and keys with one)."""
    for address in needed(anatomy):
        tap = anatomy.tap(address)
        if isinstance(tap, Tap) and tap.side in ("input", "output") and len(trace.calls_of(tap.path)) > 1:
            anatomy.refused[address.whole] = Refusal(
                f"{tap.path} runs several times in one pass, so it shows several tensors"
            )


def _read(trace: Trace, model: nn.Module, tokens: torch.Tensor) -> Anatomy:
    found = stages(trace, model)
    if not found:
        raise InterpError(
            f"No trunk was found in {type(model).__name__}: no list of modules passes a stream from one to the next; "
            "write its Anatomy by hand."
        )
    whole = trace.calls_of("")[0]
    embed = _embedding(trace, tokens, found[0])
    logits_key = "logits" if "logits" in whole.outputs else next(iter(whole.outputs))
    head, lm_head, final, collapse = head_of(trace, whole, whole.outputs[logits_key], found[-1])
    end = trace.value[found[-1].leaves]
    no_final = Refusal("no norm stands between the last block and the head")
    return Anatomy(
        model=model,
        embeddings=output_tap(embed, next(iter(embed.outputs))),
        start=start_of(trace, whole, embed, found[0]),
        blocks=tuple(block_of(trace, stage) for stage in found),
        d_model=end.shape[-1],
        n_streams=end.shape[2] if end.ndim == 4 else 1,
        collapse=None if collapse is None else output_tap(collapse, next(iter(collapse.outputs))),
        trunk=trunk_of(trace, tokens, lm_head, final, found),
        final_norm=(None if final is None else norm_of(trace, final)) or no_final,
        final_norm_input=no_final if final is None else input_tap(final, next(iter(final.inputs))),
        final_norm_output=output_tap(final, next(iter(final.outputs)))
        if final is not None
        else output_tap(found[-1].call, found[-1].output_key),
        head=head,
        lm_head=Refusal("no linear map ends in the logits")
        if lm_head is None
        else output_tap(lm_head, next(iter(lm_head.outputs))),
        logits=Tap("", model, "output", logits_key),
        refused={},
        bridges=bridges_of(trace, whole, found),
    )


def trunk_of(trace: Trace, tokens: torch.Tensor, lm_head: Call | None, final: Call | None, found: list[Stage]) -> str:
    """Path of the innermost module from token ids to what goes to the head; empty if there is none but the whole."""
    ids = trace.root(trace.node(tokens))
    ends = [next(iter(lm_head.inputs.values()))] if lm_head is not None else []
    ends += [next(iter(final.outputs.values()))] if final is not None else [found[-1].leaves]
    for end in ends:
        for call in reversed(trace.returned_by(end)):
            takes_ids = ids in map(trace.root, call.inputs.values())
            if call.path and takes_ids and found[0].call.path.startswith(call.path + "."):
                return call.path
    return ""


def _embedding(trace: Trace, tokens: torch.Tensor, first: Stage) -> Call:
    """The innermost module that looks the token ids up in a table and whose output the stream begins with."""
    ids, behind = trace.root(trace.node(tokens)), trace.ancestors(first.enters)
    looked_up = {
        op.outputs[0]
        for op in trace.ops
        if op.name == "embedding" and op.outputs[0] in behind and ids in trace.ancestors(op.inputs[1])
    }
    found = [
        call
        for call in trace.calls[: first.call.order]  # later ones cannot begin the stream
        if any(ids in trace.ancestors(node) for node in call.inputs.values())
        and any(trace.ancestors(node, since=call.first_input) & looked_up for node in call.outputs.values())
        and not any(trace.ancestors(node) & looked_up for node in call.inputs.values())
    ]
    if not found:
        raise InterpError("No module looks the token ids up in a table; write this model's Anatomy by hand.")
    return found[-1]


def start_of(trace: Trace, whole: Call, embed: Call, first: Stage) -> Start | Refusal:
    """The stream's first value as a sum of module outputs, normed or not; several streams all begin with it."""
    unknown = Refusal("what enters the first block is not a sum of embeddings")
    before = first.enters
    if first.stacked(trace):
        op = trace.producer.get(trace.root(before))
        if op is None or op.name not in ("expand", "repeat"):
            return unknown
        before = op.inputs[0]
    norm = norm_behind(trace, before, whole)
    before = before if norm is None else next(iter(norm.inputs.values()))
    parts = sources(trace, before, whole)
    if parts is None:
        return unknown
    embedded = trace.root(next(iter(embed.outputs.values())))
    terms = []
    for part in parts:
        tap, via = output_tap(part.call, part.key), None
        from_tokens = embedded in map(trace.root, trace.ancestors(part.node))
        if from_tokens and trace.root(part.node) != embedded:
            via = linear_of(trace, part.call)
            if via is None or trace.root(next(iter(part.call.inputs.values()))) != embedded:
                return unknown
        terms.append(Term("token" if from_tokens else "position", scaled(tap, part.factor), via))
    return Start(tuple(terms), None if norm is None else norm_of(trace, norm))


def block_of(trace: Trace, stage: Stage) -> Block:
    """Everything that the pass shows of one block."""
    parts = parts_of(trace, stage)
    if isinstance(parts, Refusal):
        return _unread(stage, parts)
    mixers = [p for p in parts if p.mixes_positions]
    attn = next((p for p in mixers if p.calls_attention), mixers[0] if mixers else None)
    mlp = next((p for p in parts if not p.mixes_positions), None)
    extras = [p for p in parts if p is not attn and p is not mlp]
    if len(extras) > 1:
        many = Refusal("this block adds more to the stream than attention, MLP and one further term", ("resid_post",))
        return _unread(stage, many)
    parallel = attn is not None and mlp is not None and mlp.sublayer.reads == attn.sublayer.reads
    mid = mid_of(attn, mlp, parallel)
    return Block(
        stage.call.path,
        stage.call.module,
        stage.group,
        input_tap(stage.call, stage.input_key),
        output_tap(stage.call, stage.output_key),
        attn.sublayer if attn else NO_ATTN,
        mlp.sublayer if mlp else NO_MLP,
        mid,
        mixer_of(trace, attn, N_POS) if attn else NO_ATTN,
        neurons_of(trace, mlp, N_POS) if mlp else NO_MLP,
        parallel,
        steps=_steps(trace, stage, {id(attn): "attn_out_post", id(mlp): "mlp_out_post"}, parts),
        steps_to_mid=0 if isinstance(mid, Refusal) or mlp is None else mlp.sublayer.reads,
        routing=routing_of(trace, mlp, N_POS) if mlp else NO_MLP,
        **({"extra": extras[0].sublayer.contribution} if extras else {}),
    )


def _unread(stage: Stage, why: Refusal) -> Block:
    """A block of which only the ends are known."""
    boundary = (input_tap(stage.call, stage.input_key), output_tap(stage.call, stage.output_key))
    return Block(
        stage.call.path, stage.call.module, stage.group, *boundary, why, why, why, why, why, False, routing=why
    )


def _steps(trace: Trace, stage: Stage, names: dict[int, str], parts: list[Part]) -> tuple[StreamStep, ...]:
    """The stage's links with the points that they add."""
    steps: list[StreamStep] = []
    links = stage.links or ()
    for index, link in enumerate(links):
        if isinstance(link, Weighing):
            steps.append(Weigh(link.factor))
        elif isinstance(link, Renorming):
            norm = norm_of(trace, link.call)
            assert norm is not None
            steps.append(Renorm(norm))
        else:
            mixes = isinstance(link, Remixing)
            here = [part for part in parts if part.addition == index + mixes]
            points = tuple(names.get(id(part), "extra_out_post") for part in here)
            kind = points[0].removesuffix("_out_post") if points else ""
            if mixes:
                steps.append(Remix(f"{kind}_stream_mix"))
            else:
                steps.append(Add(points, f"{kind}_stream_write" if stage.stacked(trace) else None))
    return tuple(steps)


def mid_of(attn: Part | None, mlp: Part | None, parallel: bool) -> Tap | Refusal:
    """Where the stream between attention and MLP is read."""
    if attn is None or mlp is None:
        return Refusal("this block has one sublayer, so nothing lies between", ("resid_pre", "resid_post"))
    if parallel:
        return Refusal("this block adds attention and MLP in parallel", ("resid_post", "mlp_in"))
    if attn.addition > mlp.addition:
        return Refusal("this block adds its MLP before its attention", ("resid_pre", "resid_post"))
    return mlp.sublayer.entry
