"""Advantages: how much better a response is than its group. All are computed over the whole rollout batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from tepo.objectives.batch import TokenBatch, group_index, require

# Rewards that differ by less than this share of their size count as equal: the mean of n equal floats can be off
# by an ulp, and dividing that by (std + eps) would turn rounding into an advantage.
EQUAL_REWARDS = 1e-6


GROUP_NEEDS = frozenset({"rewards", "group"})


class Advantage(Protocol):
    """A pure function of a clean rollout batch, its rewards already shaped, to advantages."""

    @property
    def needs(self) -> frozenset[str]:
        """Fields of the token batch that this part reads."""
        ...

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Return advantages `[B]` or `[B, T]`; a response without a reward (NaN) has advantage 0."""
        ...


def combine(rewards: Tensor) -> Tensor:
    """Sum reward components `[B, K]` to `[B]`, leaving out NaN; a row that no reward can score stays NaN."""
    if rewards.dim() == 1:
        return rewards
    unscored = torch.isnan(rewards).all(dim=1)
    return torch.where(unscored, torch.full_like(rewards[:, 0], float("nan")), torch.nansum(rewards, dim=1))


def scored_groups(batch: TokenBatch, owner: str) -> tuple[Tensor, Tensor]:
    """Return the batch's rewards `[B]` (components summed) and groups `[B]`, or the error that names the field."""
    return combine(require(batch, "rewards", owner)), require(batch, "group", owner)


@dataclass(frozen=True, eq=False)
class GroupStatistics:
    """Per-row view of the row's group, over the responses that have a reward."""

    scored: Tensor
    rewards: Tensor  # NaN replaced by 0
    size: Tensor
    mean: Tensor
    informative: Tensor  # the group's rewards differ


def group_statistics(rewards: Tensor, group: Tensor) -> GroupStatistics:
    """Return size, mean and informativeness of each row's group, all `[B]`."""
    index, n = group_index(group)
    scored = ~torch.isnan(rewards)
    filled = torch.where(scored, rewards, torch.zeros_like(rewards))
    size = group_sum(scored.to(rewards.dtype), index, n)
    mean = group_sum(filled, index, n) / size.clamp_min(1)
    inf = torch.full_like(rewards, float("inf"))
    high = rewards.new_full((n,), float("-inf")).scatter_reduce(0, index, torch.where(scored, rewards, -inf), "amax")
    low = rewards.new_full((n,), float("inf")).scatter_reduce(0, index, torch.where(scored, rewards, inf), "amin")
    scale = torch.maximum(high.abs(), low.abs())
    informative = (high - low > EQUAL_REWARDS * scale)[index] & (size > 1)
    return GroupStatistics(scored, filled, size, mean, informative)


def with_signal(rewards: Tensor, group: Tensor, *, each: bool) -> Tensor:
    """Return bool `[B]`: the rewards of the row's group differ; with `each`, those of any component do."""
    columns = rewards if each and rewards.dim() == 2 else combine(rewards)[:, None]
    verdicts = [group_statistics(column, group).informative for column in columns.unbind(dim=1)]
    return torch.stack(verdicts).any(dim=0)


def group_sum(values: Tensor, index: Tensor, n: int) -> Tensor:
    """Sum `values` `[B]` inside each group and give every row its group's sum."""
    return values.new_zeros(n).index_add(0, index, values)[index]


def whiten(values: Tensor, counted: Tensor, *, variance_eps: float = 0.0, std_eps: float = 0.0) -> Tensor:
    """(x - mean) / (sqrt(var + variance_eps) + std_eps) over the counted values, 0 elsewhere; the sample's variance.

    Values that are equal up to rounding become exactly 0, as does a single one. A mean that is 0 up to rounding is
    taken as 0, so that what was exactly 0 stays so.
    """
    chosen = values[counted]
    zeros = torch.zeros_like(values)
    if chosen.numel() < 2 or bool(chosen.max() - chosen.min() <= EQUAL_REWARDS * chosen.abs().max()):
        return zeros
    mean = chosen.mean()
    mean = torch.where(mean.abs() <= EQUAL_REWARDS * chosen.abs().max(), torch.zeros_like(mean), mean)
    # The variance of values far from 0 loses digits unless it is taken around their mean.
    centred = torch.where(counted, values - mean, zeros)
    variance = (centred**2).sum() / (chosen.numel() - 1)
    return centred / ((variance + variance_eps).sqrt() + std_eps)


class OfGroup:
    """An advantage that looks at nothing but the rewards of a group."""

    needs: ClassVar[frozenset[str]] = GROUP_NEEDS

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Return advantages `[B]`."""
        return self.of(*scored_groups(batch, "the advantage"))

    def of(self, rewards: Tensor, group: Tensor) -> Tensor:
        """Return advantages `[B]` from rewards `[B]` and groups `[B]`."""
        raise NotImplementedError


@dataclass(frozen=True)
class GroupNormalized(OfGroup):
    """A_i = (R_i - mean_g) / (std + eps), GRPO (arXiv 2402.03300).

    `ddof` 1 is the sample standard deviation (TRL, verl), 0 the population's; `scale` says whose deviation
    divides: the group's, the batch's (Lite PPO), or none (Dr.GRPO). Equal rewards and a group of one give
    exactly 0 (verl would pass the raw reward of a group of one through).
    """

    scale: Literal["group", "batch", "none"] = "group"
    ddof: Literal[0, 1] = 1
    eps: float = 1e-6

    def of(self, rewards: Tensor, group: Tensor) -> Tensor:
        """Return advantages `[B]`."""
        stats = group_statistics(rewards, group)
        centred = torch.where(stats.informative & stats.scored, stats.rewards - stats.mean, torch.zeros_like(rewards))
        if self.scale == "none":
            return centred
        if self.scale == "group":
            index, n = group_index(group)
            variance = group_sum(centred**2, index, n) / (stats.size - self.ddof).clamp_min(1)
        else:
            count = stats.scored.sum()
            mean = stats.rewards.sum() / count.clamp_min(1)
            deviation = torch.where(stats.scored, stats.rewards - mean, torch.zeros_like(rewards))
            variance = (deviation**2).sum() / (count - self.ddof).clamp_min(1)
        scale = torch.where(stats.informative, variance.sqrt() + self.eps, torch.ones_like(variance))
        return centred / scale  # with eps = 0, too, a group without signal gives 0 and not 0 / 0


@dataclass(frozen=True)
class LeaveOneOut(OfGroup):
    """A_i = R_i - mean of the other responses of the group = n/(n-1) (R_i - mean_g), RLOO (arXiv 2402.14740)."""

    def of(self, rewards: Tensor, group: Tensor) -> Tensor:
        """Return advantages `[B]`; a group of one has no other responses: 0."""
        stats = group_statistics(rewards, group)
        value = stats.size / (stats.size - 1).clamp_min(1) * (stats.rewards - stats.mean)
        return torch.where(stats.informative & stats.scored, value, torch.zeros_like(value))
