"""A model by hook names: the same engine door, with captures and interventions named as in `layers_first.0.resid_post`.

How a pass runs is the business of the engine inside, "nnsight" or "eager".
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.edits import Call, Edit, Replace
from interp.engines.cache import run_with_cache
from interp.engines.hooks import Session
from interp.engines.load import wrap
from interp.engines.local import LocalEngine
from interp.engines.steering import steer
from interp.models.anatomy import Refusal
from interp.models.weights import BlockWeights
from interp.names import hooks
from interp.points import Address

Intervention = Tensor | Callable[[Tensor], Tensor]
"""A new value, [width] for every position or [pos, width], or a function of the old one, [pos, width] of one prompt."""


class HookedModel(LocalEngine):
    """A module in this process, moved to `device` where one is given, proven, and run by `engine`.

    Everything that takes an engine takes it. Raises what `wrap` raises.
    """

    def __init__(
        self,
        module: nn.Module,
        device: str | torch.device | None = None,
        *,
        engine: str = "nnsight",
        tokenizer: Any = None,
        name: str = "",
        fingerprint: str | None = None,
        prove: bool = True,
    ) -> None:
        module = module if device is None else module.to(device)
        self.inner = wrap(module, tokenizer, engine=engine, name=name, fingerprint=fingerprint, prove=prove)
        super().__init__(self.inner.module, tokenizer, self.inner.anatomy, self.inner.model)
        self.name, self.packages = self.inner.name, self.inner.packages

    def attached(self, session: Session) -> AbstractContextManager[None]:
        """The session's taps in place, for the passes inside the context."""
        return self.inner.attached(session)

    def forward(self, session: Session, module: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """One pass of `module`, the whole model or its trunk."""
        return self.inner.forward(session, module, inputs)

    def weights(self, layer: int) -> BlockWeights | Refusal:
        """Linear maps of one block; a Refusal where its value path is not the linear one."""
        return self.inner.weights(layer)

    def by_hooks(self) -> LocalEngine:
        """An engine of this very model that reads what lies inside modules, too."""
        return self.inner.by_hooks()

    def compile(self) -> None:
        """From here on decode by compiled graphs; raises `UserError` on the engine nnsight, which has none."""
        self.inner.compile()
        self.compiled_steps = self.inner.compiled_steps

    def address(self, hook: Address | str) -> Address:
        """The Address of a hook name. Raises `NameRefused` where it names nothing here."""
        return hooks.address(hook, self.model.blocks)

    def run_with_cache(
        self,
        input_ids: Int[Tensor, "batch pos"],
        hook_names: Sequence[str],
        attention_mask: Int[Tensor, "batch pos"] | None = None,
    ) -> dict[str, Tensor]:
        """Captured tensors [batch, pos, ...] by the names that were asked for; rows of masked positions are NaN."""
        found = run_with_cache(self, input_ids, [self.address(hook) for hook in hook_names], attention_mask)
        return {hook: found[self.address(hook)] for hook in hook_names}

    def run_with_interventions(
        self,
        input_ids: Int[Tensor, "batch pos"],
        interventions: Mapping[str, Intervention] | Sequence[Edit],
        hook_names: Sequence[str] = (),
        attention_mask: Int[Tensor, "batch pos"] | None = None,
    ) -> tuple[Float[Tensor, "batch pos d_vocab"], dict[str, Tensor]]:
        """Logits, and what is captured at `hook_names`, of passes in which every row goes through `interventions`.

        By hook name a tensor that replaces what is there or a function of it, or edits of `interp.edits`.
        """
        if isinstance(interventions, Mapping):
            interventions = [self._edit(hook, intervention) for hook, intervention in interventions.items()]
        with steer(self, interventions):
            found = self.run_with_cache(input_ids, ["logits", *hook_names], attention_mask)
        return found["logits"], {hook: found[hook] for hook in hook_names}

    def get_mlp_pairs(
        self, input_ids: Int[Tensor, "batch pos"], attention_mask: Int[Tensor, "batch pos"] | None = None
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """What each MLP receives and returns, [batch, pos, width], by its block: `layers_first.0`."""
        blocks = self.model.blocks
        found = self.run_with_cache(
            input_ids, [f"{block}.{site}" for block in blocks for site in ("mlp_in", "mlp_out")], attention_mask
        )
        return {block: (found[f"{block}.mlp_in"], found[f"{block}.mlp_out"]) for block in blocks}

    def _edit(self, hook: str, intervention: Intervention) -> Edit:
        at = self.address(hook)
        return Replace(at, intervention) if isinstance(intervention, Tensor) else Call(at, intervention)
