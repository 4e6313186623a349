"""Ratios: the new policy over the old one, and at which level. D = logp - old_logp; L_i = tokens of row i."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from tepo.core.errors import InputError
from tepo.objectives.batch import TokenBatch, require
from tepo.objectives.regularizers import State, Tuned


@dataclass(frozen=True, eq=False)
class RatioValue:
    """A ratio for every token, `[B, T]`, and its logarithm; both 1 and 0 outside the mask.

    `clip_low`, `clip_high`: bool `[B, T]` where a ratio that clips its tokens itself cut one.
    """

    log: Tensor
    value: Tensor
    clip_low: Tensor | None = None
    clip_high: Tensor | None = None


class Ratio(Protocol):
    """A pure function of a clean batch to one ratio a token; log-ratios are clamped, gradient 0 beyond."""

    def __call__(self, batch: TokenBatch, clamp: float) -> RatioValue:
        """Return the ratio of every token."""
        ...


@runtime_checkable
class TunedRatio(Tuned, Ratio, Protocol):
    """A ratio that tunes something on the way."""

    def tuned(self, state: State) -> Ratio:
        """Return the ratio as the state has it."""
        ...


def log_ratio(batch: TokenBatch) -> Tensor:
    """D = logp - old_logp, `[B, T]`, zero outside the mask."""
    return batch.logp - require(batch, "old_logp", "the ratio").detach()


def mean_log_ratio(batch: TokenBatch) -> Tensor:
    """(1/L_i) sum_t D_{i,t}, `[B, 1]`; 0 for an empty row."""
    return log_ratio(batch).sum(dim=1, keepdim=True) / batch.lengths().clamp_min(1)[:, None]


def spread(log: Tensor, batch: TokenBatch) -> RatioValue:
    """Give every token of the mask its row's log-ratio."""
    tokens = torch.where(batch.mask, log.expand_as(batch.logp), torch.zeros_like(batch.logp))
    return RatioValue(tokens, tokens.exp())


def own_gradient(log: Tensor, batch: TokenBatch, clamp: float) -> RatioValue:
    """Give every token a ratio of this (detached) logarithm whose gradient is its own: sg[ratio] pi / sg[pi]."""
    own = torch.where(log.abs() <= clamp, batch.logp - batch.logp.detach(), torch.zeros_like(batch.logp))
    return spread(log.clamp(-clamp, clamp) + own, batch)


@dataclass(frozen=True)
class NoRatio:
    """Ratio 1 everywhere, without gradient: for surrogates that use logp itself."""

    def __call__(self, batch: TokenBatch, clamp: float) -> RatioValue:
        """Return ones."""
        return RatioValue(torch.zeros_like(batch.logp), torch.ones_like(batch.logp))


@dataclass(frozen=True)
class TokenRatio:
    """r_{i,t} = exp(D_{i,t}), PPO (arXiv 1707.06347)."""

    def __call__(self, batch: TokenBatch, clamp: float) -> RatioValue:
        """Return token ratios."""
        log = log_ratio(batch).clamp(-clamp, clamp)
        return RatioValue(log, log.exp())


@dataclass(frozen=True)
class SequenceRatio:
    """s_i = exp((1/L_i) sum_t D_{i,t}), the geometric mean of the token ratios, GSPO (arXiv 2507.18071)."""

    def __call__(self, batch: TokenBatch, clamp: float) -> RatioValue:
        """Return each row's geometric-mean ratio at all its tokens."""
        return spread(mean_log_ratio(batch).clamp(-clamp, clamp), batch)


@dataclass(frozen=True)
class SequenceTokenRatio:
    """sg[s_i] * pi / sg[pi]: the sequence ratio's value with each token's own gradient, GSPO-token."""

    def __call__(self, batch: TokenBatch, clamp: float) -> RatioValue:
        """Return the row's geometric-mean ratio; d log / d logp is 1 on the own token, 0 beyond the clamp."""
        return own_gradient(mean_log_ratio(batch).detach(), batch, clamp)


@dataclass(frozen=True)
class SequenceSumRatio:
    """exp(sum_t D_{i,t}): the likelihood ratio of the whole response; the clamp keeps long responses finite."""

    def __call__(self, batch: TokenBatch, clamp: float) -> RatioValue:
        """Return each row's product of token ratios at all its tokens."""
        return spread(log_ratio(batch).sum(dim=1, keepdim=True).clamp(-clamp, clamp), batch)


@dataclass(frozen=True)
class PrefixRatio:
    """w_{i,t} = exp((1/t) sum_{k<=t} D_{i,k}): the geometric mean over the prefix, PNPO (arXiv 2608.01418).

    t counts response tokens, holes are skipped. `gradient` "prefix" differentiates w, so that a token hears from
    every later position (1/t from each); "token" keeps w's value and each token's own gradient, sg[w] pi / sg[pi].
    """

    gradient: Literal["prefix", "token"] = "prefix"

    def __call__(self, batch: TokenBatch, clamp: float) -> RatioValue:
        """Return each token's prefix ratio; d log / d logp is 0 beyond the clamp."""
        count = batch.mask.cumsum(dim=1).clamp_min(1)
        mean = log_ratio(batch).cumsum(dim=1) / count
        if self.gradient == "prefix":
            return spread(mean.clamp(-clamp, clamp), batch)
        return own_gradient(mean.detach(), batch, clamp)


