"""A batch of requests on its way through the model: the prompt's pass, then one pass per new token.

Captures are taken while the passes run; nothing is run again. A request that is finished rides along until the last one
is. `advance` is one pass and the choices after it, so that a batch and a stream are the same walk.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from interp.engines.base import Capture, Provenance, Result, Step
from interp.engines.batching import pad
from interp.engines.compiled import CompiledSteps
from interp.engines.editing import Pass
from interp.engines.hooks import Session
from interp.engines.kv_cache import buffered_cache
from interp.engines.plan import Plan
from interp.engines.sampling import Chooser, TokenLogprob
from interp.engines.text import Text
from interp.models.rerun import pick

if TYPE_CHECKING:
    from interp.engines.local import LocalEngine

HEAD_POINTS = frozenset({"lm_head", "logits"})


class Row:
    """One request of the batch: what it has so far."""

    def __init__(self, plan: Plan, span: slice, tokenizer: Any, ends: frozenset[int]) -> None:
        self.plan, self.span = plan, span
        self.new: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason = ""
        self._chooser = Chooser(plan.request.sampling, plan.request.logprobs)
        self._ends = frozenset() if plan.request.sampling.ignore_eos else ends
        self.text = Text(tokenizer, plan.request.sampling.stop)

    @property
    def seed(self) -> int | None:
        return self._chooser.seed

    @property
    def rows(self) -> slice:
        """Columns of the batch that are positions of this request which went through the model."""
        return slice(self.span.start, self.span.stop + max(len(self.new) - 1, 0))

    def choose(self, logits: Tensor) -> None:
        """Append the next token, from logits [d_vocab]."""
        token = self._chooser.choose(logits, self.plan.prompt + self.new)
        logprob = self._chooser.logprob(logits, token)
        self.new.append(token)
        self.logprobs += [logprob] if logprob else []
        stopped = self.text.add(token) or token in self._ends
        if stopped or len(self.new) == self.plan.request.max_new_tokens:
            self.finish_reason = "stop" if stopped else "length"


class Running:
    """The plans of one kind, in one batch."""

    def __init__(
        self, engine: "LocalEngine", plans: Sequence[Plan], session: Session, steps: CompiledSteps | None
    ) -> None:
        self.engine, self.session = engine, session
        n_new = max(plan.request.max_new_tokens for plan in plans)
        batch = pad([plan.prompt for plan in plans], engine.device, front=n_new > 0)
        ends = engine.end_tokens()
        self.rows = [Row(p, span, engine.tokenizer, ends) for p, span in zip(plans, batch.spans, strict=True)]
        self.n_columns = batch.tokens.shape[1] + max(n_new - 1, 0)
        self._tokens, self._mask, self._positions = batch.tokens, batch.mask, batch.positions
        self._generates, self._cache = n_new > 0, None
        self._column = 0
        self._wants_logits = any(plan.request.return_logits for plan in plans)
        self._wants_head = self._wants_logits or any(a.name in HEAD_POINTS for plan in plans for a in plan.taps)
        self._logits: Tensor | None = None
        self.compiled = False
        self._steps = steps
        if self._generates:
            self._cache_name = engine.cache_name()
            length = self.n_columns if steps is None else steps.length(self.n_columns)
            layers = engine.cached_layers
            self._cache = None if layers is None else buffered_cache(layers, length)
            if steps is not None:
                self._whole_mask = batch.tokens.new_zeros(len(plans), length)
        session.start(self.n_columns, batch.spans, engine.device)

    @property
    def done(self) -> bool:
        if not self._generates:
            return self._column > 0
        return all(row.finish_reason for row in self.rows)

    def advance(self) -> None:
        """One forward pass, and every unfinished request's next token."""
        n = self._tokens.shape[1]
        columns = slice(self._column, self._column + n)
        spans = [row.span for row in self.rows] if self._column == 0 else None
        self.session.begin(Pass(self._positions, self._tokens, columns, spans))
        logits = self._forward()
        self._column += n
        if self._wants_logits and logits is not None:
            self._keep_logits(logits, columns)
        if not self._generates:
            return
        assert logits is not None
        chosen = []
        for i, row in enumerate(self.rows):
            if not row.finish_reason:
                row.choose(logits[i, -1])
            chosen.append(row.new[-1])
        if self.done:
            return
        self._tokens = torch.tensor(chosen, device=self.engine.device)[:, None]
        # Rows that are finished ride along until the last one is; their positions must stay inside the context.
        self._positions = self._positions[:, -1:] + 1
        if self.engine.model.n_ctx is not None:
            self._positions = self._positions.clamp(max=self.engine.model.n_ctx - 1)
        if self._mask is not None:
            self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], dim=-1)

    def _forward(self) -> Tensor | None:
        """Logits [batch, pos, d_vocab] of this pass, of its last position alone where no other is wanted."""
        engine = self.engine
        if not self._generates:
            return engine.finished_pass(self.session, self._tokens, self._mask, head=self._wants_head)
        if self._steps is not None and self._column:
            assert self._cache is not None
            now = slice(0, self._column + 1)
            self._whole_mask[:, now] = 1 if self._mask is None else self._mask
            self.compiled = True
            return self._steps.run(engine, self.session, self._cache, self._tokens, self._whole_mask, self._positions)
        inputs = engine.decoding_inputs(self._tokens, self._mask, self._positions, self._cache)
        if not self._wants_head:
            inputs |= engine.last_logits_only()
        output = engine.forward(self.session, engine.module, inputs)
        self._cache = output[self._cache_name]
        return pick(output, engine.anatomy.logits.key)

    def _keep_logits(self, logits: Tensor, columns: slice) -> None:
        if not self._generates:
            self._logits = logits.to(self.engine.device)
            return
        if self._logits is None:
            shape = len(logits), self.n_columns, logits.shape[-1]
            self._logits = torch.empty(shape, dtype=logits.dtype, device=self.engine.device)
        self._logits[:, columns] = logits

    def results(self) -> list[Result]:
        """What every request has given."""
        return [self.result(i) for i in range(len(self.rows))]

    def result(self, i: int) -> Result:
        """What the request in row i has given so far."""
        row = self.rows[i]
        request = row.plan.request
        found = {a: self.session.rows(a, i, row.rows) for a in row.plan.captured}
        logits = self._logits[i, row.rows] if self._logits is not None and request.return_logits else None
        return Result(
            tokens=row.plan.prompt + row.new,
            n_prompt=len(row.plan.prompt),
            text=row.text.whole if row.new and self.engine.tokenizer is not None else None,
            capture=Capture(found),
            logits=logits,
            logprobs=row.logprobs if request.logprobs else None,
            finish_reason=row.finish_reason or "prompt",
            provenance=self._provenance(row),
        )

    def step(self) -> Step:
        """What the last pass has added to the only request."""
        (row,) = self.rows
        before = 0 if len(row.new) == 1 else row.rows.stop - 1
        found = {
            a: self.session.rows(a, 0, slice(max(before, row.span.start), row.rows.stop)).clone()
            for a in row.plan.captured
        }
        logprob = row.logprobs[-1] if row.logprobs else None
        result = self.result(0) if self.done else None
        return Step(row.new[-1], row.text.take(final=self.done), Capture(found), logprob, result)

    def _provenance(self, row: Row) -> Provenance:
        taps = {address: row.plan.taps[address] for address in row.plan.captured}
        return self.engine.provenance(self.session, taps, row.seed, self.compiled)


__all__ = ["Running"]
