"""The nnsight engine: the same modules, read and edited through NNsight's envoys.

A trace runs the visits of a session in a greenlet beside the forward pass: it waits at `envoy.inputs` or `envoy.output`
until the pass is there, calls what the eager engine registers as hooks, and hands back what is to go on instead. The
places are visited in the order in which one short pass has come by them.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import Context, copy_context
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from interp.engines.eager import EagerEngine
from interp.engines.hooks import Session
from interp.errors import InterpError, UserError
from interp.models.anatomy import Anatomy, Refusal, Tap
from interp.models.weights import BlockWeights, block_weights
from interp.points import POINTS, STREAM_POINTS, Address, ModelInfo

if TYPE_CHECKING:
    from nnsight import Envoy

INSIDE = {
    "function": "it is made by a function call inside a module's forward",
    "attention": "it is held by the attention function inside a module's forward",
    "softmax": "it is made around a softmax inside a module's forward",
    "shares": "it takes further runs of a module, one per expert",
}
"""Where a tap is no input and no output of a module: why no envoy shows it."""


class NNsightEngine(EagerEngine):
    """A model in this process, run inside a trace of nnsight. Points inside a module's forward are refused."""

    name = "nnsight"
    packages = (*EagerEngine.packages, "nnsight")

    def __init__(self, module: nn.Module, tokenizer: Any, anatomy: Anatomy, model: ModelInfo) -> None:
        refused = anatomy.refused | _inside(anatomy, model)
        super().__init__(module, tokenizer, dataclasses.replace(anatomy, refused=refused), model)
        self._whole = anatomy

    @contextmanager
    def attached(self, session: Session) -> Iterator[None]:
        """The session's passes inside the context."""
        with self._uncompiled(), session.active():
            yield

    def forward(self, session: Session, module: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """One pass of `module`, the whole model or its trunk, in a trace of its own."""
        places = self._places(session)
        if not places:
            return module(**inputs)
        from nnsight.intervention.interleaver import OutOfOrderError

        outputs: list[Any] = []
        context = copy_context()  # a greenlet begins with an empty one, and the visits ask whose pass this is
        calls = self._tree.interleaver.counts
        before = [calls.get(place.location, 0) for place in places]
        try:
            # The call is a function of its own: nnsight moves what it is given to the first parameter's device.
            with self._tree.trace(None, fn=lambda _: outputs.append(module(**inputs))):
                _visit(places, context)
            once = all(calls[place.location] == n + 1 for place, n in zip(places, before, strict=True))
        except OutOfOrderError:
            once = False
        if not once:
            raise InterpError(
                f"{self.model.name} did not run its modules once each and in the order of a short pass, in which a "
                'trace of nnsight visits them; load the model with engine="eager".'
            )
        return outputs[0]

    def weights(self, layer: int) -> BlockWeights | Refusal:
        """Linear maps of one block; a Refusal where its value path is not the linear one."""
        return block_weights(self._whole, layer)  # which asks for points that no request can name here

    def by_hooks(self) -> EagerEngine:
        """The eager engine of this very model, which reads what no envoy shows."""
        return EagerEngine(self.module, self.tokenizer, self._whole, self.model)

    def compile(self) -> None:
        """Raises `UserError`: a trace runs Python beside every step."""
        raise UserError(COMPILED)

    def _places(self, session: Session) -> list["Place"]:
        """What the session does in a pass, by module and side, in the order of the pass."""
        hooks: dict[tuple[int, str], list[Callable[..., Any]]] = defaultdict(list)
        for visit in session.visits():
            hooks[id(visit.module), visit.side].append(visit.hook)
        if hooks and self._tree.interleaver.interleaving:
            raise UserError(
                "A run inside another run's edit needs a second trace of the same modules, which nnsight does not "
                'have; load the model with engine="eager".'
            )
        order = self._order if hooks else {}
        # What did not run in the short pass comes last, where waiting for it in vain says so.
        ordered = sorted(hooks, key=lambda place: order.get(place, len(order)))
        return [Place(self._envoys[module], side, hooks[module, side]) for module, side in ordered]

    @cached_property
    def _tree(self) -> "Envoy":
        """Envoys of the engine's own: edits that are stored on `nnsight`, the user's, do not change its runs."""
        from nnsight import NNsight

        return NNsight(self.module)

    @cached_property
    def _envoys(self) -> dict[int, "Envoy"]:
        return {id(envoy._module): envoy for envoy in self._tree.modules()}

    @cached_property
    def _order(self) -> dict[tuple[int, str], int]:
        """When a pass comes by the input and the output of each module."""
        order: dict[tuple[int, str], int] = {}

        def watch(side: str) -> Callable[..., None]:
            def seen(module: nn.Module, *_: Any) -> None:
                order.setdefault((id(module), side), len(order))

            return seen

        with ExitStack() as stack:
            for module in self.module.modules():
                stack.callback(module.register_forward_pre_hook(watch("input")).remove)
                stack.callback(module.register_forward_hook(watch("output")).remove)
            tokens = torch.zeros(1, 2, dtype=torch.long, device=self.device)
            self.module(**self._calling.inputs(tokens))
        return order


COMPILED = (
    "compile=True decodes by a graph that no Python runs beside, and a trace of nnsight is Python beside every step: "
    'load the model with engine="eager", or without compile.'
)


class Place(NamedTuple):
    """One side of one module, and what is to happen there, in order."""

    envoy: Any
    """Of the module; its `inputs` and `output` are read and written as in any trace."""
    side: str
    hooks: Sequence[Callable[..., Any]]

    @property
    def location(self) -> str:
        """What nnsight calls it."""
        return f"{self.envoy.path}.{self.side}"


def _visit(places: Sequence[Place], context: Context) -> None:
    """The body of a trace: hand every place's value to its hooks, as PyTorch does."""
    for place in places:
        envoy: Any = place.envoy
        module, side, hooks = envoy._module, place.side, place.hooks
        if side == "input":
            given = args, kwargs = envoy.inputs
            for hook in hooks:
                given = context.run(hook, module, *given) or given
            if given[0] is not args or given[1] is not kwargs:
                envoy.inputs = given
        else:
            output = new = envoy.output
            for hook in hooks:
                changed = context.run(hook, module, (), new)
                new = new if changed is None else changed
            if new is not output:
                envoy.output = new


def _inside(anatomy: Anatomy, model: ModelInfo) -> dict[Address, Refusal]:
    """Points that are no input and no output of a module."""
    found: dict[Address, Refusal] = {}
    for point in POINTS.values():
        stream = 0 if model.n_streams > 1 and point.name in STREAM_POINTS else None
        for layer in range(model.n_layers) if point.per_layer else [None]:
            address = Address(point.name, layer, stream=stream)
            tap = anatomy.tap(address)
            if isinstance(tap, Tap) and tap.side in INSIDE:
                found[address.whole] = Refusal(
                    f"{INSIDE[tap.side]}, and envoys of nnsight show what modules take and give; "
                    'load the model with engine="eager", which reads it'
                )
    return found


__all__ = ["NNsightEngine"]
