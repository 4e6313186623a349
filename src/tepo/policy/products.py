"""The matrix products of a head, forward and backward, one chunk of tokens at a time.

A plain linear head has its products written out: logits go into memory that is used again, and the weight's gradient is
summed in the parameters' own precision a slice of the vocabulary at a time, while the slice is in the cache. Any other
head (an adapter on it, hooks) goes through autograd.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tepo.policy.head import Head

# Vocabulary entries whose share of the weight's gradient is held beside the sum.
_SLICE = 8192


class LinearProducts:
    """A plain linear head, computed in the head's precision.

    `totals` are the gradients summed so far, in the order of the parameters.
    """

    def __init__(self, head: Head, parameters: Sequence[Tensor], wanted: Sequence[bool]) -> None:
        self._dtype = head.dtype
        self._own: Tensor = parameters[0].detach()
        self._cast: Tensor | None = self._own if self._own.dtype == head.dtype else None
        self.bias: Tensor | None = parameters[1].detach().to(head.dtype) if len(parameters) > 1 else None
        self._logits: Tensor | None = None
        self.totals = _zeros(parameters, wanted)

    @property
    def weight(self) -> Tensor:
        """The weight [V, D] in the compute precision: a copy, made at the first call, where its own is another."""
        if self._cast is None:
            self._cast = self._own.to(self._dtype)
        return self._cast

    def raw(self, hidden: Tensor) -> Tensor:
        """Return the head's output [n, V], which holds until the next call."""
        rows = len(hidden)
        if self._logits is None or len(self._logits) < rows:
            self._logits = hidden.new_empty(rows, len(self.weight), dtype=self._dtype)
        out = self._logits[:rows]
        hidden = hidden.to(self._dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            if self.bias is None:
                return torch.mm(hidden, self.weight.t(), out=out)
            return torch.addmm(self.bias, hidden, self.weight.t(), out=out)

    def release(self) -> None:
        """Let go of the memory of earlier outputs: the next one has its own, of its own size."""
        self._logits = None

    def push(self, hidden: Tensor, grad: Tensor, needs_hidden: bool) -> Tensor | None:
        """Add to the parameters' gradients, and return the hidden states', from the gradient in the output."""
        of_weight, of_bias = [*self.totals, None][:2]
        if of_bias is not None:
            of_bias.add_(grad.sum(0, dtype=of_bias.dtype))
        with torch.autocast(hidden.device.type, enabled=False):
            if of_weight is not None:
                _add_product(of_weight, grad, hidden.to(self._dtype))
            return self._of_hidden(grad) if needs_hidden else None

    def _of_hidden(self, grad: Tensor) -> Tensor:
        """Return grad @ weight; where no copy of the weight was needed so far, by a slice of it at a time."""
        if self._cast is not None:
            return grad @ self._cast
        wide = torch.promote_types(self._dtype, torch.float32)
        total = grad.new_zeros(len(grad), self._own.shape[1], dtype=wide)
        for start in range(0, len(self._own), _SLICE):
            rows = slice(start, start + _SLICE)
            total += grad[:, rows] @ self._own[rows].to(self._dtype)
        return total


class AutogradProducts:
    """Any head. `totals` are the gradients summed so far, in the order of the parameters."""

    def __init__(self, head: Head, parameters: Sequence[Tensor], wanted: Sequence[bool]) -> None:
        self._head = head
        self._leaves = head.cast(parameters, differentiable=wanted)
        self._graph: tuple[Tensor, Tensor] | None = None
        self.totals = _zeros(parameters, wanted)

    def raw(self, hidden: Tensor) -> Tensor:
        """Return the head's output [n, V]; `push` goes back through this call."""
        self._graph = None  # before the next chunk is computed
        if not any(leaf.requires_grad for leaf in self._leaves.values()) and not hidden.requires_grad:
            return self._head.raw(hidden, self._leaves)
        with torch.enable_grad():
            chunk = hidden.detach().to(self._head.dtype).requires_grad_(hidden.requires_grad)
            raw = self._head.raw(chunk, self._leaves)
        self._graph = chunk, raw
        return raw.detach()

    def push(self, hidden: Tensor, grad: Tensor, needs_hidden: bool) -> Tensor | None:
        """Add to the parameters' gradients, and return the hidden states', from the gradient in the output."""
        assert self._graph is not None
        chunk, raw = self._graph
        inputs = [*([chunk] if needs_hidden else []), *(leaf for leaf in self._leaves.values() if leaf.requires_grad)]
        found = iter(torch.autograd.grad(raw, inputs, grad, allow_unused=True))
        of_hidden = next(found) if needs_hidden else None
        for total in self.totals:
            if total is not None and (gradient := next(found)) is not None:
                total.add_(gradient)
        return of_hidden


def products(
    head: Head, parameters: Sequence[Tensor], wanted: Sequence[bool] | None = None
) -> LinearProducts | AutogradProducts:
    """Return the products of a head; `wanted` says which parameters get a gradient, none by default."""
    chosen = LinearProducts if head.is_plain else AutogradProducts
    return chosen(head, parameters, [False] * len(parameters) if wanted is None else wanted)


def _zeros(parameters: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
    return [torch.zeros_like(p) if want else None for p, want in zip(parameters, wanted, strict=True)]


def _add_product(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """Add grad.T @ hidden to a total [V, D] in the total's precision."""
    if total.dtype == grad.dtype:
        total.addmm_(grad.t(), hidden)
        return
    for start in range(0, len(total), _SLICE):
        rows = slice(start, start + _SLICE)
        total[rows].add_(torch.mm(grad[:, rows].t(), hidden))
