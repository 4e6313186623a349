"""Several rewards a response, each compared with its group by itself before they are added up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tepo.core.errors import InputError
from tepo.objectives.advantages import EQUAL_REWARDS, GROUP_NEEDS, GroupNormalized
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
        return self._whitened(total, counted)

    def _whitened(self, total: Tensor, counted: Tensor) -> Tensor:
        chosen = total[counted]
        zeros = torch.zeros_like(total)
        if chosen.numel() < 2 or bool(chosen.max() - chosen.min() <= EQUAL_REWARDS * chosen.abs().max()):
            return zeros
        centred = torch.where(counted, total - chosen.mean(), zeros)
        std = ((centred**2).sum() / (chosen.numel() - 1)).sqrt()
        return centred / (std + self.normalized.eps)
