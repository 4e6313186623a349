"""Which tokens, when only so many may be chosen: exact counts with a stated rule at ties, and addressed draws.

Both look at a token through its address, (row_id, place among the row's response tokens), never through where it
lies in an array. So padding, the order of rows and the split into micro-batches change no choice, and a draw needs
no generator: the same seed and address give the same number on every machine and in every process.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tepo.objectives.batch import TokenBatch, require

# Constants of the splitmix64 generator (Steele, Lea and Flood 2014), as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
DRAW_BITS = 24


def places(mask: Tensor) -> Tensor:
    """Return each response token's place in its row, `[B, T]`: 0 for the first, holes not counted."""
    return mask.cumsum(dim=1) - 1


def draws(batch: TokenBatch, seed: int, owner: str) -> Tensor:
    """Return one integer of 64 random bits for every token, `[B, T]`, a function of seed, row id and place."""
    row_id = require(batch, "row_id", owner).long()
    row = _mixed(_mixed(torch.full_like(row_id, seed)) + row_id)
    return _mixed(row[:, None] + places(batch.mask))


def chance(batch: TokenBatch, probability: float, seed: int, owner: str) -> Tensor:
    """Return bool `[B, T]`, true for every token with this probability, each on its own draw."""
    top = _shifted(draws(batch, seed, owner), 64 - DRAW_BITS)
    return top.lt(round(probability * 2**DRAW_BITS))


def highest(values: Tensor, candidates: Tensor, count: int, batch: TokenBatch, owner: str) -> Tensor:
    """Return bool `[B, T]`: the `count` candidates of the highest value (all of them, where there are fewer).

    Of equal values the smaller row id goes first, then the earlier token.
    """
    row_id = require(batch, "row_id", owner)
    where = candidates.nonzero()
    count = min(count, len(where))
    chosen = torch.zeros_like(candidates)
    if count == 0:
        return chosen
    held = values[candidates]
    border = torch.topk(held, count).values[-1]
    above = held > border
    tied = (held == border).nonzero()[:, 0]
    place = places(batch.mask)[candidates][tied]
    order = torch.argsort(place, stable=True)
    order = order[torch.argsort(row_id[where[tied[order], 0]], stable=True)]
    above[tied[order[: count - int(above.sum())]]] = True
    chosen[candidates] = above
    return chosen


def share(fraction: float, tokens: int) -> float:
    """Return `fraction` of a number of tokens, rounded where floating point has missed a whole number by little."""
    exact = fraction * tokens
    return float(round(exact)) if math.isclose(exact, round(exact), rel_tol=1e-12) else exact


def _mixed(value: Tensor) -> Tensor:
    """Return the splitmix64 output of each 64-bit state; products wrap around."""
    value = value + _GOLDEN
    value = (value ^ _shifted(value, 30)) * _FIRST
    value = (value ^ _shifted(value, 27)) * _SECOND
    return value ^ _shifted(value, 31)


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Shift right, filling with zeros (the shift of a signed integer would fill with its sign)."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
