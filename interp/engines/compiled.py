"""Decoding as one compiled graph: a step of the engine's own pass, recorded with its taps and edits, then compiled.

1. The pass of one new token per request is recorded as it runs, hooks included, at the level of tensor operations. What
   it captures is returned by the graph; what edits carry (vectors, scales, positions) goes into it as inputs. No Python
   runs inside it, and another vector needs no other graph.
2. Keys and values lie in buffers of one fixed length, of which the step writes the column that it is told.
3. The graph is compiled, and its results are compared with those of the recorded pass on the first step.

A graph holds for a number of requests, a length, and a set of taps; those compiled so far are kept with the engine, and
what the compiler made of them on disk, for the next process.
"""

import logging
import os
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.cache_utils import Cache

from interp.edits import Edit
from interp.engines.editing import Pass
from interp.engines.hooks import Session
from interp.engines.kv_cache import BufferedLayer
from interp.engines.thin_products import unroll_thin_products
from interp.errors import InterpError, UserError
from interp.files import cache_dir
from interp.models.rerun import pick

if TYPE_CHECKING:
    from interp.engines.local import LocalEngine

LOGGER = logging.getLogger("interp")
COLUMNS = 64
"""Buffers are this long or a multiple, so that prompts of different lengths share a graph."""


class CompiledSteps:
    """The graphs of one engine."""

    def __init__(self) -> None:
        self._steps: dict[Hashable, Callable[..., list[Tensor]]] = {}

    def check(self, edits: Sequence[Edit]) -> None:
        """Raises `UserError` for an edit that runs Python of its own, which no graph can hold."""
        own = next((edit for edit in edits if not edit.portable), None)
        if own is not None:
            raise UserError(
                f"{type(own).__name__} at {own.at} runs Python inside the pass, and a compiled step holds none: load "
                "the model without compile, or use an edit of interp.edits that is data."
            )

    def length(self, n_columns: int) -> int:
        """How long buffers must be for `n_columns`."""
        return -(-n_columns // COLUMNS) * COLUMNS

    def run(
        self, engine: "LocalEngine", session: Session, cache: Cache, tokens: Tensor, mask: Tensor, positions: Tensor
    ) -> Tensor:
        """Logits [batch, 1, d_vocab] of one step, whose captures go to `session`.

        `tokens` and `positions` are [batch, 1], `mask` [batch, columns of the buffers], 1 at real tokens so far.
        Compiles where no graph fits. Raises `UserError` for a pass that cannot be recorded.
        """
        assert session.now is not None
        recording = _Recording(engine, session, cache)
        at = torch.tensor([session.now.columns.start], device=tokens.device)
        inputs = [tokens, mask, positions, at, *recording.buffers, *session.operands()]
        key = (session.structure, *((tuple(x.shape), x.dtype) for x in inputs))
        if key not in self._steps:
            self._steps[key] = recording.compile(inputs)
        with torch.compiler.set_stance("default"):
            logits, *captured = self._steps[key](*inputs)
        recording.deliver(captured)
        return logits


class _Recording:
    """One step of an engine's pass as a function of tensors alone."""

    def __init__(self, engine: "LocalEngine", session: Session, cache: Cache) -> None:
        self._engine, self._session, self._cache = engine, session, cache
        self._layers = [layer for layer in cache.layers if isinstance(layer, BufferedLayer)]
        self._wanted = [use.address for use in session.uses if use.captured]

    @property
    def buffers(self) -> list[Tensor]:
        return [tensor for layer in self._layers for tensor in (layer.keys, layer.values) if tensor is not None]

    def deliver(self, captured: Sequence[Tensor]) -> None:
        """What a step returned behind its logits, to the session."""
        for address, value in zip(self._wanted, captured, strict=True):
            self._session.put(address, value)

    def step(self, tokens: Tensor, mask: Tensor, positions: Tensor, at: Tensor, *rest: Tensor) -> list[Tensor]:
        """The pass, with buffers and operands in `rest`; writes the buffers."""
        engine, n = self._engine, 2 * len(self._layers)
        buffers, operands = rest[:n], rest[n:]
        inner = self._session.recording(operands, Pass(positions, tokens, slice(0, 1)))
        inputs = engine.decoding_inputs(tokens, mask, positions, self._cache)
        before = [(layer.keys, layer.values) for layer in self._layers]
        try:
            for i, layer in enumerate(self._layers):
                layer.keys, layer.values, layer.at = buffers[2 * i], buffers[2 * i + 1], at
            with engine.attached(inner):
                output = engine.forward(inner, engine.module, inputs)
        finally:
            for layer, (keys, values) in zip(self._layers, before, strict=True):
                layer.keys, layer.values, layer.at = keys, values, None
        assert inner.traced is not None
        missing = [address for address in self._wanted if address not in inner.traced]
        if missing:
            raise InterpError(f"{missing[0]}: the module that holds it did not run in this pass.")
        return [pick(output, engine.anatomy.logits.key), *(inner.traced[address] for address in self._wanted)]

    def compile(self, inputs: Sequence[Tensor]) -> Callable[..., list[Tensor]]:
        """The compiled step; raises `InterpError` where it computes something else than the pass does."""
        started = time.monotonic()
        name, n_rows = self._engine.model.name, inputs[0].shape[0]
        what = f"{name}: decoding {n_rows} request{'s'[: n_rows > 1]} with {len(self._wanted)} captured points"
        LOGGER.info("%s is being compiled: a minute or two, less where it was compiled before.", what)
        expected = self.step(*inputs)
        try:
            graph = make_fx(self.step, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            text = f"{name} cannot be decoded by a compiled graph: {reason}; load it without compile."
            raise UserError(text) from error
        unroll_thin_products(graph.graph)
        graph.recompile()
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir() / "compiled"))
        step = torch.compile(graph, dynamic=False)
        for point, *both in zip(["logits", *map(str, self._wanted)], expected, step(*inputs), strict=True):
            _compare(point, *both)
        LOGGER.info("%s was compiled in %.0f s.", what, time.monotonic() - started)
        return step


def _compare(name: str, expected: Tensor, found: Tensor) -> None:
    """Raises `InterpError` where two results differ by more than the roundings of another order of sums."""
    if not expected.is_floating_point():
        same = bool((expected == found).all())
    else:
        difference = (expected - found).abs().max() / expected.abs().max().clamp(min=1e-30)
        same = bool(difference <= torch.finfo(expected.dtype).eps ** 0.5)
    if not same:
        raise InterpError(f"The compiled step computes another {name} than the pass that it was made of.")


__all__ = ["CompiledSteps"]
