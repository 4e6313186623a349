"""Surrogates of the form -sg[w] A log pi: the weight decides how much each token learns, and carries no gradient.

Nothing is cut off but by the weight, so the value of these losses says little: it scales with the log-probs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tepo.core.errors import InputError
from tepo.objectives.batch import TokenBatch, require
from tepo.objectives.ratios import RatioValue
from tepo.objectives.surrogates import SurrogateValue, by_sign

# Beside 1 - p in the binary divergence, so that p = 1 stays finite (verl's constant).
TINY = 1e-8


@dataclass(frozen=True)
class CappedWeight:
    """-sg[clip(r, low, high)] A log pi, CISPO (arXiv 2506.13585): a capped ratio, and no token without a gradient.

    `low` and `high` bound the ratio itself; `low` None leaves it unbounded from below.
    """

    high: float
    low: float | None = None
    needs: ClassVar[frozenset[str]] = frozenset()
    scores: ClassVar[frozenset[str]] = frozenset()
    scales_with_advantage: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.high > 0 or (self.low is not None and self.low >= self.high):
            raise InputError(
                f"clip_low={self.low}, clip_high={self.high} of a capped weight: expected low < high, high > 0"
            )

    @property
    def fine(self) -> bool:
        """Caps within 1e-2 of 1 are within the noise between a sampler and a scorer."""
        return abs(self.high - 1) < 1e-2 or (self.low is not None and abs(1 - self.low) < 1e-2)

    def __call__(self, ratio: RatioValue, advantage: Tensor, batch: TokenBatch) -> SurrogateValue:
        """Return token losses; the clip indicators say where the weight was cut, whatever the advantage's sign."""
        value = ratio.value.detach()
        weight = value.clamp(min=self.low, max=self.high)
        below = None if self.low is None else value < self.low
        return SurrogateValue(-weight * advantage * batch.logp, below, value > self.high)


@dataclass(frozen=True)
class GammaWeight:
    """-sg[phi(W)] A log pi, phi(W) = e^lam W^k e^(-lam W), VESPO (arXiv 2602.10693).

    phi(1) = 1, and it falls to 0 for W -> 0 and W -> inf; largest at W = k / lam. One (k, lam) for A >= 0 and
    another for A < 0. W is meant to be the whole response's ratio, exp(sum_t D).
    """

    k_positive: float = 2.0
    lam_positive: float = 3.0
    k_negative: float = 3.0
    lam_negative: float = 2.0
    needs: ClassVar[frozenset[str]] = frozenset()
    scores: ClassVar[frozenset[str]] = frozenset()
    scales_with_advantage: ClassVar[bool] = True
    fine: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not min(self.k_positive, self.lam_positive, self.k_negative, self.lam_negative) >= 0:
            raise InputError(f"{self}: expected numbers >= 0")

    def __call__(self, ratio: RatioValue, advantage: Tensor, batch: TokenBatch) -> SurrogateValue:
        """Return token losses."""
        log, value = ratio.log.detach(), ratio.value.detach()
        positive = advantage >= 0
        k = by_sign(positive, self.k_positive, self.k_negative, like=log)
        lam = by_sign(positive, self.lam_positive, self.lam_negative, like=log)
        weight = (lam + k * log - lam * value).exp()
        return SurrogateValue(-weight * advantage * batch.logp)


@dataclass(frozen=True)
class DivergenceMask:
    """-sg[min(r, cap)] A log pi on tokens within a trust region, else 0: DPPO (arXiv 2602.04879), binary form.

    The region bounds how much the sampled token's probability p moved, not the ratio. `measure` "tv": p - p_old <=
    high where A > 0, p - p_old >= -low elsewhere. "kl": the divergence between (p_old, 1 - p_old) and (p, 1 - p) is
    <= high where A > 0 and the token became likelier, <= low where A <= 0 and it became less likely.
    """

    measure: Literal["tv", "kl"] = "tv"
    low: float = 0.15
    high: float = 0.15
    cap: float = 20.0
    needs: ClassVar[frozenset[str]] = frozenset()
    scores: ClassVar[frozenset[str]] = frozenset()
    scales_with_advantage: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not min(self.low, self.high) >= 0 or not self.cap >= 1:
            raise InputError(
                f"threshold_low={self.low}, threshold_high={self.high}, ratio_cap={self.cap}: expected >= 0, cap >= 1"
            )

    @property
    def fine(self) -> bool:
        """Thresholds below 1e-2 are within the noise between a sampler and a scorer."""
        return min(self.low, self.high) < 1e-2

    def __call__(self, ratio: RatioValue, advantage: Tensor, batch: TokenBatch) -> SurrogateValue:
        """Return token losses; the clip indicators are the tokens left out with A <= 0 (low) and A > 0 (high)."""
        log, old_log = batch.logp.detach().clamp_max(0.0), require(batch, "old_logp", "DPPO").detach().clamp_max(0.0)
        p, old = log.exp(), old_log.exp()
        rising, falling = p > old, p < old
        if self.measure == "tv":
            too_high, too_low = p - old > self.high, old - p > self.low
        else:
            moved = old * (old_log - log) + (1 - old) * ((1 - old + TINY) / (1 - p + TINY)).log()
            too_high, too_low = rising & (moved > self.high), falling & (moved > self.low)
        above, below = (advantage > 0) & too_high, (advantage <= 0) & too_low
        weight = ratio.value.detach().clamp_max(self.cap)
        loss = torch.where(above | below, torch.zeros_like(batch.logp), -weight * advantage * batch.logp)
        return SurrogateValue(loss, below, above)
