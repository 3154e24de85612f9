"""Hyper-connections: how a sublayer reads one vector from a stack of streams and writes its output back to all of them.

streams_after[k] = sum over j of mix[j, k] · streams[j] + write[k] · output; the sublayer reads
collapse = sum over j of w[j] · streams[j]. The weights are made anew for every token (Zhu et al., Hyper-Connections,
2024; Xie et al., mHC, 2026).
"""

from interp.models.anatomy import Refusal, Stack, Tap
from interp.models.flow import Remixing, Stage, key_of, returned_inside
from interp.models.probe import Trace
from interp.models.transforms import Transposed


def spread(trace: Trace, node: int) -> tuple[int, int] | None:
    """(weights [.., streams, 1], vector [.., 1, d_model]) whose product `node` is; None if it is anything else."""
    op = trace.producer.get(trace.root(node))
    if op is None or op.name != "mul" or len(op.inputs) != 2:
        return None
    for weights, vector in (op.inputs, op.inputs[::-1]):
        if trace.value[weights].shape[-1] == 1 and trace.value[vector].shape[-2] == 1:
            return weights, vector
    return None


def stack_of(trace: Trace, stage: Stage, weights: int, addition: int, collapse: Tap) -> Stack | None:
    """The taps of one sublayer on the stack; None where its weights are no module's output."""
    write = _returned(trace, stage, weights)
    if write is None:
        return None
    links = stage.links or ()
    before = links[addition - 1] if addition else None
    if not isinstance(before, Remixing):
        return Stack(collapse, write, Refusal("the streams are not remixed here, only added to"))
    op = trace.producer.get(trace.root(before.matrix))
    turned = op is not None and op.name in ("transpose", "permute", "t")
    mix = _returned(trace, stage, op.inputs[0] if turned and op is not None else before.matrix)
    if mix is None:
        return None
    return Stack(collapse, write, mix if turned else mix.then(Transposed()))


def _returned(trace: Trace, stage: Stage, node: int) -> Tap | None:
    call = returned_inside(trace, node, stage.call)
    return None if call is None else Tap(call.path, call.module, "output", key_of(trace, call, node))
