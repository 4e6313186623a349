"""The covariance of log-prob and advantage, token by token, and the parts that act on it.

    c_{i,t} = (A_{i,t} - mean A)(log pi_{i,t} - mean log pi)

A step along A log pi changes the entropy by about -eta Cov(log pi, A) (arXiv 2505.22617, theorem 1): a few tokens of
large c make it fall. The means are over the response tokens of the whole mini-batch, with the current policy's
log-probs, so every part here needs the mini-batch's statistics, and no split into micro-batches changes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tepo.core.errors import InputError
from tepo.objectives.batch import TokenBatch, group_index, require
from tepo.objectives.choice import draws, highest, share
from tepo.objectives.ratios import TokenRatio
from tepo.objectives.surrogates import PPOClip

# A deviation smaller than this share of the largest covariance is rounding.
NO_SPREAD = 1e-6


def token_covariance(batch: TokenBatch, index: Tensor | None = None, n: int = 1) -> Tensor:
    """Return c, `[B, T]`, zero outside the mask; with means inside each of `n` sets of rows, `index` naming the set."""
    advantage = require(batch, "advantage", "the covariance").detach()
    logp = batch.logp.detach()
    index = torch.zeros(len(logp), dtype=torch.long, device=logp.device) if index is None else index
    product = _centred(advantage, batch.mask, index, n) * _centred(logp, batch.mask, index, n)
    return torch.where(batch.mask, product, torch.zeros_like(product))


def _centred(values: Tensor, mask: Tensor, index: Tensor, n: int) -> Tensor:
    return values - (_set_sum(torch.where(mask, values, 0), index, n) / _set_count(mask, values, index, n))[:, None]


def _set_sum(values: Tensor, index: Tensor, n: int) -> Tensor:
    """Sum `[B, T]` values over the rows of each set; give every row its set's sum, `[B]`."""
    return values.new_zeros(n).index_add(0, index, values.sum(dim=1))[index]


def _set_count(mask: Tensor, like: Tensor, index: Tensor, n: int) -> Tensor:
    return _set_sum(mask.to(like.dtype), index, n).clamp_min(1)


@dataclass(frozen=True)
class CovarianceBand:
    """Drop a random few of the tokens with low < c < high that PPO has not clipped already (Clip-Cov).

    max(1, floor(fraction * N)) tokens lose their policy loss; the denominator keeps them. The draw is a function of
    `seed`, row id and place, so the same tokens of the same responses are drawn whatever else is in the batch.
    """

    fraction: float
    low: float
    high: float
    clip: PPOClip
    clamp: float = 20.0
    seed: int = 0
    denominator: Literal["selected", "all"] = "all"
    terms: Literal["policy", "all"] = "policy"
    current: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"row_id"})

    def __post_init__(self) -> None:
        check_fraction("clip_fraction", self.fraction)
        if not self.low < self.high:
            raise InputError(f"covariance_low={self.low}, covariance_high={self.high}: expected low < high")

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Return the mask without the drawn tokens."""
        owner = "Clip-Cov's draw"
        covariance = token_covariance(batch)
        ratio = TokenRatio()(batch, self.clamp)
        clipped = self.clip(ratio, require(batch, "advantage", owner), batch)
        band = batch.mask & (covariance > self.low) & (covariance < self.high)
        for side in (clipped.clip_low, clipped.clip_high):
            band = band & ~side if side is not None else band
        count = max(1, int(share(self.fraction, int(batch.mask.sum()))))
        return batch.mask & ~highest(draws(batch, self.seed, owner), band, count, batch, owner)


@dataclass(frozen=True)
class TopCovariance:
    """The max(1, floor(fraction * N)) tokens of the largest c carry a KL (KL-Cov); ties by row id, then place."""

    fraction: float
    current: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"row_id"})
    scores: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        check_fraction("kl_fraction", self.fraction)

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Return the tokens held back."""
        count = max(1, int(share(self.fraction, int(batch.mask.sum()))))
        return highest(token_covariance(batch), batch.mask, count, batch, "KL-Cov's selection")


@dataclass(frozen=True)
class CovarianceKernel:
    """A <- A * N w / sum w, w = exp(-c^2 / (2 sigma^2)): tokens of extreme covariance count less (CW-GRPO).

    sigma is `bandwidth` times the deviation of c; where c has no spread every weight is 1. `scope`: mean, deviation
    and N over the "mini" batch's tokens, or over each "group"'s (a mini-batch that holds a part of a group uses it).
    """

    scope: Literal["mini", "group"] = "mini"
    ddof: Literal[0, 1] = 0
    bandwidth: float = 1.0
    current: ClassVar[bool] = True
    scores: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise InputError(f"bandwidth={self.bandwidth}: expected a number > 0")

    @property
    def needs(self) -> frozenset[str]:
        """The group, where it is the scope."""
        return frozenset({"group"}) if self.scope == "group" else frozenset()

    def __call__(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        """Return the weighted advantages."""
        return advantage * self.weights(batch.replace(advantage=advantage))

    def weights(self, batch: TokenBatch) -> Tensor:
        """Return N w / sum w, `[B, T]`, zero outside the mask."""
        index, n = torch.zeros(len(batch.mask), dtype=torch.long, device=batch.mask.device), 1
        if self.scope == "group":
            index, n = group_index(require(batch, "group", "scope='group'"))
        c = token_covariance(batch, index, n)
        count = _set_count(batch.mask, c, index, n)
        mean = _set_sum(c, index, n) / count
        deviation = torch.where(batch.mask, c - mean[:, None], torch.zeros_like(c))
        sigma = (_set_sum(deviation**2, index, n) / (count - self.ddof).clamp_min(1)).sqrt()
        largest = c.new_zeros(n).scatter_reduce(0, index, _row_max(c.abs()), "amax")[index]
        flat = sigma <= NO_SPREAD * largest
        sigma = torch.where(flat, torch.ones_like(sigma), sigma * self.bandwidth)[:, None]
        log = torch.where(flat[:, None], torch.zeros_like(c), -((c / sigma) ** 2) / 2)
        # N w / sum w from logarithms: w itself underflows where all of c lies many deviations from 0.
        log = torch.where(batch.mask, log, torch.full_like(log, float("-inf")))
        top = c.new_full((n,), float("-inf")).scatter_reduce(0, index, _row_max(log), "amax")[index][:, None]
        w = torch.where(batch.mask, (log - top).exp(), torch.zeros_like(log))
        total = _set_sum(w, index, n)[:, None]
        return w * count[:, None] / torch.where(total > 0, total, torch.ones_like(total))


def _row_max(values: Tensor) -> Tensor:
    """Return the largest value of each row, `[B]`; -inf for rows without columns."""
    if values.shape[1] == 0:
        return values.new_full((len(values),), float("-inf"))
    return values.amax(dim=1)


def check_fraction(name: str, fraction: float) -> None:
    """Raise `InputError` unless 0 < fraction <= 1."""
    if not 0 < fraction <= 1:
        raise InputError(f"{name}={fraction}: expected a share of the tokens, 0 < {name} <= 1")
