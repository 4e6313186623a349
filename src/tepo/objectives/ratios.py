"""Ratios: the new policy over the old one, and at which level. D = logp - old_logp; L_i = tokens of row i."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tepo.objectives.batch import TokenBatch, require


@dataclass(frozen=True, eq=False)
class RatioValue:
    """A ratio for every token, `[B, T]`, and its logarithm; both 1 and 0 outside the mask."""

    log: Tensor
    value: Tensor


class Ratio(Protocol):
    """A pure function of a clean batch to one ratio a token; log-ratios are clamped, gradient 0 beyond."""

    def __call__(self, batch: TokenBatch, clamp: float) -> RatioValue:
        """Return the ratio of every token."""
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
        mean = mean_log_ratio(batch).detach()
        own = torch.where(mean.abs() <= clamp, batch.logp - batch.logp.detach(), torch.zeros_like(batch.logp))
        return spread(mean.clamp(-clamp, clamp) + own, batch)


@dataclass(frozen=True)
class SequenceSumRatio:
    """exp(sum_t D_{i,t}): the likelihood ratio of the whole response; the clamp keeps long responses finite."""

    def __call__(self, batch: TokenBatch, clamp: float) -> RatioValue:
        """Return each row's product of token ratios at all its tokens."""
        return spread(log_ratio(batch).sum(dim=1, keepdim=True).clamp(-clamp, clamp), batch)
