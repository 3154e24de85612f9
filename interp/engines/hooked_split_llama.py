"""A SplitLlama by hook names, and its topology: which hooks there are, of what width, in which of the two groups."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from interp.engines.hooked import HookedModel
from interp.models.anatomy import Tap
from interp.models.split_llama import SplitLlama
from interp.names import hooks
from interp.points import Address

SITES = ("attn_out", "mlp_in", "mlp_out", "resid_post")
TRUNK = ("embeddings", "adapter_out", "logits")


@dataclass(frozen=True, slots=True)
class HookPoint:
    """One hook."""

    name: str
    """`layers_first.0.resid_post`; `embed`, `adapter_out` and `logits` have no layer."""
    address: Address
    module: str
    """Path of the module that takes or gives the tensor; empty for the model itself."""
    width: int
    """Channels per token."""
    group: Literal["first", "last"] | None
    layer: int | None
    """Counted within its group, as in the name; `address` counts through both."""
    site: str
    """The point: `resid_post`, `attn_out`, `mlp_in`, `mlp_out`, `embeddings`, `adapter_out` or `logits`."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Both groups in numbers, and every hook in the order of the forward pass."""

    d_model_first: int
    d_model_last: int
    n_layers_first: int
    n_layers_last: int
    vocab_size: int
    hooks: tuple[HookPoint, ...]

    @property
    def all_resid_hooks(self) -> list[str]:
        """The stream that leaves each block."""
        return self._at("resid_post")

    @property
    def all_mlp_in_hooks(self) -> list[str]:
        """What each MLP receives."""
        return self._at("mlp_in")

    @property
    def all_mlp_out_hooks(self) -> list[str]:
        """What each MLP returns."""
        return self._at("mlp_out")

    @property
    def first_group_hooks(self) -> list[str]:
        """Hooks of the early layers."""
        return [hook.name for hook in self.hooks if hook.group == "first"]

    @property
    def last_group_hooks(self) -> list[str]:
        """Hooks of the late layers."""
        return [hook.name for hook in self.hooks if hook.group == "last"]

    def __getitem__(self, name: str) -> HookPoint:
        found = next((hook for hook in self.hooks if hook.name == name), None)
        if found is None:
            raise KeyError(f"{name!r} is no hook; hooks: {', '.join(hook.name for hook in self.hooks)}")
        return found

    def _at(self, site: str) -> list[str]:
        return [hook.name for hook in self.hooks if hook.site == site]


class HookedSplitLlama(HookedModel):
    """A SplitLlama, moved to `device` where one is given, proven, and run by `engine`: "nnsight" or "eager".

    Everything that takes an engine takes it. The tokenizer is the first model's unless one is given.
    """

    def __init__(
        self,
        model: SplitLlama,
        device: str | torch.device | None = None,
        *,
        engine: str = "nnsight",
        tokenizer: Any = None,
        prove: bool = True,
    ) -> None:
        super().__init__(
            model,
            device,
            engine=engine,
            tokenizer=model.tokenizer() if tokenizer is None else tokenizer,
            name=model.source.folder.resolve().name,
            fingerprint=model.fingerprint(),
            prove=prove,
        )

    @cached_property
    def topology(self) -> Topology:
        """Dimensions and hooks."""
        first, last = self.model.groups
        layers = range(self.model.n_layers)
        embed, adapter_out, logits = (self._hook(Address(name)) for name in TRUNK)
        inner = [[self._hook(Address(site, layer)) for site in SITES] for layer in layers]
        early = [hook for of_layer in inner[: first.stop] for hook in of_layer]
        late = [hook for of_layer in inner[first.stop :] for hook in of_layer]
        return Topology(
            d_model_first=first.d_model,
            d_model_last=last.d_model,
            n_layers_first=first.stop,
            n_layers_last=last.stop - last.start,
            vocab_size=self.model.d_vocab,
            hooks=(embed, *early, adapter_out, *late, logits),
        )

    def _hook(self, address: Address) -> HookPoint:
        first, last = self.model.groups
        tap, layer = self.inner.by_hooks().anatomy.tap(address), address.layer
        early = layer is not None and layer < first.stop
        widths = {"embeddings": first.d_model, "logits": self.model.d_vocab}
        return HookPoint(
            name=hooks.hook_of(address, self.model.blocks),
            address=address,
            module=tap.path if isinstance(tap, Tap) else "",
            width=widths.get(address.name, self.model.width(layer)),
            group=None if layer is None else "first" if early else "last",
            layer=layer if layer is None or early else layer - last.start,
            site=address.name,
        )
