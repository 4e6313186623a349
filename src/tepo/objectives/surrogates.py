"""Surrogates: what a step may gain. Each returns a loss (to minimise) for every token, and where it was clipped."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from tepo.core.errors import InputError
from tepo.objectives.batch import TokenBatch, require
from tepo.objectives.ratios import RatioValue


@dataclass(frozen=True, eq=False)
class SurrogateValue:
    """Token losses `[B, T]`, and bool `[B, T]` where the lower, upper or dual clip cut the gradient.

    `off_policy`: where the whole response was left out for having drifted too far.
    """

    loss: Tensor
    clip_low: Tensor | None = None
    clip_high: Tensor | None = None
    clip_dual: Tensor | None = None
    off_policy: Tensor | None = None


def by_sign(positive: Tensor, one: float, other: float, like: Tensor) -> Tensor:
    """Return `one` where positive, else `other`, in the dtype of `like`."""
    return torch.where(positive, torch.full_like(like, one), torch.full_like(like, other))


class Surrogate(Protocol):
    """A pure function of ratio, advantage `[B, T]` and log-probs to token losses."""

    @property
    def needs(self) -> frozenset[str]:
        """Fields of the token batch that this part reads, beside log-probs and advantages."""
        ...

    @property
    def scores(self) -> frozenset[str]:
        """Statistics that the scorer must produce for it."""
        ...

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
    needs: ClassVar[frozenset[str]] = frozenset()
    scores: ClassVar[frozenset[str]] = frozenset()
    scales_with_advantage: ClassVar[bool] = True

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

    needs: ClassVar[frozenset[str]] = frozenset()
    scores: ClassVar[frozenset[str]] = frozenset()
    scales_with_advantage: ClassVar[bool] = True
    fine: ClassVar[bool] = False

    def __call__(self, ratio: RatioValue, advantage: Tensor, batch: TokenBatch) -> SurrogateValue:
        """Return token losses."""
        return SurrogateValue(-advantage * batch.logp)


@dataclass(frozen=True)
class Unclipped:
    """-A r: importance-weighted policy gradient without a clip."""

    needs: ClassVar[frozenset[str]] = frozenset()
    scores: ClassVar[frozenset[str]] = frozenset()
    scales_with_advantage: ClassVar[bool] = True
    fine: ClassVar[bool] = False

    def __call__(self, ratio: RatioValue, advantage: Tensor, batch: TokenBatch) -> SurrogateValue:
        """Return token losses."""
        return SurrogateValue(-advantage * ratio.value)


@dataclass(frozen=True)
class Rejection:
    """-A r where low <= r <= high, else 0: outside the interval a token is not trusted, in either direction."""

    low: float
    high: float
    needs: ClassVar[frozenset[str]] = frozenset()
    scores: ClassVar[frozenset[str]] = frozenset()
    scales_with_advantage: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1 <= self.high:
            raise InputError(f"accept_low={self.low}, accept_high={self.high}: expected 0 <= low <= 1 <= high")

    @property
    def fine(self) -> bool:
        """Intervals finer than 1e-2 are within the noise between a sampler and a scorer."""
        return min(1 - self.low, self.high - 1) < 1e-2

    def __call__(self, ratio: RatioValue, advantage: Tensor, batch: TokenBatch) -> SurrogateValue:
        """Return token losses."""
        below, above = ratio.value < self.low, ratio.value > self.high
        loss = torch.where(below | above, torch.zeros_like(ratio.value), -advantage * ratio.value)
        return SurrogateValue(loss, below, above)


@dataclass(frozen=True)
class SoftGate:
    """-A (4/tau) sigmoid(tau (r - 1)), SAPO (arXiv 2511.20347): a clip without an edge.

    tau is `tau_positive` where A > 0, else `tau_negative`. At r = 1 the derivative by r is 1, so the gradient of the
    first update is PPO's; the value there is 2/tau.
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05
    needs: ClassVar[frozenset[str]] = frozenset()
    scores: ClassVar[frozenset[str]] = frozenset()
    scales_with_advantage: ClassVar[bool] = True
    fine: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not min(self.tau_positive, self.tau_negative) > 0:
            raise InputError(f"tau_positive={self.tau_positive}, tau_negative={self.tau_negative}: expected > 0")

    def __call__(self, ratio: RatioValue, advantage: Tensor, batch: TokenBatch) -> SurrogateValue:
        """Return token losses."""
        tau = by_sign(advantage > 0, self.tau_positive, self.tau_negative, like=ratio.value)
        return SurrogateValue(-advantage * torch.sigmoid(tau * (ratio.value - 1)) * 4 / tau)


@dataclass(frozen=True)
class QuadraticDrift:
    """-(A log pi - (beta/2) D^2), DRO (arXiv 2405.19107): a squared penalty on the log-ratio in place of a clip."""

    beta: float
    needs: ClassVar[frozenset[str]] = frozenset()
    scores: ClassVar[frozenset[str]] = frozenset()
    fine: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise InputError(f"beta={self.beta} of the squared log-ratio: expected a number > 0")

    def __call__(self, ratio: RatioValue, advantage: Tensor, batch: TokenBatch) -> SurrogateValue:
        """Return token losses."""
        return SurrogateValue(self.beta / 2 * ratio.log**2 - advantage * batch.logp)


@dataclass(frozen=True)
class OnPolicyRows:
    """Another surrogate, without the responses that drifted away where the advantage is negative (DeepSeek-V3.2).

    A token with A < 0 is left out where its response's mean of old_logp - logp exceeds `threshold` (nats a token);
    the denominator keeps it (arXiv 2512.02556; TRL: off_policy_mask_threshold). `target` "rollout" compares with
    the sampler's own log-probs.
    """

    surrogate: Surrogate
    threshold: float
    target: Literal["old", "rollout"] = "old"

    def __post_init__(self) -> None:
        if not self.threshold > 0:
            raise InputError(f"off_policy_mask={self.threshold}: expected a number of nats a token > 0, or None")

    @property
    def needs(self) -> frozenset[str]:
        """The surrogate's own, and the sampler's log-probs where they decide."""
        return self.surrogate.needs | ({"rollout_logp"} if self.target == "rollout" else set())

    @property
    def scores(self) -> frozenset[str]:
        """The surrogate's own."""
        return self.surrogate.scores

    @property
    def fine(self) -> bool:
        """The surrogate's own."""
        return self.surrogate.fine

    @property
    def scales_with_advantage(self) -> bool:
        """The surrogate's own."""
        return getattr(self.surrogate, "scales_with_advantage", False)

    def __call__(self, ratio: RatioValue, advantage: Tensor, batch: TokenBatch) -> SurrogateValue:
        """Return the surrogate's token losses, 0 on the responses left out."""
        value = self.surrogate(ratio, advantage, batch)
        field = "old_logp" if self.target == "old" else "rollout_logp"
        drift = require(batch, field, "off_policy_mask") - batch.logp.detach()
        mean = drift.sum(dim=1, keepdim=True) / batch.lengths().clamp_min(1)[:, None]
        dropped = (advantage < 0) & (mean > self.threshold)
        return dataclasses.replace(
            value, loss=torch.where(dropped, torch.zeros_like(value.loss), value.loss), off_policy=dropped
        )
