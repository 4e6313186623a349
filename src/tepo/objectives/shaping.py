"""Reward shaping: what a response is worth before it is compared with its group."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from tepo.core.errors import InputError
from tepo.objectives.advantages import combine
from tepo.objectives.batch import TokenBatch, require
from tepo.objectives.regularizers import AdaptiveCoefficient, State, Tuned


class Shaping(Protocol):
    """A pure function of a clean rollout batch to one with new `rewards` `[B]` or `token_rewards` `[B, T]`.

    `makes`: the fields that it makes without looking at them, so that the batch need not bring them.
    """

    @property
    def needs(self) -> frozenset[str]:
        """Fields of the token batch that this part reads."""
        ...

    @property
    def makes(self) -> frozenset[str]:
        """Fields of the token batch that this part makes."""
        ...

    def __call__(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with its rewards shaped."""
        ...


@runtime_checkable
class TunedShaping(Tuned, Shaping, Protocol):
    """A shaping that tunes something on the way."""

    def tuned(self, state: State) -> Shaping:
        """Return the shaping as the state has it."""
        ...


@dataclass(frozen=True)
class SequenceKLPenalty:
    """R_i <- R_i - coef * sum_t (old_logp - ref_logp): KL in the reward, as RLOO (arXiv 2402.14740) has it."""

    coef: float
    needs: ClassVar[frozenset[str]] = frozenset({"rewards", "old_logp", "ref_logp"})
    makes: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with rewards `[B]` less the k1 estimate of the sequence's KL to the reference."""
        owner = "KL in the reward"
        kl = (require(batch, "old_logp", owner) - require(batch, "ref_logp", owner)).detach().sum(dim=1)
        return batch.replace(rewards=combine(require(batch, "rewards", owner)) - self.coef * kl)


@dataclass(frozen=True)
class TokenKLPenalty:
    """r_t <- r_t - coef (old_logp_t - ref_logp_t): KL in the reward of every token (arXiv 2203.02155).

    The k1 estimate at the sampling policy, a constant of the updates; it may be negative on a token. `adaptive`
    steers the coefficient (state `kl_coef`) by the measured `kl/ref`, nats a token, after every optimizer step.
    """

    coef: float | Tensor
    adaptive: AdaptiveCoefficient | None = None
    needs: ClassVar[frozenset[str]] = frozenset({"rewards", "old_logp", "ref_logp"})
    makes: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with token rewards less the penalty."""
        owner = "KL in the reward"
        kl = (require(batch, "old_logp", owner) - require(batch, "ref_logp", owner)).detach()
        tokens = torch.zeros_like(kl) if batch.token_rewards is None else batch.token_rewards
        return batch.replace(token_rewards=tokens - self.coef * kl)

    def tuned(self, state: State) -> TokenKLPenalty:
        """Return the penalty with the coefficient in force."""
        return self if self.adaptive is None else dataclasses.replace(self, coef=state["kl_coef"].detach())

    def init_state(self) -> dict[str, Tensor]:
        """Return the coefficient, where it adapts."""
        return {} if self.adaptive is None else {"kl_coef": torch.as_tensor(float(self.coef))}

    def update(self, state: State, metrics: Mapping[str, float]) -> dict[str, Tensor]:
        """Adapt the coefficient to the measured KL."""
        if self.adaptive is None:
            return {}
        measured = metrics.get("kl/ref")
        return {"kl_coef": state["kl_coef"] if measured is None else self.adaptive(state["kl_coef"], measured)}


@dataclass(frozen=True)
class DistillationReward:
    """R_i <- R_i + coef (1/L_i) sum_t (other_logp - old_logp): what another policy thinks of the response.

    The mean log-ratio of a teacher and the sampling policy on the latter's own samples, whose expectation is minus
    their KL a token (on-policy distillation as a reward).
    """

    coef: float
    needs: ClassVar[frozenset[str]] = frozenset({"rewards", "old_logp", "other_logp"})
    makes: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with rewards `[B]` plus the teacher's view; an empty response gets none."""
        owner = "the distillation reward"
        gap = (require(batch, "other_logp", owner) - require(batch, "old_logp", owner)).detach().sum(dim=1)
        mean = gap / batch.lengths().clamp_min(1)
        return batch.replace(rewards=combine(require(batch, "rewards", owner)) + self.coef * mean)


