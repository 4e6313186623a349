"""Random draws that depend on their address alone, and the inverse-CDF choice of a token from one uniform."""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tepo.core.seeds import address

TOP_P_CANDIDATES = 1024
"""Most probable tokens among which the top-p set is sought before all of the vocabulary is sorted."""

ONE_LEVEL = 1024
"""Vocabularies up to this size are inverted in one level."""


def uniforms(seed: int, purpose: str, draw: int, sample: int, count: int) -> NDArray[np.float64]:
    """Return the `count` uniforms in [0, 1) of response (draw, sample), element t for its token t.

    They come from the counter-based generator Philox keyed by the address, so a longer `count` continues a shorter
    one and no other response changes them.
    """
    generator = np.random.Generator(np.random.Philox(key=address(seed, purpose, draw, sample)))
    return generator.random(count)


def choose(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw one index a row in proportion to `weights` by inverting their cumulative sum at `uniform`.

    The sum is inverted in two levels, first over blocks of the vocabulary and then inside the block that was hit:
    one pass over the weights instead of a cumulative sum over all of them, and both small sums can be float64.

    Args:
        weights: [B, V], not negative, each row with a positive sum; they need not sum to 1.
        uniform: [B] float64 in [0, 1).

    Returns:
        [B] int64 indices; an index of weight zero is never returned.
    """
    rows, size = weights.shape
    exact = torch.float32 if weights.device.type == "mps" else torch.float64  # MPS has no float64
    if size <= ONE_LEVEL:
        index, _ = _invert(weights.to(exact), uniform.to(exact).unsqueeze(-1))
        return index.squeeze(-1)
    blocks = weights.view(rows, -1, _block_width(size))
    block, rest = _invert(blocks.sum(-1).to(exact), uniform.to(exact).unsqueeze(-1))
    inside = blocks.gather(1, block.unsqueeze(-1).expand(-1, 1, blocks.shape[-1])).squeeze(1)
    index, _ = _invert(inside.to(exact), rest)
    return (block * blocks.shape[-1] + index).squeeze(-1)


def truncate(probabilities: Tensor, *, top_k: int, top_p: float) -> Tensor:
    """Set all but the most probable tokens to zero; the rest are left as they are (not renormalised).

    `top_k` (0: off) is applied first. `top_p` (1: off) then keeps the smallest set of most probable tokens whose share
    of what is left reaches it, at least one token. Of equally probable tokens the lower ids are kept.

    Args:
        probabilities: [B, V], rows sum to 1.

    Returns:
        [B, V].
    """
    size = probabilities.shape[-1]
    top_k = min(top_k, size) or size
    if top_k == size and top_p >= 1.0:
        return probabilities
    candidates = top_k if top_k < size else min(TOP_P_CANDIDATES, size)
    while True:
        ranked = probabilities.topk(candidates, dim=-1).values  # [B, candidates], descending
        reached = ranked.double() if ranked.device.type != "mps" else ranked
        reached = reached.cumsum(-1)
        mass = reached[:, -1:] if top_k < size else torch.ones_like(reached[:, :1])
        if candidates in (top_k, size) or bool((reached[:, -1:] >= top_p * mass).all()):
            break
        candidates = size
    if top_p >= 1.0:
        kept = torch.full_like(ranked[:, :1], top_k, dtype=torch.long)
    else:  # a token is kept while the more probable ones before it fall short
        kept = 1 + (reached[:, :-1] < top_p * mass).sum(-1, keepdim=True)
    border = ranked.gather(1, kept - 1)
    above = probabilities > border
    equal = probabilities == border
    keep = above | (equal & (equal.cumsum(-1) <= kept - above.sum(-1, keepdim=True)))
    return probabilities.where(keep, 0.0)


def _invert(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index [B, 1] at which the cumulative share of `weights` [B, n] passes `uniform` [B, 1], and the
    uniform [B, 1] that is left inside that index.

    A parallel cumulative sum is not always monotone in its last digits: zero weights are excluded by name, and the
    target stays below the largest sum reached.
    """
    edges = weights.cumsum(-1)
    positive = weights > 0
    total = edges.where(positive, 0.0).amax(-1, keepdim=True)
    target = torch.minimum(uniform * total, total * (1 - torch.finfo(weights.dtype).eps))
    index = ((edges > target) & positive).to(torch.uint8).argmax(-1, keepdim=True)
    weight = weights.gather(1, index)
    rest = (target - edges.gather(1, index) + weight) / weight
    return index, rest.clamp(0.0, 1.0)


@functools.cache
def _block_width(size: int) -> int:
    """Return the divisor of `size` nearest its square root, above it where there are two."""
    low = next(width for width in range(int(size**0.5), 0, -1) if size % width == 0)
    return size // low
