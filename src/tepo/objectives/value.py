"""The critic's side of an objective: its loss, and how well its values foresee the returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tepo.core.errors import InputError
from tepo.objectives.batch import TokenBatch, require
from tepo.objectives.regularizers import FixedTerm
from tepo.objectives.sums import Sums, over


@dataclass(frozen=True)
class ValueLoss(FixedTerm):
    """coef * reduce(0.5 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2)): PPO's clipped value loss.

    v the critic's current value, v_old the one before the updates, R = advantage before whitening + v_old. Where the
    clipped branch is the larger one, the value has moved towards the return by more than the clip allows: gradient 0.
    `clip` None: the plain squared error. A response without a reward has R = v_old: the critic is held there.
    """

    coef: float = 0.1
    clip: float | None = 0.2
    name: str = "value"
    norm: Literal["all", "masked"] = "all"
    current: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({"values", "old_values"})
    scores: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise InputError(f"value_clip={self.clip}: expected a number > 0, or None for no clip")

    def values(self, batch: TokenBatch, clamp: float) -> Tensor:
        """Return the loss of every token, `[B, T]`."""
        values, returns = require(batch, "values", "the value loss"), require(batch, "returns", "the value loss")
        plain = (values - returns.detach()) ** 2
        if self.clip is None:
            return 0.5 * plain
        old = require(batch, "old_values", "the value loss").detach()
        bounded = old + (values - old).clamp(-self.clip, self.clip)
        clipped = (bounded - returns.detach()) ** 2
        return 0.5 * torch.where(clipped > plain, clipped, plain)


def foresight(returns: Tensor, advantage: Tensor, mask: Tensor) -> Sums:
    """Return `value/return` (the mean target) and `value/explained`: 1 - sum (R - v_old)^2 / sum (R - mean R)^2.

    1 is a perfect critic, 0 one that is as good as the mean, below 0 a worse one; left out where all returns agree.
    """
    total, count = over(returns, mask)
    mean = total / count.clamp_min(1)
    around = torch.where(mask, returns - mean, torch.zeros_like(returns)).square().sum()
    left = torch.where(mask, advantage, torch.zeros_like(advantage)).square().sum()
    return Sums(means={"value/return": (total, count), "value/explained": (around - left, around)})


def value_metrics(batch: TokenBatch) -> Sums:
    """Return the current values' mean and mean squared error, where there is a critic."""
    if batch.values is None or batch.returns is None:
        return Sums()
    error = (batch.values - batch.returns).detach() ** 2
    return Sums(means={"value/mean": over(batch.values, batch.mask), "value/error": over(error, batch.mask)})
