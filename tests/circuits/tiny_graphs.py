"""Graphs of tiny families: random transcoders whose every term matters, and the attribution on one prompt."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from interp.circuits.attribution import AttributionComputer, AttributionConfig
from interp.circuits.graph import Edges
from interp.circuits.replacement_model import ReplacementModel, ReplacementState
from interp.dictionaries import Transcoder
from interp.dictionaries.config import ActivationName
from interp.engines.eager import EagerEngine
from interp.engines.load import wrap
from tests.families.tiny import D_MODEL, N_LAYERS, SPLIT_LLAMAS, build

TOKENS = [1, 17, 5, 99, 23, 64, 7]
BOS = 1


def transcoders(
    dtype: torch.dtype = torch.float64,
    skip: bool = True,
    activation: ActivationName = "topk",
    k: int | None = 5,
    family: str = "llama",
) -> dict[int, Transcoder]:
    """One per layer, 70 latents wide, with random biases and thresholds, not trained on BOS."""
    generator = torch.Generator().manual_seed(5)

    def normal(parameter: Tensor) -> Tensor:
        return torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / parameter.shape[-1] ** 0.5

    made = {}
    for layer in range(N_LAYERS):
        width = 36 if family in SPLIT_LLAMAS and layer == 0 else D_MODEL
        transcoder = Transcoder(d_in=width, d_out=width, n_latents=70, skip=skip, activation=activation, k=k)
        with torch.no_grad():
            for name, parameter in transcoder.named_parameters():
                parameter.copy_(normal(parameter).abs() if "threshold" in name else normal(parameter))
        transcoder.config.excluded_token_ids = [BOS]
        made[layer] = transcoder.to(dtype)
    return made


@dataclass(frozen=True)
class Case:
    """A tiny model, what was put into it, and the graph that came out."""

    module: nn.Module
    engine: EagerEngine
    transcoders: dict[int, Transcoder]
    rm: ReplacementModel
    state: ReplacementState
    edges: Edges


@cache
def wrapped(family: str, dtype: torch.dtype = torch.float64) -> EagerEngine:
    """An engine for the tiny model of `family`, whose points are tested elsewhere."""
    return wrap(build(family, dtype), prove=False)


def case(
    family: str,
    dtype: torch.dtype = torch.float64,
    tokens: list[int] = TOKENS,
    given: dict[int, Transcoder] | None = None,
    **config: Any,
) -> Case:
    """Attribution of `family` on `tokens`; `config` is that of the computer, by default the four likeliest logits."""
    engine = wrapped(family, dtype)
    given = transcoders(dtype, family=family) if given is None else given
    rm = ReplacementModel(engine, given)
    state = rm.build(tokens)
    settings = AttributionConfig(**{"max_logits": 4, "logit_mass": 1.0, **config})
    edges = AttributionComputer(rm, settings).compute_full_graph(state, tokens)
    return Case(engine.module, engine, given, rm, state, edges)


@cache
def standard(family: str, skip: bool = True) -> Case:
    """The float64 case of `family` that many tests look at, and none changes."""
    return case(family, given=transcoders(skip=skip, family=family))
