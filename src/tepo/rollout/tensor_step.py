"""Passes of a fused model by tensor operations, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from tepo.rollout.fused_model import FusedModel, Layer

if TYPE_CHECKING:
    from tepo.rollout.fused_decoder import FusedRows


class Step(Protocol):
    """Feeds prompts to new rows, and one token to each row."""

    @property
    def key_dtype(self) -> torch.dtype:
        """The precision it wants the cached keys in."""

    @property
    def by_slot(self) -> bool:
        """Whether rows may lie in any slots of the cache, and it reads nothing beyond their tokens; otherwise row b
        must be in slot b."""

    def __call__(self, rows: FusedRows, tokens: Tensor, at: Tensor) -> Tensor:
        """Put `tokens` [B] at the places `at` [B] of the cache, which has room; return the logits [B, V] after them."""

    def prompts(self, rows: FusedRows, ids: Tensor, lengths: Tensor) -> Tensor:
        """Put the prompts `ids` [B, L], of `lengths` [B], into the cache, which is new and has room; return the logits
        [B, V] after them."""


class TensorStep:
    """A step that attends to all columns up to the longest row's and masks those a row does not have."""

    by_slot = False

    def __init__(self, model: FusedModel, dtype: torch.dtype) -> None:
        self._model = model
        self._dtype = dtype
        self.key_dtype = model.embedding.dtype

    def __call__(self, rows: FusedRows, tokens: Tensor, at: Tensor) -> Tensor:
        """Put one token of each row at the places `at` [B] of the cache; return the logits [B, V] after it."""
        model = self._model
        x = functional.embedding(tokens, model.embedding)
        turns = model.turns[at].unsqueeze(1)
        hidden = torch.arange(rows.width, device=at.device) > at.unsqueeze(-1)  # columns a row does not see
        mask = torch.zeros_like(hidden, dtype=x.dtype).masked_fill_(hidden, float("-inf"))
        mask = mask.repeat_interleave(model.key_heads, 0).unsqueeze(1)  # [B * K, 1, width]
        row = torch.arange(len(rows) * model.key_heads, device=at.device)
        place = row * rows.columns + at.repeat_interleave(model.key_heads)  # of the new column, all columns in a row
        for index, layer in enumerate(model.layers):
            x = self._layer(layer, x, turns, rows.keys[index], rows.values[index], mask, place)
        return model.logits(x)

    def prompts(self, rows: FusedRows, ids: Tensor, lengths: Tensor) -> Tensor:
        """Put prompts into the cache, zero beyond each; return the logits [B, V] after them."""
        model, (count, width) = self._model, ids.shape
        x = functional.embedding(ids, model.embedding)
        turns = model.turns[:width].unsqueeze(1)
        real = (torch.arange(width, device=ids.device) < lengths.unsqueeze(-1))[..., None, None]
        for index, layer in enumerate(model.layers):
            queries, keys, values = model.project(layer, x, turns)
            for cache, new in ((rows.keys[index], keys), (rows.values[index], values)):
                view = cache.view(count, model.key_heads, -1, model.size)
                view[:, :, :width] = new.where(real, 0.0).transpose(1, 2)
            attended = functional.scaled_dot_product_attention(
                queries.to(self._dtype).transpose(1, 2),
                self._repeated(keys),
                self._repeated(values),
                is_causal=True,
                scale=model.scale,
            )
            x = model.close(layer, x, attended.transpose(1, 2).flatten(2))
        return model.logits(x[torch.arange(count, device=ids.device), lengths - 1])

    def _repeated(self, heads: Tensor) -> Tensor:
        """Return keys or values [b, L, K, size] as [b, H, L, size] in the compute precision."""
        repeats = self._model.heads // self._model.key_heads
        return heads.to(self._dtype).transpose(1, 2).repeat_interleave(repeats, 1)

    def _layer(
        self,
        layer: Layer,
        x: Tensor,
        turns: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        place: Tensor,
    ) -> Tensor:
        model, width = self._model, mask.shape[-1]
        queries, new_keys, new_values = model.project(layer, x, turns)
        keys.view(-1, model.size).index_copy_(0, place, new_keys.reshape(-1, model.size))
        values.view(-1, model.size).index_copy_(0, place, new_values.reshape(-1, model.size))
        grouped = queries.reshape(keys.shape[0], -1, model.size)  # [B * K, H / K, size]
        scores = torch.baddbmm(mask, grouped, keys[:, :width].transpose(1, 2), alpha=model.scale)
        attended = torch.bmm(scores.softmax(-1).to(values.dtype), values[:, :width])
        return model.close(layer, x, attended.view(x.shape[0], -1))