@dataclass(frozen=True)
class HolderRatio:
    """((1/L_i) sum_t r_{i,t}^p)^(1/p): the power mean of the token ratios, HolderPO (arXiv 2605.12058).

    p = 1 is the arithmetic mean, p -> 0 the geometric one, p -> inf the largest, p -> -inf the smallest. Computed in
    logarithms around the mean, so that neither a small p nor a huge ratio loses digits or overflows.

    `clip_low`, `clip_high` (nats) bound each token's D from the side that its advantage gains on, before the mean:
    A > 0: min(D, clip_high), A < 0: max(D, -clip_low); with p = 0 that is GMPO's (arXiv 2507.20673). None: no bound.
    """

    p: float = 0.0
    clip_low: float | None = None
    clip_high: float | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.p):
            raise InputError(f"p={self.p} of a power mean: expected a finite number; 0 is the geometric mean")
        if any(bound is not None and not bound >= 0 for bound in (self.clip_low, self.clip_high)):
            raise InputError(f"clip_low={self.clip_low}, clip_high={self.clip_high}: expected numbers >= 0, or None")

    @property
    def fine(self) -> bool:
        """Bounds finer than 1e-2 are within the noise between a sampler and a scorer."""
        return any(bound is not None and bound < 1e-2 for bound in (self.clip_low, self.clip_high))

    def __call__(self, batch: TokenBatch, clamp: float) -> RatioValue:
        """Return each row's power mean at all its tokens."""
        log = log_ratio(batch)
        below = above = None
        advantage = batch.advantage
        if self.clip_low is not None or self.clip_high is not None:
            advantage = require(batch, "advantage", "a ratio that clips by the advantage's sign")
        if self.clip_low is not None and advantage is not None:
            below = (advantage < 0) & (log < -self.clip_low)
            log = torch.where(below, torch.full_like(log, -self.clip_low), log)
        if self.clip_high is not None and advantage is not None:
            above = (advantage > 0) & (log > self.clip_high)
            log = torch.where(above, torch.full_like(log, self.clip_high), log)
        row = spread(power_mean(log, batch.mask, self.p).clamp(-clamp, clamp), batch)
        return RatioValue(row.log, row.value, below, above)


@dataclass(frozen=True)
class AnnealedHolderRatio:
    """A power-mean ratio whose p runs in a straight line from `start` to `end`, over `updates` optimizer steps.

    The exponent in force is the state `holder_p`; by itself, without a state, this is `HolderRatio` at the start.
    """

    start: float
    end: float
    updates: int
    clip_low: float | None = None
    clip_high: float | None = None

    def __post_init__(self) -> None:
        if not (self.updates > 0 and math.isfinite(self.end)):
            raise InputError(f"p from {self.start} to {self.end} in {self.updates} updates: expected at least 1")
        HolderRatio(self.start, self.clip_low, self.clip_high)

    @property
    def fine(self) -> bool:
        """Bounds finer than 1e-2 are within the noise between a sampler and a scorer."""
        return HolderRatio(self.start, self.clip_low, self.clip_high).fine

    def __call__(self, batch: TokenBatch, clamp: float) -> RatioValue:
        """Return each row's power mean, with p as at the start."""
        return HolderRatio(self.start, self.clip_low, self.clip_high)(batch, clamp)

    def tuned(self, state: State) -> HolderRatio:
        """Return the ratio with the exponent in force."""
        return HolderRatio(float(state["holder_p"]), self.clip_low, self.clip_high)

    def init_state(self) -> dict[str, Tensor]:
        """Return the exponent at the start."""
        return {"holder_p": torch.tensor(self.start)}

    def update(self, state: State, metrics: Mapping[str, float]) -> dict[str, Tensor]:
        """Move the exponent by one update's share, up to the end."""
        p = state["holder_p"] + (self.end - self.start) / self.updates
        return {"holder_p": p.clamp(min(self.start, self.end), max(self.start, self.end))}


def power_mean(log: Tensor, mask: Tensor, p: float) -> Tensor:
    """log of ((1/L) sum exp(p log))^(1/p) over each row's mask, `[B, 1]`; 0 for an empty row.

    With m the row's mean, it is m + (1/p) log mean exp(p (log - m)), whatever m is: neither m nor the largest
    exponent needs a gradient. Where all exponents are small, 1 is left out of both logarithm and exponential.
    """
    length = mask.sum(dim=1, keepdim=True).clamp_min(1)
    if p == 0:
        return log.sum(dim=1, keepdim=True) / length
    mean = (log.sum(dim=1, keepdim=True) / length).detach()
    exponent = torch.where(mask, p * (log - mean), torch.zeros_like(log))
    largest = exponent.detach().abs().amax(dim=1, keepdim=True) if log.shape[1] else torch.zeros_like(mean)
    near = largest < 1
    small = torch.where(near, exponent, torch.zeros_like(exponent)).expm1().sum(dim=1, keepdim=True) / length
    top = torch.where(mask, exponent.detach(), torch.full_like(exponent, float("-inf")))
    top = top.amax(dim=1, keepdim=True) if log.shape[1] else torch.zeros_like(mean)
    top = torch.where(near, torch.zeros_like(top), top)
    power = torch.where(mask, (exponent - top).clamp_max(0.0).exp(), torch.zeros_like(exponent))
    large = torch.where(near, torch.ones_like(top), power.sum(dim=1, keepdim=True) / length)
    return mean + torch.where(near, small.log1p(), top + large.log()) / p
