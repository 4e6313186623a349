"""Attention in a pass without padding: tokens go into tables of rows, rows attend, and what they find goes back.

Each function moves whole rows of numbers forward and backward; autograd's own indexing would add gradients up place by
place, although all but those of shared prompts have one source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tepo.policy.packing import Packed, Piece

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""From query [R, H, L, D], key and value [R, K, W, D] and mask [R, 1, L, W] (None: causal) to output [R, L, H, D]."""


def packed_attention(
    packed: Packed, query: Tensor, key: Tensor, value: Tensor, *, window: int | None, attend: Attend
) -> Tensor:
    """Return the attention [1, N, H, E] of all tokens of a pass, each to its own row and prefix.

    query is [1, H, N, D], key and value are [1, K, N, D or E]; a token sees the last `window` ones, or all.
    """
    queries, keys, values = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))
    tables = [
        _tables(packed, each, of_keys)  # [R, L, H, D] for each piece
        for each, of_keys in ((queries, False), (keys, True), (values, True))
    ]
    found = [
        attend(asking.transpose(1, 2), seen.transpose(1, 2), told.transpose(1, 2), piece.mask(window))
        for piece, asking, seen, told in zip(packed.pieces, *tables, strict=True)
    ]
    joined: Tensor = _Join.apply(packed, *found)  # type: ignore[no-untyped-call]
    return joined.unsqueeze(0)


def _tables(packed: Packed, tokens: Tensor, of_keys: bool) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = _Tables.apply(packed, tokens, of_keys)  # type: ignore[no-untyped-call]
    return found


class _Tables(torch.autograd.Function):
    """From numbers of all tokens [N, ...] to one table [R, L, ...] a piece: of its queries, or of the keys they see.

    What the rows' queries say of a shared prompt's keys adds up, in float32 or better, by a product with the matrix
    that says whose prompt it is: in the same order in every run.
    """

    @staticmethod
    def forward(ctx: Any, packed: Packed, tokens: Tensor, of_keys: bool) -> tuple[Tensor, ...]:
        ctx.packed, ctx.of_keys, ctx.count = packed, of_keys, len(tokens)
        return tuple(
            tokens.index_select(0, table.flatten()).view(*table.shape, *tokens.shape[1:])
            for table in (piece.keys if of_keys else piece.queries for piece in packed.pieces)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        first = grads[0]
        found = first.new_empty(ctx.count, *first.shape[2:])
        found[ctx.packed.count :] = 0
        of_prompts: Tensor | None = None
        for piece, grad in zip(ctx.packed.pieces, grads, strict=True):
            places = piece.own_keys if ctx.of_keys else piece.asked
            torch.index_select(grad.flatten(0, 1), 0, places, out=found[piece.span])
            if ctx.of_keys and piece.prefixes is not None:
                of_prompts = _add_up(of_prompts, ctx.packed.pieces[0], piece, grad)
        if of_prompts is not None:
            prompts = ctx.packed.pieces[0]
            found[prompts.span] += of_prompts.flatten(0, 1).index_select(0, prompts.asked)
        return None, found, None


def _add_up(total: Tensor | None, prompts: Piece, piece: Piece, grad: Tensor) -> Tensor:
    """Return the gradient [U, P, ...] in the table of prompts with what a piece's rows add to it."""
    assert piece.prefixes is not None
    dtype = torch.promote_types(grad.dtype, torch.float32)
    count, columns = prompts.keys.shape
    if total is None:
        total = grad.new_zeros(count, columns, *grad.shape[2:], dtype=dtype)
    owners = torch.arange(count, device=grad.device)[:, None] == piece.prefixes.owners
    width = piece.prefixes.width
    with torch.autocast(grad.device.type, enabled=False):
        said = owners.to(dtype) @ grad[:, :width].to(dtype).flatten(1)
    total[:, :width] += said.view(count, width, *grad.shape[2:])
    return total


class _Join(torch.autograd.Function):
    """From one table [R, L, ...] a piece to the numbers of all tokens [N, ...]; places that are filled up are left."""

    @staticmethod
    def forward(ctx: Any, packed: Packed, *tables: Tensor) -> Tensor:
        ctx.packed, ctx.shapes = packed, [table.shape for table in tables]
        found = tables[0].new_empty(len(packed.ids), *tables[0].shape[2:])
        found[packed.count :] = 0
        for piece, table in zip(packed.pieces, tables, strict=True):
            torch.index_select(table.flatten(0, 1), 0, piece.asked, out=found[piece.span])
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tables: list[Tensor] = []
        for piece, shape in zip(ctx.packed.pieces, ctx.shapes, strict=True):
            table = grad.new_zeros(shape)
            table.flatten(0, 1).index_copy_(0, piece.asked, grad[piece.span])
            tables.append(table)
        return None, *tables
