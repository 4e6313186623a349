"""Reward shaping: what a response is worth before it is compared with its group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from tepo.objectives.advantages import combine
from tepo.objectives.batch import TokenBatch, require


class Shaping(Protocol):
    """A pure function of a clean rollout batch to one with new `rewards` `[B]` or `token_rewards` `[B, T]`."""

    @property
    def needs(self) -> frozenset[str]:
        """Fields of the token batch that this part reads."""
        ...

    def __call__(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with its rewards shaped."""
        ...


@dataclass(frozen=True)
class SequenceKLPenalty:
    """R_i <- R_i - coef * sum_t (old_logp - ref_logp): KL in the reward, as RLOO (arXiv 2402.14740) has it."""

    coef: float
    needs: ClassVar[frozenset[str]] = frozenset({"rewards", "old_logp", "ref_logp"})

    def __call__(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with rewards `[B]` less the k1 estimate of the sequence's KL to the reference."""
        owner = "KL in the reward"
        kl = (require(batch, "old_logp", owner) - require(batch, "ref_logp", owner)).detach().sum(dim=1)
        return batch.replace(rewards=combine(require(batch, "rewards", owner)) - self.coef * kl)
