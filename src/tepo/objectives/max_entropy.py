"""Maximum-entropy parts: a bonus whose temperature keeps a target entropy, and the soft value of a group."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from tepo.core.errors import InputError
from tepo.objectives.advantages import GROUP_NEEDS, group_statistics, scored_groups
from tepo.objectives.batch import TokenBatch, group_index, require
from tepo.objectives.regularizers import State

# A temperature moves by at most e^20 at once, so that no entropy, however odd, overflows it.
LARGEST_STEP = 20.0


class Tuner(Protocol):
    """How a temperature follows the measured entropy."""

    def __call__(self, coef: Tensor, entropy: float) -> Tensor:
        """Return the next temperature, given the mean token entropy (nats) of the last update."""
        ...

    def applies(self, entropy: Tensor) -> Tensor:
        """Whether the bonus acts, given the entropy of the last update (infinite before the first): 0 or 1."""
        ...


@dataclass(frozen=True)
class DualAscent:
    """alpha <- alpha exp(-rate (H - target)): a step of log alpha down J = alpha (H - target) (arXiv 1812.05905).

    The exponent's sign alone decides where alpha goes, so it never leaves the positive numbers; it stays within
    [1e-8, `highest`].
    """

    target: float
    rate: float
    highest: float = 1.0

    def __post_init__(self) -> None:
        check_target(self.target, self.rate, self.highest)

    def __call__(self, coef: Tensor, entropy: float) -> Tensor:
        """Return the next temperature."""
        exponent = min(max(-self.rate * (entropy - self.target), -LARGEST_STEP), LARGEST_STEP)
        return (coef * math.exp(exponent)).clamp(1e-8, self.highest)

    def applies(self, entropy: Tensor) -> Tensor:
        """The bonus always acts."""
        return torch.ones_like(entropy)


@dataclass(frozen=True)
class Steps:
    """alpha goes up by `rate` while H <= target, down by it above, within [0, `highest`] (Skywork-OR1, TRL).

    The bonus acts only while the entropy of the last update was at or below the target.
    """

    target: float
    rate: float = 0.005
    highest: float = 1.0

    def __post_init__(self) -> None:
        check_target(self.target, self.rate, self.highest)

    def __call__(self, coef: Tensor, entropy: float) -> Tensor:
        """Return the next temperature."""
        return (coef + (self.rate if entropy <= self.target else -self.rate)).clamp(0.0, self.highest)

    def applies(self, entropy: Tensor) -> Tensor:
        """Return 1 at or below the target."""
        return (entropy <= self.target).to(entropy.dtype)


def check_target(target: float, rate: float, highest: float) -> None:
    """Raise `InputError` for a target or a rate that could not be meant."""
    if not (target >= 0 and rate >= 0 and highest > 0):
        raise InputError(
            f"target_entropy={target}, temperature_rate={rate}, temperature_max={highest}: "
            "expected nats >= 0, a number >= 0 and a number > 0"
        )


@dataclass(frozen=True)
class TemperedEntropy:
    """-alpha * mean entropy, alpha in the state and tuned after every optimizer step by the measured entropy.

    The entropy is that of the whole mini-batch (`entropy/new`). Needs the entropy's gradient from the scorer.
    """

    start: float
    tuner: Tuner
    name: str = "max_entropy"
    norm: Literal["all", "masked"] = "all"
    current: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({"entropy"})
    scores: ClassVar[frozenset[str]] = frozenset({"entropy", "entropy_grad"})

    def __post_init__(self) -> None:
        if not self.start >= 0:
            raise InputError(f"temperature={self.start}: expected a number >= 0")

    def values(self, batch: TokenBatch, clamp: float) -> Tensor:
        """Return -H of every token."""
        return -require(batch, "entropy", "the entropy bonus")

    def tokens(self, batch: TokenBatch) -> Tensor:
        """Return the mask itself."""
        return batch.mask

    def coefficient(self, state: State) -> Tensor | float:
        """Return the temperature in force."""
        return state["temperature"] * self.tuner.applies(state["last_entropy"])

    def init_state(self) -> dict[str, Tensor]:
        """Return the temperature, and the entropy it was last tuned by (none yet: infinite)."""
        return {"temperature": torch.tensor(float(self.start)), "last_entropy": torch.tensor(float("inf"))}

    def update(self, state: State, metrics: Mapping[str, float]) -> dict[str, Tensor]:
        """Follow the measured entropy; without a measurement nothing changes."""
        measured = metrics.get("entropy/new")
        if measured is None:
            return {}
        last = torch.full_like(state["last_entropy"], measured)
        return {"temperature": self.tuner(state["temperature"], measured), "last_entropy": last}


@dataclass(frozen=True)
class SoftBaseline:
    """A_i = R_i - V, V = tau log mean_j exp(R_j / tau): the soft value of the group (energy-based policies).

    tau -> infinity gives the mean, tau -> 0 the best reward. V is never below the mean, so more responses are
    pushed down than up. Equal rewards give exactly 0.
    """

    tau: float = 1.0
    needs: ClassVar[frozenset[str]] = GROUP_NEEDS

    def __post_init__(self) -> None:
        if not self.tau > 0:
            raise InputError(f"baseline_temperature={self.tau}: expected a number > 0")

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Return advantages `[B]`; a response without a reward (NaN) counts in no value and gets 0."""
        rewards, group = scored_groups(batch, "the advantage")
        stats = group_statistics(rewards, group)
        index, n = group_index(group)
        lowest = torch.full_like(stats.rewards, float("-inf"))
        held = torch.where(stats.scored, stats.rewards, lowest)
        best = lowest.new_full((n,), float("-inf")).scatter_reduce(0, index, held, "amax")[index]
        shifted = torch.where(stats.scored, stats.rewards - best, torch.zeros_like(best)) / self.tau
        terms = torch.where(stats.scored, shifted.exp(), torch.zeros_like(best))
        mean = terms.new_zeros(n).index_add(0, index, terms)[index] / stats.size.clamp_min(1)
        value = -self.tau * (mean.log() - shifted)  # R - best - tau log mean exp((R_j - best) / tau)
        return torch.where(stats.informative & stats.scored, value, torch.zeros_like(value))
