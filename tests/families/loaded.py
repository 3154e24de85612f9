"""One proven engine per tiny family and dtype, built once for all tests; prompts of unequal length to run on it."""

from collections.abc import Iterable
from functools import cache

import torch
from torch import nn

from interp.engines.eager import EagerEngine
from interp.engines.load import wrap
from interp.points import POINTS
from tests.families.tiny import N_LAYERS, build

PROMPTS = ([7, 3, 99], [11, 64, 2, 130, 5, 5, 88], [40])
F64, F32 = torch.float64, torch.float32


@cache
def engine(family: str, dtype: torch.dtype = F64) -> EagerEngine:
    return wrap(build(family, dtype))


def readable(engine: EagerEngine, *, matrices: bool = False, layers: Iterable[int] = range(N_LAYERS)) -> list[str]:
    """Every address that the engine serves; those that need the attention matrix only if asked."""
    every = [f"{p.name}.{layer}" for p in POINTS.values() if p.per_layer for layer in layers]
    every += [p.name for p in POINTS.values() if not p.per_layer]
    needs = ("attn_scores", "attn_probs", "query_rot", "key_rot")
    return [a for a in every if engine.support(a).readable and (matrices or a.split(".")[0] not in needs)]


def writable(engine: EagerEngine) -> list[str]:
    """What can be edited in the middle layer, in the last one before each adapter, and in the trunk."""
    layers = sorted({1, *(group.stop - 1 for group in engine.model.groups[:-1])})
    return [a for a in readable(engine, layers=layers) if engine.support(a).writable]


def hook_count(model: nn.Module) -> int:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in hooks)
