"""The eager engine: Hugging Face modules as they are, read and edited by PyTorch hooks."""

import importlib.metadata
import inspect
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.engines.base import Capture, Provenance, Request, Result, Source, Support, refused
from interp.engines.batching import Batch, pad
from interp.engines.edit_checks import check_edit
from interp.engines.hooks import Pass, Session, Use, held, pick, rows, select
from interp.engines.steering import steered
from interp.engines.writing import place_of
from interp.errors import UserError
from interp.models.anatomy import MATRIX_SIDES, Anatomy, Refusal, Tap
from interp.models.float64 import numerics
from interp.models.places import layout_of
from interp.models.weights import BlockWeights, block_weights
from interp.names import Layout
from interp.points import Address, ModelInfo

LOGGER = logging.getLogger("interp")
HEAD_POINTS = frozenset({"lm_head", "logits"})
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


class EagerEngine:
    """A model in this process. `anatomy` says where every point lives."""

    name = "eager"

    def __init__(self, module: nn.Module, tokenizer: Any, anatomy: Anatomy, model: ModelInfo) -> None:
        self.module, self.tokenizer, self.anatomy, self.model = module, tokenizer, anatomy, model
        self.device = next(module.parameters()).device
        self._told = False
        self._accepted = set(inspect.signature(module.forward).parameters)
        self._trunk = module.get_submodule(anatomy.trunk) if anatomy.trunk else None

    def __repr__(self) -> str:
        model = self.model
        return (
            f"<{model.name}: {model.n_layers} layers, d_model {model.d_model}, {model.dtype} on {model.device}, eager>"
        )

    def to_tokens(self, text: str | list[str]) -> Int[Tensor, "batch pos"]:
        """Token ids with BOS as the tokenizer's own default; texts of unequal length raise `UserError`."""
        ids = [self._ids(one) for one in ([text] if isinstance(text, str) else text)]
        if len({len(row) for row in ids}) > 1:
            raise UserError("These texts have different lengths in tokens; send each as its own Request.")
        return torch.tensor(ids, device=self.device)

    def check_prompt(self, prompt: Sequence[int] | str) -> None:
        """Raises `UserError` if `prompt` is empty, longer than the context, or holds ids outside the vocabulary."""
        self._plan(Request(prompt))

    def _ids(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise UserError(f"{self.model.name} has no tokenizer; pass token ids instead of text.")
        if not text:
            raise UserError("The prompt is empty: there is no token whose activations could be read; write some text.")
        return list(self.tokenizer(text).input_ids)

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
        """One Result per Request; raises `UserError` or `PointRefused` before any forward pass."""
        requests = [steered(self, request) for request in requests]
        plans = [self._plan(request) for request in requests]
        results: dict[int, Result] = {}
        for matrix in (False, True):
            for generates in (False, True):
                group = [
                    i
                    for i, (request, plan) in enumerate(zip(requests, plans, strict=True))
                    if any(tap.side in MATRIX_SIDES for tap in plan.values()) == matrix
                    and (request.max_new_tokens > 0) == generates
                ]
                if group:
                    found = self._batch([requests[i] for i in group], [plans[i] for i in group])
                    results.update(zip(group, found, strict=True))
        return [results[i] for i in range(len(requests))]

    def _plan(self, request: Request) -> dict[Address, Tap]:
        """The tap of every address that the request reads or edits, with every mistake found before the model runs."""
        prompt = self._prompt(request)
        length = len(prompt) + max(request.max_new_tokens, 0)
        if not prompt:
            raise UserError("A prompt needs at least one token.")
        if request.max_new_tokens < 0:
            raise UserError(f"max_new_tokens counts new tokens; {request.max_new_tokens} is below 0.")
        if self.model.n_ctx is not None and length > self.model.n_ctx:
            raise UserError(
                f"The prompt and its continuation take {length} tokens, but the model's context is {self.model.n_ctx}."
            )
        bad = next((t for t in prompt if not 0 <= t < self.model.d_vocab), None)
        if bad is not None:
            raise UserError(f"Token id {bad} is outside the vocabulary of {self.model.d_vocab} tokens.")
        plan = {address: self._tap(address) for address in map(Address.parse, request.capture)}
        if request.max_new_tokens and any(tap.side in MATRIX_SIDES for tap in plan.values()):
            raise UserError(
                "Attention matrices are captured on a finished sequence: run it again with max_new_tokens=0."
            )
        for edit in request.edits:
            plan |= check_edit(self.anatomy, self.model, edit, prompt, request.max_new_tokens)
        return plan

    def _tap(self, address: Address) -> Tap:
        tap = self.anatomy.tap(address)
        if isinstance(tap, Refusal):
            raise refused(address, tap)
        return tap

    def _prompt(self, request: Request) -> list[int]:
        if isinstance(request.tokens, str):
            return self._ids(request.tokens)
        ids = torch.as_tensor(request.tokens)
        if ids.ndim == 2 and len(ids) == 1:
            ids = ids[0]
        if ids.ndim != 1 or (len(ids) and (ids.is_floating_point() or ids.is_complex())):
            raise UserError(
                f"A Request is one prompt of token ids; these have shape {list(ids.shape)} and {ids.dtype}."
            )
        return ids.tolist()

    def _batch(self, requests: list[Request], plans: list[dict[Address, Tap]]) -> list[Result]:
        prompts = [self._prompt(request) for request in requests]
        session = Session(self._uses(requests, plans), list(map(len, prompts)))
        n_new = max(request.max_new_tokens for request in requests)
        batch = pad(prompts, self.device, front=n_new > 0)
        wants_logits = any(r.return_logits for r in requests) or any(
            a.name in HEAD_POINTS for plan in plans for a in plan
        )
        with torch.no_grad(), self.numerics(), self._uncompiled(), session.attached(self.module):
            if n_new:
                new, logits = self._generate(session, batch, requests, wants_logits)
            else:
                session.now = Pass(batch.positions, batch.tokens, batch.spans)
                new, logits = [[] for _ in requests], self._forward(batch, head=wants_logits)
        return [
            self._result(session, plans[i], requests[i], prompts[i], batch.spans[i], i, new[i], logits)
            for i in range(len(requests))
        ]

    def _uses(self, requests: list[Request], plans: list[dict[Address, Tap]]) -> list[Use]:
        """One Use per point; one more where it is written elsewhere than it is read."""
        reads: dict[Address, Use] = {}
        writes: dict[Address, Use] = {}
        for row, (request, plan) in enumerate(zip(requests, plans, strict=True)):
            for address, tap in plan.items():
                reads.setdefault(held(address), Use(held(address), tap))
            for address in map(Address.parse, request.capture):
                reads[held(address)].captured = True
            for edit in request.edits:
                for address in edit.reads:
                    reads[held(address)].kept = True
                read = reads[held(edit.at)]
                place = place_of(self.anatomy, read.address, read.tap)
                assert not isinstance(place, Refusal)
                own = read if place.tap is read.tap else Use(read.address, place.tap, stream=place.stream)
                writes.setdefault(read.address, own).edits.append((row, edit))
        return [*reads.values(), *(use for use in writes.values() if use is not reads[use.address])]

    def _uncompiled(self) -> AbstractContextManager[Any]:
        """Modules that torch.compile has taken over run as they are: a compiled graph passes later hooks by."""
        compiled = any(module._compiled_call_impl is not None for module in self.module.modules())
        if compiled and not self._told:
            LOGGER.info("%s is compiled; the eager engine runs it uncompiled, where hooks act.", self.model.name)
            self._told = True
        return torch.compiler.set_stance("force_eager") if compiled else nullcontext()

    def numerics(self) -> AbstractContextManager[Any]:
        """In float64, the casts to float32 inside the model are lifted; else nothing."""
        return numerics(next(self.module.parameters()).dtype)

    def _forward(self, batch: Batch, *, head: bool) -> list[Tensor]:
        inputs = self._inputs(
            self.module, batch.tokens, batch.mask, batch.positions if batch.mask is not None else None
        )
        if head or self._trunk is None:
            output = self.module(**inputs, use_cache=False)
            return [pick(output, self.anatomy.logits.key)]
        self._trunk(**inputs, use_cache=False)
        return []

    def _inputs(
        self, module: nn.Module, tokens: Tensor, mask: Tensor | None, positions: Tensor | None
    ) -> dict[str, Any]:
        inputs: dict[str, Any] = {"input_ids": tokens}
        if mask is not None:
            inputs["attention_mask"] = mask
        if positions is not None and self.anatomy.position_ids:
            inputs["position_ids"] = positions
        return inputs

    def _generate(
        self, session: Session, batch: Batch, requests: list[Request], all_logits: bool
    ) -> tuple[list[list[int]], list[Tensor]]:
        """Greedy decoding with a cache; captures are taken while decoding."""
        cache_name = next((name for name in CACHE_NAMES if name in self._accepted), None)
        if cache_name is None:
            raise UserError(f"{self.model.name} takes no cache under a name that is known here, so it cannot generate.")
        stop = self._stop_tokens()
        new: list[list[int]] = [[] for _ in requests]
        kept: list[Tensor] = []
        tokens, mask, positions, cache = batch.tokens, batch.mask, batch.positions, None
        while True:
            session.now = Pass(positions, tokens, batch.spans if cache is None else None)
            inputs = self._inputs(self.module, tokens, mask, positions)
            if cache is not None:
                inputs[cache_name] = cache
            if not all_logits and "logits_to_keep" in self._accepted:
                inputs["logits_to_keep"] = 1
            output = self.module(**inputs, use_cache=True)
            cache = output[cache_name]
            logits = pick(output, self.anatomy.logits.key)
            if all_logits:
                kept.append(logits.clone())
            chosen = logits[:, -1].argmax(-1)
            for row, request in enumerate(requests):
                if not _finished(new[row], request, stop):
                    new[row].append(int(chosen[row]))
            if all(_finished(new[row], request, stop) for row, request in enumerate(requests)):
                return new, kept
            tokens = chosen[:, None]
            # Rows that are finished ride along until the last one is; their positions must stay inside the context.
            positions = positions[:, -1:] + 1
            if self.model.n_ctx is not None:
                positions = positions.clamp(max=self.model.n_ctx - 1)
            if mask is not None:
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=-1)

    def _stop_tokens(self) -> frozenset[int]:
        stated = getattr(getattr(self.module, "generation_config", None), "eos_token_id", None)
        return frozenset([stated] if isinstance(stated, int) else stated or [])

    def _result(
        self,
        session: Session,
        plan: Mapping[Address, Tap],
        request: Request,
        prompt: list[int],
        span: slice,
        row: int,
        new: list[int],
        logits: list[Tensor],
    ) -> Result:
        n_later = max(len(new) - 1, 0)
        captured = {}
        for address in map(Address.parse, request.capture):
            captured[address] = select(rows(session.captured[held(address)], address, row, span, n_later), address)
        stopped = bool(new) and new[-1] in self._stop_tokens()
        return Result(
            tokens=prompt + new,
            n_prompt=len(prompt),
            text=self.tokenizer.decode(new) if new and self.tokenizer is not None else None,
            capture=Capture(captured),
            logits=rows(logits, Address("logits"), row, span, n_later) if request.return_logits else None,
            finish_reason="prompt" if not new else "stop" if stopped else "length",
            provenance=self._provenance(session, {address: plan[address] for address in captured}),
        )

    def _provenance(self, session: Session, taps: Mapping[Address, Tap]) -> Provenance:
        own = getattr(getattr(self.module, "config", None), "_attn_implementation", None)
        return Provenance(
            engine=self.name,
            versions={name: importlib.metadata.version(name) for name in ("torch", "transformers")},
            dtype=self.model.dtype,
            device=str(self.device),
            attention="eager, observed" if session.needs_matrix else str(own),
            sources={address: Source(tap.path, tap.side, tap.transform) for address, tap in taps.items()},
        )

    def unembed(self, resid: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_vocab"]:
        """Logits of a residual stream through the real final norm, head, scale and cap.

        Raises `PointRefused` where the model's logits are not a linear map of its final norm's output.
        """
        head = self.anatomy.head
        if isinstance(head, Refusal):
            raise refused(Address("logits"), head)
        n = self.model.n_streams
        wanted = (self.model.d_model,) if n == 1 else (n, self.model.d_model)
        if resid.shape[-len(wanted) :] != wanted:
            shape = ", ".join(map(str, wanted))
            raise UserError(f"unembed takes [..., {shape}]; this tensor has shape {list(resid.shape)}.")
        if n > 1:  # the model's own collapse takes [batch, pos, streams, d_model]
            return self._unembed(resid.reshape(-1, 1, *wanted)).reshape(*resid.shape[:-2], -1)
        return self._unembed(resid)

    def _unembed(self, resid: Tensor) -> Tensor:
        head, norm = self.anatomy.head, self.anatomy.final_norm
        assert not isinstance(head, Refusal)
        with torch.no_grad(), self.numerics():
            x = resid if self.anatomy.collapse is None else self.anatomy.collapse.module(resid)
            return head.unembed(x if isinstance(norm, Refusal) else norm.module(x))

    def weights(self, layer: int) -> BlockWeights | Refusal:
        """Linear maps of one block; a Refusal where its value path is not the linear one."""
        return block_weights(self.anatomy, layer)

    def close(self) -> None:
        """Free the model."""
        self.module = nn.Module()


def _finished(new: list[int], request: Request, stop: frozenset[int]) -> bool:
    return len(new) >= request.max_new_tokens or (bool(new) and new[-1] in stop)
