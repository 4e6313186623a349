"""Several rewards a response, each compared with its group by itself before they are added up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tepo.core.errors import InputError
from tepo.objectives.advantages import GROUP_NEEDS, GroupNormalized, whiten
from tepo.objectives.batch import TokenBatch, require


@dataclass(frozen=True)
class PerReward:
    """A_i = sum_k w_k A_{i,k}, each reward normalised within its group, GDPO (arXiv 2601.05242).

    Adding rewards first would let the one with the largest spread decide. A response that reward k cannot score
    (NaN) has no say in k's statistics and gets nothing from k. `weights`: one a reward; none: 1 each.
    `whiten` "responses" then takes (A - mean) / (std + eps) over the batch's responses that have a reward and a
    token, so that the size of the step does not depend on how many rewards there are.
    """

    normalized: GroupNormalized = GroupNormalized()
    weights: tuple[float, ...] | None = None
    whiten: Literal["none", "responses"] = "none"
    per_reward: ClassVar[bool] = True  # a group speaks where any of its rewards differs, whatever their sum does
    needs: ClassVar[frozenset[str]] = GROUP_NEEDS

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Return advantages `[B]`."""
        rewards, group = require(batch, "rewards", "the advantage"), require(batch, "group", "the advantage")
        columns = rewards[:, None] if rewards.dim() == 1 else rewards
        weights = self.weights or (1.0,) * columns.shape[1]
        if len(weights) != columns.shape[1]:
            raise InputError(f"reward_weights has {len(weights)} numbers, the batch has {columns.shape[1]} rewards")
        total = torch.zeros_like(columns[:, 0])
        for weight, column in zip(weights, columns.unbind(dim=1), strict=True):
            total = total + weight * self.normalized.of(column, group)
        if self.whiten == "none":
            return total
        counted = ~torch.isnan(columns).all(dim=1) & (batch.lengths() > 0)
        return whiten(total, counted, std_eps=self.normalized.eps)
