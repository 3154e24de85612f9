"""From what is said by hand of a block's modules to their roles: the tensors that they take and give, measured."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from interp.errors import UserError
from interp.models import anatomy as roles
from interp.models.anatomy import Mixer, Projection, Refusal, scaled
from interp.models.flow import Stage
from interp.models.layout import channel_tap
from interp.models.linear import Linear
from interp.models.mixer import (
    Event,
    before_rotation,
    event_of,
    gate_of,
    head_norms,
    key_repeats,
    mixer_of,
    projection_of,
    query_width,
    value_of,
    z_of,
)
from interp.models.neurons import function_of, neurons_of
from interp.models.norms import Norm
from interp.models.probe import Call, Key, Trace
from interp.models.recognise import linear_of, norm_of
from interp.models.resolve import N_POS
from interp.models.statements import Attention, Neurons, Slice, Sublayer
from interp.models.sublayers import Part, input_tap, output_tap, read_tap


def first_key(nodes: dict[Key, int]) -> Key:
    """Where the first tensor of a call's inputs or outputs sits."""
    return next(iter(nodes))


class Reading:
    """A recorded pass, asked by the paths that statements name; `UserError` where a path is not what is said."""

    def __init__(self, trace: Trace, model: nn.Module) -> None:
        self.trace, self.model = trace, model
        self._paths = {path for path, _ in model.named_modules()}

    def call(self, path: str) -> Call:
        """The module's call."""
        if path not in self._paths:
            raise UserError(f"The anatomy names {path!r}, and {type(self.model).__name__} has no module of that path.")
        calls = self.trace.calls_of(path)
        if not calls:
            raise UserError(f"The anatomy names {path!r}, which does not run in a forward pass.")
        return calls[0]

    def linear(self, call: Call) -> Linear:
        """The linear map that the call computed."""
        found = linear_of(self.trace, call)
        if found is None:
            raise UserError(f"The anatomy names {call.path!r} as a projection, and it computes no linear map.")
        return found

    def norm(self, call: Call) -> Norm:
        """The norm that the call computed."""
        found = norm_of(self.trace, call)
        if found is None:
            raise UserError(
                f"The anatomy names {call.path!r} as a norm, and it computes neither RMSNorm nor LayerNorm with "
                "parameters called weight and bias."
            )
        return found

    def inside(self, stage: Stage) -> "Inside":
        """The same, by paths below a block."""
        return Inside(self, stage)


