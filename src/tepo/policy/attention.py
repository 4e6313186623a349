"""Attention with a gradient on a processor, in blocks whose scores fit its cache; the formula of torch's own.

torch's kernel for processors is made for inference: in bfloat16 its backward pass takes most of the time of a small
model's update. Here matrix products do the work, the query heads of one key head together, and nothing of the size of
the scores outlives its block: the backward pass computes the probabilities of a block again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_BYTES = 4 << 20
"""Bytes of scores of one block."""

# What a hidden key's score is lowered by: its probability is exactly 0, whatever number below 1e37 the score was.
_HIDDEN = -1e38


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Tensor:
    """Return softmax(scale query key^T + mask) value, [B, H, L, E], contiguous when L and H change places.

    Scores and softmax are float32 (float64 for float64), the other products have the precision of the tensors. A query
    that sees no key gets zeros.

    Args:
        query: [B, H, L, D].
        key: [B, K, W, D], where K divides H: the query heads h K / H ... share a key head.
        value: [B, K, W, E].
        mask: [B or 1, H or 1, L, W], True where a query sees a key, or numbers to add to the scores; None shows all.
        scale: 1 / sqrt(D) when None.
        block_bytes: scores computed at once.
    """
    if mask is None:
        mask = torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    found: Tensor = _Attention.apply(query, key, value, mask, scale, block_bytes)  # type: ignore[no-untyped-call]
    return found


class _Blocks:
    """How the scores [B, K, G, L, W] of K groups of G = H / K heads are cut: batch rows, groups, queries.

    A block is whole batch rows if one fits, else some groups of one row, else some queries of one group. Only in the
    last case are columns left out that no query of a block sees.
    """

    def __init__(self, query: Tensor, key: Tensor, mask: Tensor, block_bytes: int) -> None:
        batch, heads, length, _ = query.shape
        groups, width = key.shape[1:3]
        self._split = (groups, heads // groups)
        self._wide = torch.promote_types(query.dtype, torch.float32)
        bias = mask.to(self._wide)
        if mask.dtype == torch.bool:
            bias = bias.sub_(1.0).mul_(-_HIDDEN)  # adding it is many times faster than filling where the mask says so
        whole = (batch, *self._split, length)
        self._bias = self.grouped(bias).expand(*whole, width)
        blind = self.grouped(bias.amax(-1, keepdim=True)) <= _HIDDEN
        self._blind = blind.expand(*whole, 1) if bool(blind.any()) else None
        row_bytes = self._split[1] * width * self._wide.itemsize
        fitting = max(1, block_bytes // (row_bytes * length))
        self._steps = max(1, fitting // groups), min(fitting, groups), max(1, min(length, block_bytes // row_bytes))
        self._ranges = [(slice(0, length), slice(0, width))]
        if self._steps[2] < length:
            visible = bias > _HIDDEN
            self._ranges = [_range(visible, start, self._steps[2]) for start in range(0, length, self._steps[2])]
        self.add_up = len(self._ranges) > 1
        """Whether several blocks have the same keys."""

    def grouped(self, tensor: Tensor) -> Tensor:
        """Return [B, H, ...] as [B, K, G, ...], and [B, 1, ...] as [B, 1, 1, ...]."""
        split = self._split if tensor.shape[1] > 1 else (1, 1)
        return tensor.view(tensor.shape[0], *split, *tensor.shape[2:])

    def __iter__(self) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Yield, block by block, the index of its queries in [B, K, G, L] and of the keys they see in [B, K, W]."""
        for row in range(0, self._bias.shape[0], self._steps[0]):
            for group in range(0, self._split[0], self._steps[1]):
                pair = slice(row, row + self._steps[0]), slice(group, group + self._steps[1])
                for asking, seen in self._ranges:
                    yield (*pair, slice(None), asking), (*pair, seen)

    def probabilities(self, query: Tensor, key: Tensor, at: tuple[slice, ...], seen: slice, scale: float) -> Tensor:
        """Return a block's probabilities [N, G L', W'] for its queries [N, G L', D] and keys [N, W', D]."""
        scores = _scaled(query.to(self._wide), key.to(self._wide).transpose(1, 2), scale)
        bias = self._bias[at][..., seen]
        found = scores.view(bias.shape).add_(bias).softmax(-1)
        if self._blind is not None:
            found.masked_fill_(self._blind[at], 0.0)
        return found.view(scores.shape)


