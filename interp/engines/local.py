"""What every engine shares whose model is in this process: requests become passes, passes become results.

An engine of this kind says how one pass runs with a session's taps in place; all else is here, once.
"""

import importlib.metadata
import logging
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, cached_property
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from interp.engines.base import Capture, Provenance, Request, Result, Source, Step, Support, refused
from interp.engines.capture_memory import CaptureMemory
from interp.engines.compiled import CompiledSteps
from interp.engines.editing import Use, held
from interp.engines.graph import Graph, without_parameters
from interp.engines.hooks import Session
from interp.engines.kv_cache import plain_layers
from interp.engines.plan import Plan, encode, plan
from interp.engines.running import Running
from interp.engines.sampling import Sampling
from interp.engines.steering import steered
from interp.engines.writing import place_of
from interp.errors import PointRefused, UserError
from interp.models.anatomy import Anatomy, Bridge, Refusal, Tap, through_pieces
from interp.models.calling import calling_of
from interp.models.float64 import numerics
from interp.models.parameters import device_of, dtype_of
from interp.models.places import layout_of
from interp.models.rerun import pick
from interp.models.weights import BlockWeights, block_weights
from interp.names import Layout
from interp.points import Address, ModelInfo

if TYPE_CHECKING:
    from nnsight import Envoy

LOGGER = logging.getLogger("interp")
ENDLESS = Sampling(ignore_eos=True)
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
_version = cache(importlib.metadata.version)
"""Of an installed package; milliseconds to find, so once."""


