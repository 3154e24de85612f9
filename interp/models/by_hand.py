"""How an Anatomy is written by hand: roles as paths of modules, and what a pass shows measured.

Written are statements: this module is the attention, that norm stands before it, its output is added half. Measured, on
one recorded pass, is the rest: which argument carries the stream, which norm a module computes and with which epsilon,
how a matrix lies in its module, where the softmax is, how the stream begins. What is not written is resolved as it is
for any model, down to a block of which only the path is given.

Statements are proven like what is resolved: a wrong one has its points refused, with the measured difference.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from interp.errors import UserError
from interp.models import anatomy as roles
from interp.models.anatomy import Anatomy, Head, Refusal, Tap
from interp.models.between import bridges_of
from interp.models.block_by_hand import Reading, first_key
from interp.models.calling import vocabulary_of
from interp.models.float64 import numerics
from interp.models.flow import Stage, stage_of
from interp.models.parameters import dtype_of
from interp.models.resolve import (
    N_POS,
    NO_ATTN,
    NO_MLP,
    block_of,
    mid_of,
    probe_pass,
    refuse_repeated,
    start_of,
    trunk_of,
)
from interp.models.routing import routing_of
from interp.models.statements import Attention, Block, Neurons, Slice, Sublayer
from interp.models.sublayers import input_tap, output_tap

__all__ = ["Attention", "Block", "Neurons", "Slice", "Sublayer", "anatomy"]


def anatomy(
    model: nn.Module,
    *,
    embeddings: str,
    blocks: Sequence[Block | str],
    final_norm: str | None,
    head: str,
    logit_scale: float = 1.0,
    logit_cap: float | None = None,
    d_vocab: int | None = None,
) -> Anatomy:
    """The Anatomy that these statements and one pass over a few random tokens give, to be handed to `wrap`.

    `embeddings`, `final_norm` and `head` are paths of modules; the logits are cap · tanh(scale · head(x) / cap), or
    scale · head(x) without a cap. `blocks` come in the order of the stream; a path alone has its block resolved. The
    model is put into evaluation mode.

    Raises `UserError` for a path of no module, or of one that does not run, and for a module that cannot be what it is
    said to be: a projection that is no linear map, a final norm that is none, heads that do not divide it.
    """
    written = [Block(block) if isinstance(block, str) else block for block in blocks]
    if not written:
        raise UserError("An anatomy has blocks: name at least one.")
    model.eval()
    trace, tokens = probe_pass(model, vocabulary_of(model, N_POS) if d_vocab is None else d_vocab)
    with numerics(dtype_of(model)):
        reading = Reading(trace, model)
        ends = _Ends(embeddings, final_norm, head, logit_scale, logit_cap)
        found = _read(reading, tokens, written, ends)
    refuse_repeated(trace, found)
    return found


class _Ends(NamedTuple):
    """What is written of the model outside its blocks."""

    embeddings: str
    final_norm: str | None
    head: str
    logit_scale: float
    logit_cap: float | None


def _read(reading: Reading, tokens: Tensor, written: list[Block], ends: _Ends) -> Anatomy:
    trace, model = reading.trace, reading.model
    stages = [_stage(reading, block) for block in written]
    last = stages[-1]
    whole, embed, head = trace.calls_of("")[0], reading.call(ends.embeddings), reading.call(ends.head)
    final = None if ends.final_norm is None else reading.call(ends.final_norm)
    no_final = Refusal("no norm stands between the last block and the head")
    logits_key = "logits" if "logits" in whole.outputs else first_key(whole.outputs)
    return Anatomy(
        model=model,
        embeddings=output_tap(embed, first_key(embed.outputs)),
        start=start_of(trace, whole, embed, stages[0]),
        blocks=tuple(_block(reading, stage, block) for stage, block in zip(stages, written, strict=True)),
        d_model=trace.value[last.leaves].shape[-1],
        n_streams=1,
        collapse=None,
        trunk=trunk_of(trace, tokens, head, final, stages),
        final_norm=no_final if final is None else reading.norm(final),
        final_norm_input=no_final if final is None else input_tap(final, first_key(final.inputs)),
        final_norm_output=output_tap(last.call, last.output_key)
        if final is None
        else output_tap(final, first_key(final.outputs)),
        head=Head(reading.linear(head), ends.logit_scale, ends.logit_cap),
        lm_head=output_tap(head, first_key(head.outputs)),
        logits=Tap("", model, "output", logits_key),
        refused={},
        bridges=bridges_of(trace, whole, stages),
    )


def _stage(reading: Reading, block: Block) -> Stage:
    stage = stage_of(reading.trace, reading.call(block.path), block.group)
    if stage is None:
        raise UserError(
            f"The anatomy names {block.path!r} as a block, and it returns no tensor that is shaped like one it takes."
        )
    return stage


def _block(reading: Reading, stage: Stage, block: Block) -> roles.Block:
    if block.attn is None and block.mlp is None:
        return block_of(reading.trace, stage)
    inside = reading.inside(stage)
    attn = None if block.attn is None else inside.part(block.attn, mixes=True, reads=0)
    sequential = attn is not None and not block.parallel
    mlp = None if block.mlp is None else inside.part(block.mlp, mixes=False, reads=int(sequential))
    added = [f"{name}_out_post" for name, part in (("attn", attn), ("mlp", mlp)) if part is not None]
    mid = mid_of(attn, mlp, block.parallel)
    return roles.Block(
        stage.call.path,
        stage.call.module,
        stage.group,
        input_tap(stage.call, stage.input_key),
        output_tap(stage.call, stage.output_key),
        attn.sublayer if attn else NO_ATTN,
        mlp.sublayer if mlp else NO_MLP,
        mid,
        inside.mixer(attn, block.attention) if attn else NO_ATTN,
        inside.neurons(mlp, block.neurons) if mlp else NO_MLP,
        parallel=len(added) == 2 and block.parallel,
        steps=tuple(roles.Add((point,)) for point in added) if sequential else (roles.Add(tuple(added)),),
        steps_to_mid=0 if isinstance(mid, Refusal) else 1,
        routing=routing_of(reading.trace, mlp, N_POS) if mlp else NO_MLP,
    )