def _range(visible: Tensor, start: int, count: int) -> tuple[slice, slice]:
    """Return some queries of [B, H, L, W] and the columns that any of them sees, at least one."""
    columns = visible[:, :, start : start + count].flatten(0, 2).any(0).nonzero()
    first, last = (int(columns[0]), int(columns[-1])) if len(columns) else (0, 0)
    return slice(start, start + count), slice(first, last + 1)


def _scaled(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Return scale left @ right, scaled before it is rounded."""
    return torch.baddbmm(left.new_zeros(()), left, right, beta=0, alpha=scale)


def _rows(tensor: Tensor) -> Tensor:
    """Return a block's [b, k, G, L', D] as [N, G L', D]."""
    return tensor.flatten(2, 3).flatten(0, 1)


class _Attention(torch.autograd.Function):
    """With the probabilities P, the scores S = scale query key^T and g the gradient in the output:

    d value = P^T g,    d S = P (g value^T - sum over keys of P g value^T),    d query = scale d S key,
    d key = scale d S^T query
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, block_bytes: int
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.scale, ctx.block_bytes = scale, block_bytes
        blocks = _Blocks(query, key, mask, block_bytes)
        out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]).transpose(1, 2)
        queries, outs = blocks.grouped(query), blocks.grouped(out)
        with torch.autocast(query.device.type, enabled=False):
            for at, to in blocks:
                keys = key[to].flatten(0, 1)
                p = blocks.probabilities(_rows(queries[at]), keys, at, to[2], scale).to(value.dtype)
                target = outs[at]
                target.copy_(torch.bmm(p, value[to].flatten(0, 1)).view(target.shape))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        query, key, value, mask = ctx.saved_tensors
        needs_query, needs_key, needs_value = ctx.needs_input_grad[:3]
        blocks = _Blocks(query, key, mask, ctx.block_bytes)
        of_query = torch.zeros_like(query) if needs_query else None
        # What several blocks say of a key is added up in float32.
        wide = torch.promote_types(key.dtype, torch.float32) if blocks.add_up else key.dtype
        of_key = torch.zeros_like(key, dtype=wide) if needs_key else None
        of_value = torch.zeros_like(value, dtype=wide) if needs_value else None
        queries, grads = blocks.grouped(query), blocks.grouped(grad)
        with torch.autocast(query.device.type, enabled=False):
            for at, to in blocks:
                asked, pull, keys = _rows(queries[at]), _rows(grads[at]), key[to].flatten(0, 1)
                p = blocks.probabilities(asked, keys, at, to[2], ctx.scale)
                if of_value is not None:
                    part = of_value[to]
                    part.add_(torch.bmm(p.to(value.dtype).transpose(1, 2), pull).view(part.shape))
                if of_query is None and of_key is None:
                    continue
                of_p = torch.bmm(pull, value[to].flatten(0, 1).transpose(1, 2)).to(p.dtype)
                of_scores = torch.ops.aten._softmax_backward_data(of_p, p, -1, p.dtype).to(query.dtype)
                if of_query is not None:
                    part = blocks.grouped(of_query)[at]
                    part.copy_(_scaled(of_scores, keys, ctx.scale).view(part.shape))
                if of_key is not None:
                    part = of_key[to]
                    part.add_(_scaled(of_scores.transpose(1, 2), asked, ctx.scale).view(part.shape))
        of_key, of_value = (None if each is None else each.to(key.dtype) for each in (of_key, of_value))
        return of_query, of_key, of_value, None, None, None
