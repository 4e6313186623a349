"""One decoding step with compiled functions between the matrix products: why it cannot be taken, and the step."""

from __future__ import annotations

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
        from tepo.rollout import compiled

        self._compiled = compiled
        self._model = model
        self._turns = torch.view_as_real(model.turns).flatten(-2).numpy()
        self._dtype = self.key_dtype = dtype

    def __call__(self, rows: FusedRows, tokens: Tensor, at: Tensor) -> Tensor:
        """Put one token of each row at the places `at` [B] of the cache; return the logits [B, V] after it."""
        use_threads_of_torch()
        model, count = self._model, len(tokens)
        size = recurring(count, _PARTS)  # products have a few rows of zeros more
        x = functional.embedding(tokens, model.embedding)
        places, slots, stream = at.numpy(), rows.slots.numpy(), x.numpy()
        normed = torch.zeros(size, x.shape[1], dtype=self._dtype)
        attended = torch.zeros(size, model.heads * model.size, dtype=self._dtype)
        delta = torch.zeros_like(normed)  # what is still to be added to the residual stream
        for index, layer in enumerate(model.layers):
            self._add_and_norm(stream, delta[:count], layer.before_attention, normed[:count])
            fused = layer.qkv(normed)[:count]
            self._attend(layer, fused, places, slots, rows.keys[index], rows.values[index], attended[:count])
            self._add_and_norm(stream, layer.output(attended)[:count], layer.before_mlp, normed[:count])
            both = layer.gate_up(normed)
            product = torch.zeros(size, both.shape[1] // 2, dtype=self._dtype)
            self._compiled.gate(_array(both[:count]), _array(product[:count]))
            delta = layer.down(product)
        self._add_and_norm(stream, delta[:count], model.norm, normed[:count])
        return model.head(normed)[:count].float()

    def _attend(
        self, layer: Layer, fused: Tensor, at: Any, slots: Any, keys: Tensor, values: Tensor, out: Tensor
    ) -> None:
        query_norm, key_norm, epsilon = _norms(layer)
        self._compiled.attend(
            _array(fused),
            self._turns,
            at,
            slots,
            _array(keys),
            _array(values),
            _array(out),
            np.float32(self._model.scale),
            query_norm,
            key_norm,
            epsilon,
        )

    def _add_and_norm(self, x: Any, delta: Tensor, norm: Norm, out: Tensor) -> None:
        self._compiled.add_and_norm(x, _array(delta), norm.weight.numpy(), np.float32(norm.epsilon), _array(out))


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
