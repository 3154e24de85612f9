"""How a model is called: under which name it takes token ids, which of transformers' other arguments it takes."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from interp.errors import InterpError


@dataclass(frozen=True, slots=True)
class Calling:
    """What the signature of a forward says."""

    tokens: str
    """The name of the argument that holds token ids, [batch, pos]."""
    named: frozenset[str]
    any_keyword: bool
    """Whether it follows transformers' names and hands on keywords that it does not name."""

    def takes(self, name: str) -> bool:
        """Whether the argument can be given."""
        return name in self.named or self.any_keyword

    @property
    def masks(self) -> bool:
        """Whether prompts of unequal length can share a pass."""
        return self.takes("attention_mask")

    def inputs(
        self, tokens: Tensor, mask: Tensor | None = None, positions: Tensor | None = None, *, use_cache: bool = False
    ) -> dict[str, Any]:
        """Keyword arguments of a pass over `tokens` [batch, pos]; what the model does not take is left out."""
        given: dict[str, Any] = {self.tokens: tokens}
        if mask is not None and self.masks:
            given["attention_mask"] = mask
        if positions is not None and "position_ids" in self.named:
            given["position_ids"] = positions
        if self.takes("use_cache"):
            given["use_cache"] = use_cache
        return given


def calling_of(module: nn.Module) -> Calling:
    """How `module` is called: its ids are `input_ids`, or else its first argument."""
    parameters = inspect.signature(module.forward).parameters
    named = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    hands_on = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    tokens = "input_ids" if "input_ids" in named or not named else named[0]
    return Calling(tokens, frozenset(named), hands_on and tokens == "input_ids")


def vocabulary_of(module: nn.Module, n_pos: int) -> int:
    """How many token ids a model takes: the rows of its token embedding.

    Where no `get_input_embeddings` names that, a recorded pass over zeros shows the table that the ids are looked up
    in. Raises `InterpError` where it shows none.
    """
    from interp.models.parameters import device_of
    from interp.models.probe import recording

    named: Any = getattr(module, "get_input_embeddings", None)
    if named is not None:
        return int(named().weight.shape[0])
    ids = torch.zeros(1, n_pos, dtype=torch.long, device=device_of(module))
    with recording(module) as trace:
        module(**calling_of(module).inputs(ids))
    node = trace.root(trace.node(ids))
    rows = [
        trace.value[op.inputs[0]].shape[0]
        for op in trace.ops
        if op.name in ("embedding", "index_select", "index") and any(node in trace.ancestors(i) for i in op.inputs[1:])
    ]
    if not rows:
        raise InterpError(
            f"No table is seen in which {type(module).__name__} looks token ids up: give the size of its vocabulary as "
            "wrap(module, d_vocab=...)."
        )
    return min(rows)
