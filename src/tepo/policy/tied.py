"""One gradient for a weight that is both embedding and head.

The head's gradient is a dense matrix [V, D]; the embedding's touches a few hundred rows, but autograd makes a dense
matrix of it too, for every pass through the model, before it adds them up. Here both come together in one place, where
the rows are added to the head's matrix.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tepo.policy.head import Head


@contextlib.contextmanager
def one_gradient(model: Any, head: Head) -> Iterator[Tensor | None]:
    """Let `model` look tokens up in a stand-in of its embedding's weight, and yield the one for the head.

    It yields None, and changes nothing, where no gradient is wanted or the two are not one weight [V, D] of a plain
    embedding and a plain head.
    """
    embedding = model.get_input_embeddings()
    if not (torch.is_grad_enabled() and head.is_plain and _is_plain(embedding)):
        yield None
        return
    weight = head.parameters()[0]
    if embedding.weight is not weight or not weight.requires_grad:
        yield None
        return
    for_lookup, for_head = _Shared.apply(weight)  # type: ignore[no-untyped-call]

    def look_up(ids: Tensor) -> Tensor:
        return functional.embedding(ids, for_lookup, embedding.padding_idx, sparse=True)

    embedding.forward = look_up  # called through the module, so that its hooks see it
    try:
        yield for_head
    finally:
        del embedding.forward


def _is_plain(module: Any) -> bool:
    if type(module) is not nn.Embedding or "forward" in vars(module):
        return False
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


class _Shared(torch.autograd.Function):
    """Two names for one weight; the first one's gradient may be sparse, the weight's is dense."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return weight.detach(), weight.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_lookup: Tensor | None, of_head: Tensor | None) -> Tensor | None:
        if of_lookup is None or of_head is None:
            return of_head if of_lookup is None else of_lookup.to_dense()
        # The head made this matrix for its gradient alone, so nobody else can see it change.
        return of_head.add_(of_lookup)
