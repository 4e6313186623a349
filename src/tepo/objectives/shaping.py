"""Reward shaping: what a response is worth before it is compared with its group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tepo.objectives.batch import TokenBatch, require


class Shaping(Protocol):
    """A pure function of a clean batch to new rewards `[B]`."""

    @property
    def needs(self) -> frozenset[str]:
        """Fields of the token batch that this part reads."""
        ...

    def __call__(self, rewards: Tensor, batch: TokenBatch) -> Tensor:
        """Return the shaped rewards `[B]`."""
        ...


def combine(rewards: Tensor) -> Tensor:
    """Sum reward components `[B, K]` to `[B]`, leaving out NaN; a row that no reward can score stays NaN."""
    if rewards.dim() == 1:
        return rewards
    unscored = torch.isnan(rewards).all(dim=1)
    return torch.where(unscored, torch.full_like(rewards[:, 0], float("nan")), torch.nansum(rewards, dim=1))


@dataclass(frozen=True)
class SequenceKLPenalty:
    """R_i <- R_i - coef * sum_t (old_logp - ref_logp): KL in the reward, as RLOO (arXiv 2402.14740) has it."""

    coef: float
    needs: frozenset[str] = frozenset({"ref_logp"})

    def __call__(self, rewards: Tensor, batch: TokenBatch) -> Tensor:
        """Return rewards `[B]` less the k1 estimate of the sequence's KL to the reference."""
        old, ref = (
            require(batch, "old_logp", "KL in the reward"),
            require(batch, "ref_logp", "KL in the reward"),
        )
        return rewards - self.coef * (old - ref).detach().sum(dim=1)
