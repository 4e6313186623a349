"""A key/value cache whose rows can leave and join between two decoding steps.

Loads transformers: imported where decoding starts, not by `tepo.rollout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from tepo.core.errors import InputError

SPARE_COLUMNS = 64
"""Columns allocated beyond those in use, so that most steps write in place."""


class RowLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values [B, heads, columns, size], written into a buffer with room to grow.

    `keys` and `values` are views of the columns in use. Sliding-window layers keep all columns too: the model's own
    mask hides those outside the window.
    """

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None, used: int = 0) -> None:
        """Take buffers whose first `used` columns are in use, or start empty."""
        super().__init__()
        if keys is not None and values is not None:
            self.is_initialized = True
            self.dtype, self.device = keys.dtype, keys.device
            self._view(keys, values, used)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the new columns [B, heads, n, size] and return all columns in use.

        Under autocast, rotary embeddings leave float32 keys, which attention would cast anew at every step.
        """
        if torch.is_autocast_enabled(key_states.device.type):
            precision = torch.get_autocast_dtype(key_states.device.type)
            key_states, value_states = key_states.to(precision), value_states.to(precision)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._view(key_states, value_states, key_states.shape[2])
            return self.keys, self.values
        used, new = self.keys.shape[2], key_states.shape[2]
        if used + new > self._buffers[0].shape[2]:
            self._view(_grown(self.keys, used + new), _grown(self.values, used + new), used)
        keys, values = self._buffers
        keys[:, :, used : used + new] = key_states
        values[:, :, used : used + new] = value_states
        self._view(keys, values, used + new)
        return self.keys, self.values

    def _view(self, keys: Tensor, values: Tensor, used: int) -> None:
        self._buffers = (keys, values)
        self.keys, self.values = keys[:, :, :used], values[:, :, :used]


def empty_cache() -> Cache:
    """Return a cache to prefill prompts into."""
    return Cache(layer_class_to_replicate=RowLayer)


def gather(parts: Sequence[tuple[Cache, Tensor]], width: int) -> Cache:
    """Assemble a cache of `width` columns from rows of others, in the order given; a row may be taken repeatedly.

    Every row's tokens end in its cache's last column, so the last `width` columns are kept and narrower caches are
    padded on the left.

    Args:
        parts: caches, and the rows [b] to take of each.
    """
    layers = []
    for index in range(len(parts[0][0].layers)):
        keys = _stacked([(cache.layers[index].keys, rows) for cache, rows in parts], width)
        values = _stacked([(cache.layers[index].values, rows) for cache, rows in parts], width)
        layers.append(RowLayer(keys, values, width))
    return Cache(layers=layers)


def check_supported(config: Any) -> None:
    """Raise InputError where the model's cache holds more than keys and values (recurrent states, indexers)."""
    try:
        layers = DynamicCache(config=config).layers
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(f"the sampler cannot build a cache for this model ({error})") from error
    for layer in layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise InputError(
                f"model type {getattr(config, 'model_type', '?')!r} keeps a {type(layer).__name__} in its cache; "
                "the sampler supports models whose layers all have full or sliding-window attention"
            )


def _stacked(parts: Sequence[tuple[Tensor, Tensor]], width: int) -> Tensor:
    """Return a buffer [b, heads, width+, size] with rows [b] of each tensor, right-aligned in `width` columns."""
    buffer = _buffer(parts[0][0], sum(rows.numel() for _, rows in parts), width)
    first = 0
    for tensor, rows in parts:
        taken = tensor[:, :, -width:].index_select(0, rows)
        pad = width - taken.shape[2]
        part = buffer[first : first + rows.numel()]
        part[:, :, :pad] = 0
        part[:, :, pad:width] = taken
        first += rows.numel()
    return buffer


def _grown(tensor: Tensor, width: int) -> Tensor:
    """Return a buffer for `width` columns that starts with those of `tensor`."""
    buffer = _buffer(tensor, tensor.shape[0], width)
    buffer[:, :, : tensor.shape[2]] = tensor
    return buffer


def _buffer(like: Tensor, rows: int, width: int) -> Tensor:
    """Return uninitialised room for `width` columns and the spare ones."""
    _, heads, _, size = like.shape
    return torch.empty(rows, heads, width + SPARE_COLUMNS, size, dtype=like.dtype, device=like.device)
