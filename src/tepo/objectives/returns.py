"""Returns: what is still to come from a token on, and how much better that is than a critic expected.

Positions outside the mask (padding, tool output) are no steps: the scan carries its values across them, so a gap
neither discounts nor breaks the chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tepo.core.errors import InputError
from tepo.objectives.advantages import combine
from tepo.objectives.batch import TokenBatch, require


def reward_of_tokens(batch: TokenBatch, owner: str) -> Tensor:
    """Return the reward of every token, `[B, T]`: `token_rewards` where there are any, and the response's own reward
    on its last token. A response that no reward can score (NaN) has none at all."""
    rewards = combine(require(batch, "rewards", owner))
    scored = ~torch.isnan(rewards)
    tokens = torch.zeros_like(batch.logp) if batch.token_rewards is None else batch.token_rewards
    last = batch.mask & (batch.mask.flip(1).cumsum(1).flip(1) == 1)
    terminal = torch.where(scored, rewards, torch.zeros_like(rewards)).to(tokens.dtype)[:, None]
    return torch.where(scored[:, None], tokens + torch.where(last, terminal, torch.zeros_like(tokens)), 0.0).detach()


def generalized_advantages(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> Tensor:
    """A_t = d_t + gamma lam A_{t'}, d_t = r_t + gamma V_{t'} - V_t, t' the next response token; `[B, T]`.

    After the last token there is nothing: V = A = 0 (arXiv 1506.02438, eq. 16). With V = 0 and lam = 1 these are
    the discounted returns.
    """
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0]) if rewards.shape[1] else rewards.new_zeros(0)
    for t in range(rewards.shape[1] - 1, -1, -1):
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * next_advantage
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(mask[:, t], advantage, torch.zeros_like(advantage))
    return advantages


def check_rate(name: str, value: float) -> None:
    """Raise `InputError` for a discount that is not within [0, 1]."""
    if not 0 <= value <= 1:
        raise InputError(f"{name}={value}: expected a number from 0 to 1")


@dataclass(frozen=True)
class TokenReturns:
    """A_t = r_t + gamma A_{t'}: what a response still earns from each token on, without a baseline (REINFORCE++)."""

    gamma: float = 1.0
    needs: ClassVar[frozenset[str]] = frozenset({"rewards"})

    def __post_init__(self) -> None:
        check_rate("gamma", self.gamma)

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Return advantages `[B, T]`."""
        rewards = reward_of_tokens(batch, "the return")
        return generalized_advantages(rewards, torch.zeros_like(rewards), batch.mask, gamma=self.gamma, lam=1.0)


@dataclass(frozen=True)
class GAE:
    """Generalised advantage estimation against a critic's values (arXiv 1506.02438).

    `old_values` are the critic's values of the state before each token, from before the updates. A response without
    a reward has advantage 0. `Objective.prepare` adds the values back to get the critic's targets, before any
    whitening.
    """

    gamma: float = 1.0
    lam: float = 0.95
    needs: ClassVar[frozenset[str]] = frozenset({"rewards", "old_values"})

    def __post_init__(self) -> None:
        check_rate("gamma", self.gamma)
        check_rate("lam", self.lam)

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Return advantages `[B, T]`."""
        values = require(batch, "old_values", "GAE").detach()
        rewards = reward_of_tokens(batch, "GAE").to(values.dtype)
        advantages = generalized_advantages(rewards, values, batch.mask, gamma=self.gamma, lam=self.lam)
        scored = ~torch.isnan(combine(require(batch, "rewards", "GAE")))
        return torch.where(scored[:, None], advantages, torch.zeros_like(advantages))
