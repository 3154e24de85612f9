"""The attention matrix and the rotated queries and keys, read where the forward pass itself computes them.

A function registered beside transformers' own calls the family's eager attention unchanged and shows its arguments, the
softmax's argument and its result to whoever watches. Logits are those of the unwrapped eager attention, bit for bit.
"""

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

NAME = "interp_observed_eager"


class AttentionCall(NamedTuple):
    """One layer's attention: query [batch, heads, pos, d_head], key and value [batch, kv heads, pos, d_head]."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    scores: Tensor | None
    """[batch, heads, query, key]: argument of the softmax; None where the family's function calls none."""
    probs: Tensor | None
    """[batch, heads, query, key]"""
    output: Tensor | None
    """[batch, pos, heads, d_head]"""
    scaling: float | None
    """What the family multiplies the score product by; None where it leaves that to the function."""
    softcap: float | None
    sink: bool
    """Whether the softmax has further columns, so that a row of probs sums to less than 1."""


Watcher = Callable[[nn.Module, AttentionCall], None]
Editor = Callable[[nn.Module, str, Tensor], Tensor]
"""Takes the module, a field of `AttentionCall` and its tensor where it arises; gives the tensor to go on with."""
_watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("attention_watchers", default=())
_editor: ContextVar[Editor] = ContextVar("attention_editor", default=lambda module, name, tensor: tensor)


_JOIN = (torch.cat, torch.concat, torch.concatenate)
_SOFTMAX = (torch.softmax, torch.nn.functional.softmax, Tensor.softmax)


class _Softmax(TorchFunctionMode):
    """Notes the argument of the last softmax.

    Where sinks are put beside the scores and the largest of each row is taken off before the softmax, which changes
    nothing in its result, what was there before counts as the argument.
    """

    def __init__(self, module: nn.Module, width: int) -> None:
        super().__init__()
        self.module, self.width = module, width
        self.argument: Tensor | None = None
        self.joined: Tensor | None = None
        self.sink = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func not in _SOFTMAX:
            result = func(*args, **(kwargs or {}))
            if func in _JOIN and result.ndim == 4:
                self.joined = result
            return result
        shifted = self.joined is not None and self.joined.shape == args[0].shape
        whole = self.joined if shifted and self.joined is not None else args[0]
        scores = whole[..., : self.width]
        edited = _editor.get()(self.module, "scores", scores)
        self.argument, given, self.sink = scores, args[0], whole.shape[-1] > self.width
        if edited is not scores:
            self.argument, given = edited, torch.cat([edited, whole[..., self.width :]], dim=-1)
        result = func(given, *args[1:], **(kwargs or {}))
        probs = result[..., : self.width]
        edited = _editor.get()(self.module, "probs", probs)
        return result if edited is probs else torch.cat([edited, result[..., self.width :]], dim=-1)


def _observed(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
):
    eager = sys.modules[type(module).__module__].eager_attention_forward
    query, key = _editor.get()(module, "query", query), _editor.get()(module, "key", key)
    with _Softmax(module, key.shape[-2]) as softmax:
        output, probs = eager(module, query, key, value, attention_mask, **kwargs)
    constants = kwargs.get("scaling"), kwargs.get("softcap"), softmax.sink
    call = AttentionCall(query, key, value, softmax.argument, probs, output, *constants)
    for watcher in _watchers.get():
        watcher(module, call)
    return output, probs


def _register() -> None:
    from transformers.masking_utils import AttentionMaskInterface, eager_mask
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, _observed)
    AttentionMaskInterface.register(NAME, eager_mask)


@contextmanager
def observed(model: nn.Module, *watchers: Watcher, edit: Editor | None = None) -> Iterator[None]:
    """Run the model's attention through the observed eager function; restores its own implementation afterwards."""
    _register()
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = [
        (config, config._attn_implementation) for config in configs.values() if hasattr(config, "_attn_implementation")
    ]
    token = _watchers.set(_watchers.get() + watchers)
    editing = _editor.set(_editor.get() if edit is None else edit)
    try:
        for config, _ in before:
            config._attn_implementation = NAME
        yield
    finally:
        _watchers.reset(token)
        _editor.reset(editing)
        for config, implementation in before:
            config._attn_implementation = implementation


_PRODUCTS = (
    torch.matmul,
    torch.bmm,
    torch.baddbmm,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.bmm,
    Tensor.baddbmm,
)


class _SoftmaxInside(TorchFunctionMode):
    """Shows every softmax over [batch, heads, query, key] that runs while one of the modules does.

    And the two factors of the last product of that size before it: query and key.
    """

    def __init__(self, watcher: Watcher, edit: Editor) -> None:
        super().__init__()
        self.watcher, self.edit = watcher, edit
        self.running: list[nn.Module] = []
        self.factors: dict[torch.Size, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if not self.running or func not in _SOFTMAX or args[0].ndim != 4:
            result = func(*args, **(kwargs or {}))
            if self.running and func in _PRODUCTS:
                left, right = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)][-2:]
                self.factors[result.shape[-2:]] = left, right
            return result
        module = self.running[-1]
        scores = self.edit(module, "scores", args[0])
        result = self.edit(module, "probs", func(scores, *args[1:], **(kwargs or {})))
        query, key = self.factors.pop(result.shape[-2:], (None, None))
        if query is not None and key is not None:
            query = query.reshape(len(result), -1, *query.shape[-2:])
            key = key.transpose(-1, -2).reshape(len(result), -1, key.shape[-1], key.shape[-2])
        probs = result.to(scores.dtype)
        self.watcher(module, AttentionCall(query, key, None, scores, probs, None, None, None, False))
        return result


@contextmanager
def observed_softmax(modules: Collection[nn.Module], watcher: Watcher, edit: Editor) -> Iterator[None]:
    """Watch attention modules of families that compute their softmax themselves, outside transformers' registry."""
    with _SoftmaxInside(watcher, edit) as mode:
        handles = []
        for module in modules:
            handles.append(module.register_forward_pre_hook(lambda m, args: mode.running.append(m)))
            handles.append(module.register_forward_hook(lambda m, args, output: mode.running.pop() and None))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
