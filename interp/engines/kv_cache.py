"""Keys and values of the positions so far, in buffers as long as the whole sequence, allocated once.

A step writes its own columns; nothing is concatenated, and no column moves. Sliding windows are the mask's business:
every layer keeps all columns.
"""

from typing import Any

from torch import Tensor
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

DummyLayer: type[CacheLayerMixin] | None = getattr(cache_utils, "DummyLayer", None)
"""What stands for a layer that keeps nothing; older transformers have none."""
PLAIN = (DynamicLayer, DynamicSlidingWindowLayer, *([DummyLayer] if DummyLayer else []))
"""Layers that hold keys and values of every token and nothing else, or nothing."""


class BufferedLayer(CacheLayerMixin):
    """One layer's keys and values, [batch, kv heads, column, d_head]."""

    is_sliding = False

    def __init__(self, n_columns: int) -> None:
        super().__init__()
        self.n_columns, self.filled = n_columns, 0
        self.at: Tensor | None = None
        """Inside a traced step: the column that it writes, [1]; the step sees whole buffers of one fixed length."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def buffer(like: Tensor) -> Tensor:
            return like.new_zeros(*like.shape[:2], self.n_columns, like.shape[-1])

        self.keys, self.values = buffer(key_states), buffer(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values of all columns so far, these included."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if self.at is not None:
            self.keys.index_copy_(2, self.at, key_states)
            self.values.index_copy_(2, self.at, value_states)
            return self.keys, self.values
        start, self.filled = self.filled, self.filled + key_states.shape[2]
        self.keys[:, :, start : self.filled] = key_states
        self.values[:, :, start : self.filled] = value_states
        if start == 0:
            return key_states, value_states
        return self.keys[:, :, : self.filled], self.values[:, :, : self.filled]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many columns the attention sees, and the first of them."""
        return (self.filled + query_length if self.at is None else self.n_columns), 0

    def get_seq_length(self) -> Any:
        """How many columns stand before the one to come; a tensor inside a traced step."""
        return self.filled if self.at is None else self.at[0]

    def get_max_length(self) -> int:
        """How many columns there is room for."""
        return self.n_columns


def plain_layers(own: Any) -> tuple[bool, ...] | None:
    """Which layers of a cache that the model has made hold keys and values; None where one holds something else."""
    if type(own) is not DynamicCache or not own.layers or any(type(layer) not in PLAIN for layer in own.layers):
        return None
    return tuple(type(layer) is not DummyLayer for layer in own.layers)


def buffered_cache(layers: tuple[bool, ...], n_columns: int) -> Cache:
    """A cache with room for `n_columns` in the layers that hold keys and values."""
    dummy: Any = DummyLayer
    return Cache(layers=[BufferedLayer(n_columns) if holds else dummy() for holds in layers])


__all__ = ["BufferedLayer", "buffered_cache", "plain_layers"]
