"""Passes of a fused model with compiled functions between the matrix products, and why they cannot be taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tepo.policy.compiler import use_threads_of_torch, why_no_compiler
from tepo.policy.sequences import recurring
from tepo.rollout.fused_model import FusedModel, Layer, Norm

if TYPE_CHECKING:
    from tepo.rollout.fused_decoder import FusedRows

_PARTS = 8  # of the numbers of rows that products have, as rows leave one by one
_DTYPES = (torch.float32, torch.bfloat16)


def why_not_compiled(device: torch.device, weights: torch.dtype, compute: torch.dtype) -> str | None:
    """Return why steps are not compiled for a model on this device, with these weights and products, or None."""
    if device.type != "cpu":
        return f"it compiles for the processor, and the model is on {device.type}"
    if weights != torch.float32 or compute not in _DTYPES:
        return f"it computes in float32 or bfloat16 with float32 weights, not {_name(compute)} with {_name(weights)}"
    return why_no_compiler()


class CompiledStep:
    """A step for every row at once; the same contract as `TensorStep`."""

    by_slot = True

    def __init__(self, model: FusedModel, dtype: torch.dtype) -> None:
        from tepo.rollout import compiled, compiled_attention

        self._compiled = compiled
        self._attention = compiled_attention
        self._model = model
        self._turns = torch.view_as_real(model.turns).flatten(-2).numpy()
        self._dtype = self.key_dtype = dtype

    def __call__(self, rows: FusedRows, tokens: Tensor, at: Tensor) -> Tensor:
        """Put one token of each row at the places `at` [B] of the cache; return the logits [B, V] after it."""
        places, slots, scale = at.numpy(), rows.slots.numpy(), np.float32(self._model.scale)

        def attend(index: int, layer: Layer, fused: Tensor, out: Tensor) -> None:
            keys, values = _array(rows.keys[index]), _array(rows.values[index])
            where = _array(fused), self._turns, places, slots, keys, values
            self._attention.attend(*where, _array(out), scale, *_norms(layer))

        normed = self._layers(tokens, attend, recurring(len(tokens), _PARTS))
        return self._model.head(normed)[: len(tokens)].float()

    def prompts(self, rows: FusedRows, ids: Tensor, lengths: Tensor) -> Tensor:
        """Put the prompts `ids` [B, L], of `lengths` [B], into the slots of rows; return the logits [B, V] after them.

        What follows a prompt is computed and cached like it, and never looked at.
        """
        model, (count, width) = self._model, ids.shape
        at = torch.arange(width).repeat(count)
        places, slots = at.numpy(), rows.slots.repeat_interleave(width).numpy()
        queries = torch.empty(count * width, model.heads * model.size, dtype=self._dtype)
        repeats = model.heads // model.key_heads

        def attend(index: int, layer: Layer, fused: Tensor, out: Tensor) -> None:
            caches = rows.keys[index], rows.values[index]
            where = _array(fused), self._turns, places, slots, *map(_array, caches)
            self._attention.enter(*where, _array(queries), *_norms(layer))
            keys, values = (
                cache.view(count, model.key_heads, -1, model.size)[:, :, :width].repeat_interleave(repeats, 1)
                for cache in caches
            )
            heads = queries.view(count, width, model.heads, model.size).transpose(1, 2)
            found = functional.scaled_dot_product_attention(heads, keys, values, is_causal=True, scale=model.scale)
            out.view(count, width, model.heads, model.size).copy_(found.transpose(1, 2))

        normed = self._layers(ids.flatten(), attend, ids.numel())
        return model.head(normed[torch.arange(count) * width + lengths - 1]).float()

    def _layers(self, tokens: Tensor, attend: Callable[[int, Layer, Tensor, Tensor], None], size: int) -> Tensor:
        """Return the normed last states of tokens [T], as products want them: of `size` rows, those beyond T zero.

        `attend` gets the index of a layer, the layer, its queries, keys and values of the tokens, and writes what
        their heads attend to.
        """
        use_threads_of_torch()
        model, count = self._model, len(tokens)
        x = functional.embedding(tokens, model.embedding)
        normed = torch.zeros(size, x.shape[1], dtype=self._dtype)
        attended = torch.zeros(size, model.heads * model.size, dtype=self._dtype)
        product = torch.zeros(size, model.inner, dtype=self._dtype)
        delta = torch.zeros_like(normed)  # what is still to be added to the residual stream
        for index, layer in enumerate(model.layers):
            self._add_and_norm(x, delta[:count], layer.before_attention, normed[:count])
            attend(index, layer, layer.qkv(normed)[:count], attended[:count])
            self._add_and_norm(x, layer.output(attended)[:count], layer.before_mlp, normed[:count])
            self._compiled.gate(_array(layer.gate_up(normed)[:count]), _array(product[:count]))
            delta = layer.down(product)
        self._add_and_norm(x, delta[:count], model.norm, normed[:count])
        return normed

    def _add_and_norm(self, x: Tensor, delta: Tensor, norm: Norm, out: Tensor) -> None:
        weight, epsilon = norm.weight.numpy(), np.float32(norm.epsilon)
        self._compiled.add_and_norm(x.numpy(), _array(delta), weight, epsilon, _array(out))


def _norms(layer: Layer) -> tuple[Any, Any, np.float32]:
    """Return weights and epsilon of the norms of queries and keys, empty weights where there are none."""
    if layer.query_norm is None or layer.key_norm is None:
        return np.empty(0, np.float32), np.empty(0, np.float32), np.float32(0)
    return layer.query_norm.weight.numpy(), layer.key_norm.weight.numpy(), np.float32(layer.query_norm.epsilon)


def _array(tensor: Tensor) -> Any:
    """Return a tensor in the compute precision as compiled functions take it, sharing its memory."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
