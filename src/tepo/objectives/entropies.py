"""Parts that read the entropy of each token's distribution: selectors and advantage transforms. All are detached."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tepo.core.errors import InputError
from tepo.objectives.batch import TokenBatch, group_index, require
from tepo.objectives.choice import highest, places, share
from tepo.objectives.covariance import check_fraction
from tepo.objectives.sums import extremes

# Probabilities closer to 0 and 1 than this are moved there (STEER's code).
PROBABILITY_MARGIN = 1e-8
# A deviation below this share of the values' size is rounding.
EQUAL = 1e-6
# |Omega| below this is no change of entropy worth a weight (STEER's code).
SMALLEST_CHANGE = 0.02


@dataclass(frozen=True)
class TopEntropy:
    """Only the `fraction` of the mini-batch's tokens with the highest entropy carry the policy term (80/20).

    `top-k`: exactly ceil(fraction * N) tokens, at least one; ties by row id, then place. `quantile`: every token at
    or above the (1 - fraction) quantile of the entropies, interpolated; ties are all kept.
    """

    fraction: float
    rule: Literal["top-k", "quantile"] = "top-k"
    denominator: Literal["selected", "all"] = "selected"
    terms: Literal["policy", "all"] = "policy"
    current: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fraction("entropy_fraction", self.fraction)

    @property
    def needs(self) -> frozenset[str]:
        """The entropy, and for exact counts the row id that breaks ties."""
        return frozenset({"entropy", "row_id"} if self.rule == "top-k" else {"entropy"})

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Return the tokens of high entropy."""
        owner = "the entropy selection"
        entropy = require(batch, "entropy", owner).detach()
        n = int(batch.mask.sum())
        if self.rule == "top-k":
            return highest(entropy, batch.mask, max(1, math.ceil(share(self.fraction, n))), batch, owner)
        if n == 0:
            return batch.mask
        return batch.mask & (entropy >= quantile(entropy[batch.mask], 1 - self.fraction))


def quantile(values: Tensor, q: float) -> Tensor:
    """Return the quantile of a vector, linear between neighbours; `torch.quantile` without its limit on the size."""
    place = q * (len(values) - 1)
    below = math.floor(place)
    low = torch.kthvalue(values, below + 1).values
    if below == place:
        return low
    high = torch.kthvalue(values, below + 2).values
    return torch.lerp(low, high, place - below)


