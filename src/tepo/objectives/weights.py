"""Importance weights: the policy that was scored over the policy that sampled, when the two differ.

A sampler with its own kernels (another engine, bfloat16) draws from a slightly different policy than the scorer
sees; w = exp(old_logp - rollout_logp) corrects for it, detached, token by token or for the whole response.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from tepo.core.errors import InputError
from tepo.objectives.batch import TokenBatch, require


class ImportanceWeight(Protocol):
    """A pure function of a clean batch to detached weights."""

    @property
    def needs(self) -> frozenset[str]:
        """Fields of the token batch that this part reads."""
        ...

    def __call__(self, batch: TokenBatch, clamp: float) -> Tensor:
        """Return weights `[B, T]`."""
        ...


def mismatch(batch: TokenBatch) -> Tensor:
    """old_logp - rollout_logp, `[B, T]`, detached, zero outside the mask."""
    old = require(batch, "old_logp", "the importance weight")
    return (old - require(batch, "rollout_logp", "the importance weight")).detach()


def check_cap(cap: float) -> None:
    """Raise `InputError` for a cap that would cut the weight of a sampler that agrees with the scorer."""
    if not cap >= 1:
        raise InputError(f"importance_cap={cap}: expected a number >= 1")


@dataclass(frozen=True)
class NoWeight:
    """Weight 1: the sampler and the scorer are trusted to agree."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, batch: TokenBatch, clamp: float) -> Tensor:
        """Return ones."""
        return torch.ones_like(batch.logp)


@dataclass(frozen=True)
class Truncated:
    """min(w, cap) for every token (truncated importance sampling)."""

    cap: float = 2.0
    needs: ClassVar[frozenset[str]] = frozenset({"rollout_logp"})

    def __post_init__(self) -> None:
        check_cap(self.cap)

    def __call__(self, batch: TokenBatch, clamp: float) -> Tensor:
        """Return capped token weights."""
        return mismatch(batch).clamp(-clamp, clamp).exp().clamp(max=self.cap)


@dataclass(frozen=True)
class Masked:
    """w where 1/cap <= w <= cap, else 0: tokens on which sampler and scorer disagree are left out."""

    cap: float = 2.0
    needs: ClassVar[frozenset[str]] = frozenset({"rollout_logp"})

    def __post_init__(self) -> None:
        check_cap(self.cap)

    def __call__(self, batch: TokenBatch, clamp: float) -> Tensor:
        """Return token weights, 0 outside the band."""
        weight = mismatch(batch).clamp(-clamp, clamp).exp()
        return torch.where((weight <= self.cap) & (weight >= 1 / self.cap), weight, torch.zeros_like(weight))


@dataclass(frozen=True)
class SequenceMasked:
    """The whole response's w = exp(sum_t ...) where w <= cap, else 0 for all its tokens."""

    cap: float = 3.0
    needs: ClassVar[frozenset[str]] = frozenset({"rollout_logp"})

    def __post_init__(self) -> None:
        check_cap(self.cap)

    def __call__(self, batch: TokenBatch, clamp: float) -> Tensor:
        """Return each row's weight at all its tokens."""
        weight = mismatch(batch).sum(dim=1, keepdim=True).clamp(-clamp, clamp).exp()
        return torch.where(weight <= self.cap, weight, torch.zeros_like(weight)).expand_as(batch.logp)
