"""Other baselines and scales for a group's rewards, beside its mean and standard deviation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tepo.objectives.advantages import GROUP_NEEDS, GroupNormalized, OfGroup, group_statistics, group_sum, scored_groups
from tepo.objectives.batch import TokenBatch, group_index


@dataclass(frozen=True)
class LengthWeightedBaseline:
    """A_i = R_i - sum_j L_j R_j / sum_j L_j: OPO's variance-optimal baseline (arXiv 2505.23585).

    It is optimal where the squared gradient of a response grows with its length. A group of one and equal rewards
    give exactly 0.
    """

    needs: ClassVar[frozenset[str]] = GROUP_NEEDS

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Return advantages `[B]`."""
        rewards, group = scored_groups(batch, "the advantage")
        stats = group_statistics(rewards, group)
        index, n = group_index(group)
        length = torch.where(stats.scored, batch.lengths(), torch.zeros_like(batch.lengths())).to(rewards.dtype)
        total = group_sum(length, index, n)
        baseline = group_sum(length * stats.rewards, index, n) / total.clamp_min(1)
        value = stats.rewards - baseline
        return torch.where(stats.informative & stats.scored, value, torch.zeros_like(value))


@dataclass(frozen=True)
class BestOfGroup(OfGroup):
    """The best response gets R_max - R_second, all others 0: the leave-one-out gradient of pass@k, k = group size.

    From arXiv 2503.19595, as verl's grpo_passk has it. `by_std` divides by (std of the group + eps). Where two
    responses share the best reward, leaving one out costs nothing: all are 0.
    """

    by_std: bool = True
    eps: float = 1e-6

    def of(self, rewards: Tensor, group: Tensor) -> Tensor:
        """Return advantages `[B]`."""
        stats = group_statistics(rewards, group)
        index, n = group_index(group)
        low = torch.full_like(rewards, float("-inf"))
        best = rewards.new_full((n,), float("-inf"))
        scored = torch.where(stats.scored, rewards, low)
        first = best.scatter_reduce(0, index, scored, "amax")[index]
        holds = stats.scored & (scored == first)
        second = best.scatter_reduce(0, index, torch.where(holds, low, scored), "amax")[index]
        alone = group_sum(holds.to(rewards.dtype), index, n) == 1
        wins = holds & alone & stats.informative
        gap = torch.where(wins, stats.rewards - torch.where(wins, second, stats.rewards), torch.zeros_like(rewards))
        if not self.by_std:
            return gap
        deviation = torch.where(stats.scored, stats.rewards - stats.mean, torch.zeros_like(rewards))
        variance = group_sum(deviation**2, index, n) / (stats.size - 1).clamp_min(1)
        scale = torch.where(stats.informative, variance.sqrt() + self.eps, torch.ones_like(variance))
        return gap / scale


@dataclass(frozen=True)
class SignalRescaled(OfGroup):
    """A <- alpha A, which makes up for the responses that carry no signal, GPG (arXiv 2504.02546).

    `by` "groups" is the paper's alpha = B / (B - M), with B groups in the batch of which M have equal rewards;
    "rewards" is verl's B / max(1, number of rewards that are not 0), with B responses: 1 for rewards of +1 and -1.
    """

    advantage: GroupNormalized
    by: Literal["groups", "rewards"] = "groups"

    def of(self, rewards: Tensor, group: Tensor) -> Tensor:
        """Return advantages `[B]`."""
        stats = group_statistics(rewards, group)
        index, every = group_index(group)
        counted = int(torch.unique(index[stats.informative]).numel())
        if self.by == "rewards":
            every, counted = int(stats.scored.sum()), int((stats.rewards != 0).sum())
        return self.advantage.of(rewards, group) * (every / max(1, counted))