@dataclass(frozen=True)
class Verified:
    """R_i <- value where the response is right (`correct`: a full score), else 0 (Tulu 3, arXiv 2411.15124 eq. 8).

    A response that no reward can score stays so.
    """

    value: float = 10.0
    needs: ClassVar[frozenset[str]] = frozenset({"rewards", "correct"})
    makes: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with rewards `value` or 0, `[B]`."""
        rewards = combine(require(batch, "rewards", "a verified reward"))
        right = require(batch, "correct", "a verified reward").bool()
        verdict = torch.where(right, torch.full_like(rewards, self.value), torch.zeros_like(rewards))
        return batch.replace(rewards=torch.where(torch.isnan(rewards), rewards, verdict))


@dataclass(frozen=True)
class MissingEOS:
    """What a response is worth that was cut at the length limit, so never ended.

    `replace`: R_i = value (open-instruct, Tulu 3: -10) · `add`: R_i + value (TRL's missing_eos_penalty, there > 0).
    A response that no reward can score stays so.
    """

    value: float = -10.0
    mode: Literal["replace", "add"] = "replace"
    needs: ClassVar[frozenset[str]] = frozenset({"rewards", "truncated"})
    makes: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        if self.value > 0:
            raise InputError(f"missing_eos={self.value}: expected a number <= 0; a cut response earns no bonus")

    def __call__(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with the rewards of cut responses changed, `[B]`."""
        rewards = combine(require(batch, "rewards", "the missing-EOS penalty"))
        cut = require(batch, "truncated", "the missing-EOS penalty").bool()
        cut_reward = torch.full_like(rewards, self.value) if self.mode == "replace" else rewards + self.value
        return batch.replace(rewards=torch.where(cut & ~torch.isnan(rewards), cut_reward, rewards))


@dataclass(frozen=True)
class ClippedReward:
    """R_i <- clip(R_i, -limit, limit): bounds what an unbounded reward model says (OpenRLHF: 10)."""

    limit: float
    needs: ClassVar[frozenset[str]] = frozenset({"rewards"})
    makes: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        if not self.limit > 0:
            raise InputError(f"reward_clip={self.limit}: expected a number > 0, or None for no clip")

    def __call__(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with rewards in [-limit, limit], `[B]`."""
        return batch.replace(rewards=combine(require(batch, "rewards", "reward_clip")).clamp(-self.limit, self.limit))


@dataclass(frozen=True)
class SoftOverlong:
    """R_i <- R_i - min(1, max(0, L_i - (max_length - cache)) / cache) * factor: DAPO's soft overlong punishment.

    Nothing up to `cache` tokens short of `max_length`, then in a straight line down to -factor at `max_length` and
    beyond (arXiv 2503.14476 eq. 13; verl's has no lower bound). L_i counts response tokens, EOS included.
    """

    max_length: int
    cache: int
    factor: float = 1.0
    needs: ClassVar[frozenset[str]] = frozenset({"rewards"})
    makes: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        if not 0 < self.cache <= self.max_length:
            raise InputError(
                f"overlong_length={self.max_length}, overlong_cache={self.cache}: expected 0 < cache <= length"
            )

    def __call__(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with rewards `[B]` less the punishment."""
        rewards = combine(require(batch, "rewards", "the overlong punishment"))
        over = (batch.lengths() - (self.max_length - self.cache)).clamp(0, self.cache)
        return batch.replace(rewards=rewards - self.factor * over.to(rewards.dtype) / self.cache)