@dataclass(frozen=True)
class EntropyBonusAdvantage:
    """A <- A + min(alpha * H, |A| / kappa): more credit where the policy hesitated (arXiv 2506.14758).

    With kappa > 1 no sign changes; where A = 0 nothing is added. `source`: the entropy of the sampling policy
    ("old", once a rollout batch) or of the current one, which takes a pass of its own.
    """

    alpha: float
    kappa: float
    source: Literal["old", "current"] = "old"

    def __post_init__(self) -> None:
        if self.alpha < 0 or not self.kappa > 0:
            raise InputError(f"alpha={self.alpha}, kappa={self.kappa}: expected alpha >= 0 and kappa > 0")

    @property
    def current(self) -> bool:
        """Whether the current policy's entropies decide."""
        return self.source == "current"

    @property
    def needs(self) -> frozenset[str]:
        """The entropies (at the first update one stands for the other)."""
        return frozenset({"entropy"} if self.current else {"entropy", "old_entropy"})

    @property
    def scores(self) -> frozenset[str]:
        """What the scorer must produce."""
        return frozenset({"entropy"})

    def __call__(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        """Return the shaped advantages."""
        entropy = require(batch, "entropy" if self.current else "old_entropy", "entropy-advantage").detach()
        bonus = torch.minimum(self.alpha * entropy, advantage.abs() / self.kappa)
        return advantage + torch.where(batch.mask, bonus, torch.zeros_like(bonus))


@dataclass(frozen=True)
class EntropyChangeWeights:
    """A <- w A with w falling in |Omega|, the token's change of entropy up to the step size (STEER).

    Omega = (A / pi_old) pi (1 - pi) (log pi + H). `exponential`: w = exp(-k |Omega|), k = -ln(lowest) / max(max
    |Omega|, 0.02), clamped to [lowest, 1]. `linear`: from `highest` at the smallest |Omega| to `lowest` at the
    largest, the middle where all are equal. The extremes are the mini-batch's.
    """

    map: Literal["exponential", "linear"] = "exponential"
    lowest: float = 0.8
    highest: float = 1.2
    current: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"entropy", "old_logp"})
    scores: ClassVar[frozenset[str]] = frozenset({"entropy"})

    def __post_init__(self) -> None:
        if not 0 < self.lowest <= (1 if self.map == "exponential" else self.highest):
            raise InputError(
                f"weight_low={self.lowest}, weight_high={self.highest}: expected 0 < weight_low, and weight_low <= "
                f"{'1' if self.map == 'exponential' else 'weight_high'}"
            )

    def __call__(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        """Return the weighted advantages."""
        return advantage * self.weights(batch.replace(advantage=advantage))

    def weights(self, batch: TokenBatch) -> Tensor:
        """Return w, `[B, T]`, zero outside the mask."""
        owner = "STEER's weights"
        advantage, entropy = require(batch, "advantage", owner), require(batch, "entropy", owner).detach()
        log_min = math.log(PROBABILITY_MARGIN)
        logp = batch.logp.detach().clamp(log_min, -PROBABILITY_MARGIN)
        old = require(batch, "old_logp", owner).detach().clamp(log_min, 0.0)
        change = (advantage * (logp - old).exp() * -torch.expm1(logp) * (logp + entropy)).abs()
        largest, smallest = extremes(change, batch.mask)
        if self.map == "exponential":
            k = -math.log(self.lowest) / largest.clamp_min(SMALLEST_CHANGE)
            weight = (-k * change).exp().clamp(self.lowest, 1.0)
        else:
            width = largest - smallest
            middle = torch.full_like(change, 0.5)
            place = torch.where(width > 0, (change - smallest) / torch.where(width > 0, width, 1.0), middle)
            weight = self.highest - (self.highest - self.lowest) * place
        return torch.where(batch.mask, weight, torch.zeros_like(weight))


@dataclass(frozen=True)
class ProgressGate:
    """A <- A + eta W sgn(A) s, kept on A's side of 0: ERPO's token advantage, in our reading (experimental).

    W = sigmoid(gamma z(H)) gates by the sampling policy's entropy, z-normalised over the group's tokens. s is the
    implicit progress log pi_old - log pi_ref, z-normalised inside each of `buckets` equal stretches of the
    responses, over the group, so that its scale (and any factor on it) drops out.
    """

    gamma: float
    eta: float
    buckets: int
    current: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({"group", "entropy", "old_entropy", "old_logp", "ref_logp"})
    scores: ClassVar[frozenset[str]] = frozenset({"entropy"})

    def __post_init__(self) -> None:
        if self.buckets < 1:
            raise InputError(f"buckets={self.buckets}: expected an integer >= 1")

    def __call__(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        """Return the synthesised advantages."""
        owner = "ERPO"
        index, n = group_index(require(batch, "group", owner))
        entropy = require(batch, "old_entropy", owner).detach()
        progress = (require(batch, "old_logp", owner) - require(batch, "ref_logp", owner)).detach()
        cell = index[:, None].expand_as(batch.mask)
        gate = torch.sigmoid(self.gamma * standardized(entropy, batch.mask, cell, n))
        bucket = places(batch.mask) * self.buckets // batch.lengths().clamp_min(1)[:, None]
        cell = cell * self.buckets + bucket.clamp(0, self.buckets - 1)
        signal = gate * standardized(progress, batch.mask, cell, n * self.buckets)
        shaped = advantage + self.eta * torch.sign(advantage) * signal
        return torch.where(shaped * advantage > 0, shaped, torch.zeros_like(shaped))


def standardized(values: Tensor, mask: Tensor, cell: Tensor, n: int) -> Tensor:
    """Return (x - mean) / deviation inside each cell of tokens, `[B, T]`; 0 where a cell's values are all equal.

    `cell` `[B, T]` names the cell of every token, 0..n-1. The deviation is the population's. Differences from the
    mean that rounding could have made are 0.
    """
    index = torch.where(mask, cell, torch.full_like(cell, n))  # one more cell, for everything outside the mask
    flat = index.flatten()

    def total(x: Tensor) -> Tensor:
        return x.new_zeros(n + 1).index_add(0, flat, x.flatten())

    count = total(mask.to(values.dtype)).clamp_min(1)
    held = torch.where(mask, values, torch.zeros_like(values))
    centred = held - (total(held) / count)[index]
    size = EQUAL * (total(held.abs()) / count)[index]
    deviation = (total(centred**2) / count).sqrt()[index]
    usable = mask & (deviation > size) & (centred.abs() > size)
    return torch.where(usable, centred / torch.where(usable, deviation, torch.ones_like(deviation)), 0)