class Inside:
    """A recorded pass, asked by paths below one block."""

    def __init__(self, reading: Reading, stage: Stage) -> None:
        self.reading, self.stage, self.trace = reading, stage, reading.trace

    def call(self, path: str) -> Call:
        """The call of the module; of the block itself where the path is empty."""
        return self.reading.call(f"{self.stage.call.path}.{path}".removesuffix("."))

    def part(self, stated: Sublayer, *, mixes: bool, reads: int) -> Part:
        """A sublayer that reads the stream after `reads` additions."""
        trace, core = self.trace, self.call(stated.module)
        first = core if stated.reads is None else self.call(stated.reads)
        last = core if stated.returns is None else self.call(stated.returns)
        before = None if stated.norm is None else self.call(stated.norm)
        after = None if stated.post_norm is None else self.call(stated.post_norm)
        read_key, raw_key = self._read_key(first, before), self._stream_key(last.outputs)
        enters = None if before is None else input_tap(before, first_key(before.inputs))
        known = None if before is None else norm_of(trace, before)
        added = last if after is None else after
        sublayer = roles.Sublayer(
            path=core.path,
            read=read_tap(trace, first, read_key),
            raw=output_tap(last, raw_key),
            contribution=scaled(output_tap(added, self._stream_key(added.outputs)), stated.multiplier),
            pre_norm=known,
            pre_norm_input=None if known is None else enters,
            post_norm=None if after is None else self.reading.norm(after),
            post_norm_input=None if after is None else input_tap(after, first_key(after.inputs)),
            multiplier=stated.multiplier,
            entry=enters or input_tap(first, read_key),
            reads=reads,
            by_token=not all(trace.value[node].is_floating_point() for node in first.inputs.values()),
            unknown="" if before is None or known is not None else "what stands before this sublayer is no known norm",
        )
        attends = any(inner.path.endswith("@attention") for inner in trace.inside(core))
        return Part(sublayer, core, first, first.inputs[read_key], last.outputs[raw_key], reads, mixes, attends)

    def _read_key(self, call: Call, norm: Call | None) -> Key:
        """The argument that is the norm's output; else the first that is shaped like the stream."""
        made = [] if norm is None else [self.trace.root(node) for node in norm.outputs.values()]
        for key, node in call.inputs.items():
            if self.trace.root(node) in made:
                return key
        return self._stream_key(call.inputs)

    def _stream_key(self, nodes: dict[Key, int]) -> Key:
        size = self.trace.value[self.stage.enters].numel()
        for key, node in nodes.items():
            if self.trace.value[node].numel() == size and self.trace.value[node].is_floating_point():
                return key
        raise UserError(
            f"The anatomy names a sublayer of {self.stage.call.path!r} that takes or returns nothing shaped like the "
            "stream: name the modules that read it and return it."
        )

    def mixer(self, part: Part, stated: Attention | None) -> Mixer | Refusal:
        """The inside of attention: its projections as they are written, its matrix where the pass shows it."""
        trace, read = self.trace, part.read_node
        if stated is None:
            return mixer_of(trace, part, N_POS)
        event = event_of(trace, part, N_POS)
        if isinstance(event, Refusal):
            return event
        if stated.n_heads != event.n_heads:
            raise UserError(
                f"The anatomy says {stated.n_heads} heads of {event.path}, and the pass shows {event.n_heads}."
            )
        n_kv_heads = stated.n_kv_heads or stated.n_heads
        output, d_head = self.reading.linear(self.call(stated.output)), trace.value[event.value].shape[-1]
        gate, activation = Refusal("this attention has no gate", ("z",)), None
        if stated.gate is not None:
            gate, activation = gate_of(trace, [self._projection(stated.gate)[:2]], output, event, N_POS, read)
        norms = [self.call(path) for path in (stated.q_norm, stated.k_norm) if path is not None]
        return Mixer(
            module=event.module,
            path=event.path,
            query=self._scored(stated.query, "query", stated.n_heads, event.query, event, read),
            key=self._scored(stated.key, "key", n_kv_heads, event.key, event, read),
            value=self._mixed(stated.value, n_kv_heads, event, read),
            z=z_of(trace, output, event, d_head),
            output=output,
            **head_norms(trace, [(call, self.reading.norm(call)) for call in norms], event, N_POS),  # type: ignore[arg-type]
            n_heads=stated.n_heads,
            n_kv_heads=n_kv_heads,
            d_head=d_head,
            key_repeats=key_repeats(trace, event, n_kv_heads, N_POS),
            side=event.side,
            gate=gate,
            gate_activation=activation,
            **event.constants,
        )

    def _projection(self, stated: str | Slice) -> tuple[Call, Linear, Tensor]:
        """The call, its linear map, and the channels of it that are meant."""
        call = self.call(stated.module if isinstance(stated, Slice) else stated)
        found = self.reading.linear(call)
        index = torch.as_tensor(stated.channels if isinstance(stated, Slice) else range(found.shape[0])).flatten()
        if not index.numel() or int(index.min()) < 0 or int(index.max()) >= found.shape[0]:
            raise UserError(f"{call.path!r} has channels 0 to {found.shape[0] - 1}, and the anatomy names others.")
        return call, found, index

    def _heads(self, stated: str | Slice, heads: int, read: int) -> tuple[Projection, Call]:
        call, found, index = self._projection(stated)
        if index.numel() % heads:
            raise UserError(f"{call.path!r} gives {index.numel()} channels, which {heads} heads do not divide.")
        return projection_of(self.trace, call, found, index.reshape(heads, -1), read), call

    def _mixed(self, stated: str | Slice, heads: int, event: Event, read: int) -> Projection:
        """Values, with the bounds that the pass shows them to be held between."""
        projection, call = self._heads(stated, heads, read)
        width, d_head = projection.index.shape[1], self.trace.value[event.value].shape[-1]
        if width != d_head:
            raise UserError(
                f"The anatomy says {heads} heads of {width} channels in {call.path}; the mixed values have {d_head}."
            )
        shown = value_of(self.trace, [(call, projection.linear)], [], event.value, N_POS, read)
        agrees = isinstance(shown, Projection) and torch.equal(shown.index, projection.index)
        return shown if agrees and isinstance(shown, Projection) else projection

    def _scored(
        self, stated: str | Slice, role: str, heads: int, node: int | None, event: Event, read: int
    ) -> Projection | Refusal:
        """Queries or keys. No equation tells one from the other, so the pass has to show which it is."""
        projection, call = self._heads(stated, heads, read)
        width = query_width(self.trace, event)
        shown = before_rotation(self.trace, [(call, projection.linear)], node, N_POS, width, read)
        if node is None or (isinstance(shown, Projection) and torch.equal(shown.index, projection.index)):
            return shown
        if isinstance(shown, Projection):
            return Refusal(f"other channels of {call.path} are its {role} than the anatomy names", ("attn_in",))
        if self.trace.ancestors(node, since=call.first_input).isdisjoint(call.outputs.values()):
            return Refusal(f"the anatomy names {call.path} as its {role}, and the scores have nothing of it there")
        return projection

    def neurons(self, part: Part, stated: Neurons | None) -> roles.Neurons | Refusal:
        """The inside of a dense MLP as it is written; the activation is found where it is not."""
        trace = self.trace
        if stated is None:
            return neurons_of(trace, part, N_POS)
        down_call = self.call(stated.down)
        key, act = next(iter(down_call.inputs.items()))
        call, found, index = self._projection(stated.pre)
        pre, straight = channel_tap(trace, call, index), None
        if stated.pre_linear is not None:
            other, _, channels = self._projection(stated.pre_linear)
            straight = channel_tap(trace, other, channels)
        activation = stated.activation
        if activation is None:
            factor = None if straight is None else straight.read(trace.value[other.outputs[straight.key]])
            argument = pre.read(trace.value[call.outputs[pre.key]])
            own = [c.module for c in trace.inside(part.core) if set(c.inputs.values()) == set(call.outputs.values())]
            activation = function_of(argument, trace.value[act], factor, own)
        return roles.Neurons(
            down=self.reading.linear(down_call),
            multiplier=stated.multiplier,
            act=input_tap(down_call, key),
            pre=pre,
            pre_linear=Refusal("this MLP has no second branch", ("mlp_pre",)) if straight is None else straight,
            activation=activation,
            projection=replace(projection_of(trace, call, found, index[:, None], part.read_node), tap=pre),
        )
