"""Surrogates: what a step may gain. Each returns a loss (to minimise) for every token, and where it was clipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from tepo.core.errors import InputError
from tepo.objectives.batch import TokenBatch
from tepo.objectives.ratios import RatioValue


@dataclass(frozen=True, eq=False)
class SurrogateValue:
    """Token losses `[B, T]`, and bool `[B, T]` where the lower, upper or dual clip cut the gradient."""

    loss: Tensor
    clip_low: Tensor | None = None
    clip_high: Tensor | None = None
    clip_dual: Tensor | None = None


class Surrogate(Protocol):
    """A pure function of ratio, advantage `[B, T]` and log-probs to token losses."""

    @property
    def fine(self) -> bool:
        """Whether the clip is so narrow that old log-probs must come from the scorer's own path."""
        ...

    def __call__(self, ratio: RatioValue, advantage: Tensor, batch: TokenBatch) -> SurrogateValue:
        """Return token losses and clip indicators."""
        ...


@dataclass(frozen=True)
class PPOClip:
    """-min(r A, clip(r, 1-low, 1+high) A), for A < 0 capped at -dual * A (dual clip, arXiv 1912.09729).

    At an exact tie (r on the border) the unclipped branch keeps its gradient.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __post_init__(self) -> None:
        if self.low < 0 or self.high < 0:
            raise InputError(f"clip_low={self.low}, clip_high={self.high}: expected numbers >= 0")
        if self.dual is not None and self.dual <= 1:
            raise InputError(f"clip_dual={self.dual}: expected a number > 1, or None for no dual clip")

    @property
    def fine(self) -> bool:
        """Clips finer than 1e-2 are within the noise between a sampler and a scorer."""
        return min(self.low, self.high) < 1e-2

    def __call__(self, ratio: RatioValue, advantage: Tensor, batch: TokenBatch) -> SurrogateValue:
        """Return token losses."""
        unclipped = -advantage * ratio.value
        clipped = -advantage * ratio.value.clamp(1 - self.low, 1 + self.high)
        loss = torch.where(clipped > unclipped, clipped, unclipped)
        below = (advantage < 0) & (ratio.value < 1 - self.low)
        above = (advantage > 0) & (ratio.value > 1 + self.high)
        if self.dual is None:
            return SurrogateValue(loss, below, above)
        cap = -self.dual * advantage
        capped = (advantage < 0) & (loss > cap)
        return SurrogateValue(torch.where(capped, cap, loss), below, above, capped)


@dataclass(frozen=True)
class PolicyGradient:
    """-A logp: the plain score-function estimator, on-policy for one update a rollout batch."""

    fine: ClassVar[bool] = False

    def __call__(self, ratio: RatioValue, advantage: Tensor, batch: TokenBatch) -> SurrogateValue:
        """Return token losses."""
        return SurrogateValue(-advantage * batch.logp)


@dataclass(frozen=True)
class Unclipped:
    """-A r: importance-weighted policy gradient without a clip."""

    fine: ClassVar[bool] = False

    def __call__(self, ratio: RatioValue, advantage: Tensor, batch: TokenBatch) -> SurrogateValue:
        """Return token losses."""
        return SurrogateValue(-advantage * ratio.value)