class LocalEngine(ABC):
    """A model in this process. `anatomy` says where every point lives."""

    name: str

    def __init__(self, module: nn.Module, tokenizer: Any, anatomy: Anatomy, model: ModelInfo) -> None:
        self.module, self.tokenizer, self.anatomy, self.model = module, tokenizer, anatomy, model
        self.device = device_of(module)
        self.compiled_steps: CompiledSteps | None = None
        self._capture_memory = CaptureMemory()
        self._calling = calling_of(module)
        trunk = module.get_submodule(anatomy.trunk)
        self._trunk_calling = calling_of(trunk)
        same = anatomy.trunk and self._trunk_calling.masks == self._calling.masks
        self._trunk = trunk if same else None
        self._lock = RLock()

    def __repr__(self) -> str:
        model = self.model
        size = f"{model.n_layers} layers, d_model {model.d_model}"
        return f"<{model.name}: {size}, {model.dtype} on {model.device}, {self.name}>"

    @abstractmethod
    def attached(self, session: Session) -> AbstractContextManager[None]:
        """The session's taps in place, for the passes inside the context."""

    @abstractmethod
    def forward(self, session: Session, module: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """One pass of `module`, the whole model or its trunk."""

    def to_tokens(self, text: str | list[str]) -> Int[Tensor, "batch pos"]:
        """Token ids with BOS as the tokenizer's own default; texts of unequal length raise `UserError`."""
        texts = [text] if isinstance(text, str) else text
        ids = [encode(one, self.model, self.tokenizer) for one in texts]
        if len({len(row) for row in ids}) > 1:
            raise UserError("These texts have different lengths in tokens; send each as its own Request.")
        return torch.tensor(ids, device=self.device)

    def to_chat_tokens(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> Int[Tensor, "1 pos"]:
        """Ids of a conversation ([{"role": "user", "content": …}, …]) through the tokenizer's own chat template.

        With `add_generation_prompt` they end where the model's answer begins. Raises `UserError` where there is no
        template.
        """
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise UserError(f"The tokenizer of {self.model.name} has no chat template; write the prompt as text.")
        # The template writes BOS itself, so that the tokenizer must not add another.
        given = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=True
        )
        return torch.tensor([list(given["input_ids"])], device=self.device)

    def check_prompt(self, prompt: Sequence[int] | str) -> None:
        """Raises `UserError` if `prompt` is empty, longer than the context, or holds ids outside the vocabulary."""
        self._plan(Request(prompt))

    def support(self, address: Address | str) -> Support:
        """Whether `address` can be read and written here, else why not."""
        address = Address.parse(address)
        tap = self.anatomy.tap(address)
        if isinstance(tap, Refusal):
            return Support(False, False, tap.reason)
        place = place_of(self.anatomy, address, tap)
        return Support(True, not isinstance(place, Refusal), place.reason if isinstance(place, Refusal) else "")

    @cached_property
    def layout(self) -> Layout:
        """What `interp.names` needs to translate other tools' names for this model; takes one short pass."""
        return layout_of(self.anatomy, self.model)

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """One Result per Request; raises `UserError` or `PointRefused` before any forward pass.

        Requests of one kind (with new tokens or without, with attention matrices or without) share their passes.
        """
        plans = [self._plan(request) for request in requests]
        results: dict[int, Result] = {}
        kinds = [(one.kind, len(one.prompt)) for one in plans]
        if self._calling.masks:
            lengths = {n for kind, n in kinds if kind.generates}
            apart = len(lengths) > 1 and not self.pads_in_front
            kinds = [(kind, n if apart and kind.generates else 0) for kind, n in kinds]
        for kind in dict.fromkeys(kinds):
            group = [i for i, own in enumerate(kinds) if own == kind]
            running = self._start([plans[i] for i in group], self.compiled_steps)
            self._finish(running)
            results.update(zip(group, running.results(), strict=True))
        return [results[i] for i in range(len(requests))]

    @cached_property
    def pads_in_front(self) -> bool:
        """Whether prompts behind padding give what they give alone, by decoding two short ones together and apart.

        Positions that are counted from the first column, or a state that runs through it, make them give something
        else; prompts of unequal length are then decoded apart.
        """
        ids = [(i * 7 + 3) % self.model.d_vocab for i in range(5)]
        asked = [Request(one, max_new_tokens=3, sampling=ENDLESS, return_logits=True) for one in (ids[:2], ids)]
        plans = [plan(one, self.anatomy, self.model, None) for one in asked]
        together, *apart = (self._start(some) for some in (plans, plans[:1], plans[1:]))
        for running in (together, *apart):
            self._finish(running)
        same = True
        for behind, alone in zip(together.results(), (running.results()[0] for running in apart), strict=True):
            assert behind.logits is not None and alone.logits is not None
            difference = (behind.logits - alone.logits).abs().max() / alone.logits.abs().max()
            same &= bool(difference <= torch.finfo(alone.logits.dtype).eps ** 0.5)
        if not same:
            text = "%s computes something else behind padding; prompts of unequal length are decoded apart."
            LOGGER.info(text, self.model.name)
        return same

    @cached_property
    def cached_layers(self) -> tuple[bool, ...] | None:
        """Which layers keep keys and values from step to step; None where something else is kept, by one short pass.

        Raises `UserError` where the model gives nothing back to go on from.
        """
        ids = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        with self._lock, torch.no_grad(), self.numerics(), self.attached(session := Session([], self._capture_memory)):
            inputs = self.decoding_inputs(ids, None, torch.arange(2, device=self.device)[None], None)
            output = self.forward(session, self.module, inputs)
        own = getattr(output, self.cache_name(), None)
        if own is None:
            raise UserError(
                f"{self.model.name} cannot generate: its forward gives no {self.cache_name()} back, as is so with "
                "encoders; run the prompt with max_new_tokens=0."
            )
        return plain_layers(own)

    def stream(self, request: Request) -> Generator[Step]:
        """The same continuation as `run` gives, token by token; raises what `run` raises before the first.

        Between two steps the model is as it was: no hook is in place, and other requests may run.
        """
        one = self._plan(request)
        if not request.max_new_tokens:
            raise UserError("stream gives new tokens: set max_new_tokens, or use run for the prompt alone.")
        return self._steps(self._start([one], self.compiled_steps))

    def _steps(self, running: Running) -> Generator[Step]:
        try:
            while not running.done:
                with self._passing(running):
                    running.advance()
                yield running.step()
        finally:
            self._capture_memory.settle()

    def run_stacked(self, requests: Sequence[Request], keep: Bool[Tensor, "batch pos"]) -> Capture:
        """Tensors [batch, pos, ...] on the autograd graph: what the requests, one per row of `keep`, capture.

        The pass goes on with these very tensors, so that a backward reaches them.
        """
        plans = [self._plan(request) for request in requests]
        if len({one.kind for one in plans}) != 1 or not plans[0].request.grad:
            raise UserError("run_stacked takes requests of one kind with grad=True.")
        running = self._start(plans, keep=keep)
        self._finish(running)
        assert running.session.graph is not None
        return Capture({address: running.session.graph.stacked[address] for address in plans[0].captured})

    def vjp(
        self, request: Request, at: Mapping[Address, Tensor] | Mapping[str, Tensor], to: Sequence[Address | str]
    ) -> dict[Address, Tensor]:
        """Gradients at `to` ([pos, ...], as captured) of Σ ⟨cotangent, tensor⟩ over the tensors at `at`.

        One forward and one backward. Raises `PointRefused` for a point in `to` that the pass does not go on with.
        """
        wanted = {Address.parse(address): cotangent for address, cotangent in at.items()}
        sources = [Address.parse(address) for address in to]
        for address in sources:
            support = self.support(address)
            if support.readable and not support.writable:
                raise PointRefused(f"{address} has no gradient: {support.reason}.")
        given = Request(request.tokens, capture=[*wanted, *sources], edits=request.edits, grad=True)
        (result,) = self.run([given])
        outputs = [result.capture[address] for address in wanted]
        for (address, cotangent), output in zip(wanted.items(), outputs, strict=True):
            if cotangent.shape != output.shape:
                raise UserError(f"{address} is {list(output.shape)} here; its cotangent is {list(cotangent.shape)}.")
        found = torch.autograd.grad(
            outputs,
            [result.capture[address] for address in sources],
            [cotangent.to(output) for cotangent, output in zip(wanted.values(), outputs, strict=True)],
            materialize_grads=True,
        )
        return dict(zip(sources, found, strict=True))

    def unembed(self, resid: Float[Tensor, "... d_model"], layer: int | None = None) -> Float[Tensor, "... d_vocab"]:
        """Logits of the stream of `layer` (the last one where None) through the real final norm, head, scale and cap.

        Where adapters stand between groups of blocks, it goes through those behind that layer first. Raises
        `PointRefused` where the model's logits are not a linear map of its final norm's output, or an adapter is not
        known.
        """
        head = self.anatomy.head
        if isinstance(head, Refusal):
            raise refused(Address("logits"), head)
        n, d_model = self.model.n_streams, self.model.width(layer)
        wanted = (d_model,) if n == 1 else (n, d_model)
        if resid.shape[-len(wanted) :] != wanted:
            shape = ", ".join(map(str, wanted))
            hint = "; name the layer that it is of" if self._bridges and layer is None else ""
            raise UserError(f"unembed takes [..., {shape}]; this tensor has shape {list(resid.shape)}{hint}.")
        for bridge in self._bridges:
            if layer is not None and layer <= bridge.layer:
                resid = self._across(bridge, resid)
        if n > 1:  # the model's own collapse takes [batch, pos, streams, d_model]
            return self._unembed(resid.reshape(-1, 1, *wanted)).reshape(*resid.shape[:-2], -1)
        return self._unembed(resid)

    @property
    def _bridges(self) -> list[Bridge]:
        return [self.anatomy.bridges[layer] for layer in sorted(self.anatomy.bridges)]

    def _across(self, bridge: Bridge, resid: Tensor) -> Tensor:
        if isinstance(bridge.pieces, Refusal):
            raise refused(Address("logits"), bridge.pieces)
        with torch.no_grad(), self.numerics():
            return through_pieces(bridge.pieces, resid)

    def _unembed(self, resid: Tensor) -> Tensor:
        head, norm = self.anatomy.head, self.anatomy.final_norm
        assert not isinstance(head, Refusal)
        with torch.no_grad(), self.numerics():
            x = resid if self.anatomy.collapse is None else self.anatomy.collapse.module(resid)
            return head.unembed(x if isinstance(norm, Refusal) else norm.module(x)).to(resid.device)

    def weights(self, layer: int) -> BlockWeights | Refusal:
        """Linear maps of one block; a Refusal where its value path is not the linear one."""
        return block_weights(self.anatomy, layer)

    def by_hooks(self) -> "LocalEngine":
        """An engine of this very model that reads what lies inside modules, too: itself, but on nnsight."""
        return self

    def numerics(self) -> AbstractContextManager[Any]:
        """In float64, the casts to float32 inside the model are lifted; else nothing."""
        return numerics(dtype_of(self.module))

    def compile(self) -> None:
        """From here on decode by compiled graphs (see `load_model`).

        Raises `UserError` where the model keeps more than keys and values between steps.
        """
        if not self.cache_name() or self.cached_layers is None:
            raise UserError(
                f"{self.model.name} keeps something else than keys and values from step to step, which no compiled "
                "step can hold: load it without compile."
            )
        self.compiled_steps = CompiledSteps()

    @cached_property
    def nnsight(self) -> "Envoy":
        """The model as an envoy of nnsight, to trace by hand: `with model.nnsight.trace(model.to_tokens(text)): …`.

        No hook of PyTorch stays on the model; `run` gives what it gave before, inside a trace it raises `UserError`.
        """
        from nnsight import NNsight

        return NNsight(self.module)

    def close(self) -> None:
        """Free the model and what its runs left; whatever is asked of the engine afterwards raises `UserError`."""
        self._capture_memory.free()
        for name in set(vars(self)) - {"model", "_capture_memory"}:
            delattr(self, name)

    def __getattr__(self, name: str) -> Any:
        if "module" not in vars(self) and "model" in vars(self) and not name.startswith("__"):
            raise UserError(f"The engine of {self.model.name} is closed; load the model again.")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def _plan(self, request: Request) -> Plan:
        found = plan(steered(self, request), self.anatomy, self.model, self.tokenizer)
        if self.compiled_steps is not None and request.max_new_tokens:
            self.compiled_steps.check(found.edits)
        return found

    def _start(
        self, plans: Sequence[Plan], steps: CompiledSteps | None = None, *, keep: Tensor | None = None
    ) -> Running:
        """The batch, before its first pass."""
        graph = Graph(self._root(), keep) if plans[0].request.grad else None
        if any(one.request.max_new_tokens for one in plans) and not self.cache_name():
            raise UserError(
                f"{self.model.name} cannot generate: its forward takes no {' or '.join(CACHE_NAMES)}, and nothing is "
                "run a second time here; run the prompt with max_new_tokens=0."
            )
        return Running(self, plans, Session(self._uses(plans), self._capture_memory, graph), steps)

    def _finish(self, running: Running) -> None:
        try:
            with self._passing(running):
                while not running.done:
                    running.advance()
        finally:
            self._capture_memory.settle()

    @contextmanager
    def _passing(self, running: Running) -> Iterator[None]:
        """Everything that a pass needs in place; one batch of an engine at a time."""
        if "nnsight" in vars(self) and self.nnsight.interleaver.interleaving:
            raise UserError("A trace by hand is running on these modules: call run before or after its block.")
        graph = running.session.graph
        gradients = torch.no_grad() if graph is None else without_parameters(self.module)
        with self._lock, gradients, self.numerics(), self.attached(running.session):
            yield

    def _root(self) -> Tap:
        """Where the autograd graph of a pass begins."""
        root = self.anatomy.embeddings
        root = root if isinstance(root, Tap) and root.side in ("input", "output") else self.anatomy.blocks[0].input
        if isinstance(root, Refusal):
            raise refused(Address("resid_pre", 0), root)
        return root

    def _uses(self, plans: Sequence[Plan]) -> list[Use]:
        """One Use per point; one more where it is written elsewhere than it is read."""
        reads: dict[Address, Use] = {}
        writes: dict[Address, Use] = {}
        for row, one in enumerate(plans):
            for address, tap in one.taps.items():
                reads.setdefault(held(address), Use(held(address), tap))
            for address in one.captured:
                # A pass can only go on with a captured tensor at the place where a new value would be written.
                use = self._written(reads[held(address)], writes) if one.request.grad else reads[held(address)]
                use.readers.append((row, address))
            for edit in one.edits:
                self._written(reads[held(edit.at)], writes).edits.append((row, edit))
                for address in edit.reads:
                    reads[held(address)].kept = True
        return [*reads.values(), *(use for use in writes.values() if use is not reads[use.address])]

    def _written(self, read: Use, writes: dict[Address, Use]) -> Use:
        place = place_of(self.anatomy, read.address, read.tap)
        if isinstance(place, Refusal):
            return read
        own = read if place.tap is read.tap else Use(read.address, place.tap, stream=place.stream)
        return writes.setdefault(read.address, own)

    # What the model's forward takes.

    def finished_pass(self, session: Session, tokens: Tensor, mask: Tensor | None, *, head: bool) -> Tensor | None:
        """One pass without a cache; its logits, or None where the head was left out because nobody wants it.

        Padding stands behind the tokens, where a model's own count of positions is right.
        """
        if head or self._trunk is None:
            return pick(self.forward(session, self.module, self._calling.inputs(tokens, mask)), self.anatomy.logits.key)
        self.forward(session, self._trunk, self._trunk_calling.inputs(tokens, mask))
        return None

    def decoding_inputs(self, tokens: Tensor, mask: Tensor | None, positions: Tensor, cache: Any) -> dict[str, Any]:
        """Keyword arguments of a pass that fills a cache; None lets the model make its own."""
        inputs = self._calling.inputs(tokens, mask, positions, use_cache=True)
        return inputs if cache is None else inputs | {self.cache_name(): cache}

    def last_logits_only(self) -> dict[str, Any]:
        """The keyword that keeps the head to the last position, where the model has it."""
        return {"logits_to_keep": 1} if "logits_to_keep" in self._calling.named else {}

    def cache_name(self) -> str:
        """What the model calls its cache; empty where it takes none that is known here."""
        return next((name for name in CACHE_NAMES if name in self._calling.named), "")

    def end_tokens(self) -> frozenset[int]:
        """Ids that end a continuation."""
        stated = getattr(getattr(self.module, "generation_config", None), "eos_token_id", None)
        return frozenset([stated] if isinstance(stated, int) else stated or [])

    def provenance(self, session: Session, taps: Mapping[Address, Tap], seed: int | None, compiled: bool) -> Provenance:
        """What produced a result."""
        own = getattr(getattr(self.module, "config", None), "_attn_implementation", None)
        return Provenance(
            engine=f"{self.name}, compiled" if compiled else self.name,
            versions={name: _version(name) for name in self.packages},
            dtype=self.model.dtype,
            device=str(self.device),
            attention="eager, observed" if session.needs_matrix else str(own),
            sources={address: Source(tap.path, tap.side, tap.transform) for address, tap in taps.items()},
            seed=seed,
        )

    packages: tuple[str, ...] = ("torch", "transformers")
    """Whose versions a result names."""
