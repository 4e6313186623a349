"""Learning from the policy's own entropy: as the only reward (EM-RL), as the loss (EM-FT), or to share rewards out
(GTPO, GRPO-S)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tepo.core.errors import InputError
from tepo.objectives.advantages import combine
from tepo.objectives.batch import TokenBatch, group_index, require
from tepo.objectives.choice import places
from tepo.objectives.entropies import standardized
from tepo.objectives.ratios import RatioValue
from tepo.objectives.surrogates import SurrogateValue

# A bonus by 1 / H would be infinite where the policy did not hesitate at all.
ENTROPY_FLOOR = 1e-8


@dataclass(frozen=True)
class ConfidenceReward:
    """The only reward is confidence, by the sampling policy: R_i = sum_t log pi(o_t), or -sum_t H_t (EM-RL).

    `sequence` estimates the negative entropy over whole responses, `token` that of every step (arXiv 2505.15134,
    eq. 3 and 4). Rewards that the batch brings are not looked at.
    """

    kind: Literal["sequence", "token"]
    makes: ClassVar[frozenset[str]] = frozenset({"rewards"})

    @property
    def needs(self) -> frozenset[str]:
        """Old log-probs or old entropies."""
        return frozenset({"old_logp"} if self.kind == "sequence" else {"entropy", "old_entropy"})

    def __call__(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with its own rewards `[B]`; a response without tokens has none (NaN)."""
        field, sign = ("old_logp", 1) if self.kind == "sequence" else ("old_entropy", -1)
        total = sign * require(batch, field, "the confidence reward").detach().sum(dim=1)
        nothing = torch.full_like(total, float("nan"))
        return batch.replace(rewards=torch.where(batch.lengths() > 0, total, nothing))


def classes(batch: TokenBatch, owner: str) -> tuple[Tensor, Tensor, int]:
    """Return (scored `[B]`, cell of each row `[B]`, number of cells): two cells a group, wrong and right responses.

    A response that its reward cannot score (NaN) or without tokens is in neither.
    """
    correct = require(batch, "correct", owner).bool()
    index, n = group_index(require(batch, "group", owner))
    scored = batch.lengths() > 0
    if batch.rewards is not None:
        scored = scored & ~torch.isnan(combine(batch.rewards))
    return scored, index * 2 + correct.long(), 2 * n


@dataclass(frozen=True)
class EntropySharedRewards:
    """Rewards that share a bonus out by entropy among the right, and a malus among the wrong responses of a group.

    `token` (GTPO): r_{i,t} = base + bonus d_t H_{i,t} / sum_k H_{k,t} over the right responses that reach place t,
    d_t in number; wrong ones get -base - bonus h_t (1/H_{i,t}) / sum_k (1/H_{k,t}). At every place the bonus sums to
    d_t times `bonus`, however it is shared. `sequence` (GRPO-S): the same with the response's mean entropy, over the
    whole group. Entropies are the sampling policy's, and at least `ENTROPY_FLOOR`.
    """

    level: Literal["token", "sequence"]
    base: float
    bonus: float
    needs: ClassVar[frozenset[str]] = frozenset({"correct", "group", "entropy", "old_entropy"})

    def __post_init__(self) -> None:
        if self.base < 0 or self.bonus < 0:
            raise InputError(f"reward_base={self.base}, reward_bonus={self.bonus}: expected numbers >= 0")

    @property
    def makes(self) -> frozenset[str]:
        """Rewards of tokens or of responses."""
        return frozenset({"token_rewards"} if self.level == "token" else {"rewards"})

    def __call__(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with `token_rewards` `[B, T]` or `rewards` `[B]`."""
        owner = "the entropy-shared reward"
        scored, cell, n = classes(batch, owner)
        entropy = require(batch, "old_entropy", owner).detach()
        right = require(batch, "correct", owner).bool()
        taking = batch.mask & scored[:, None]
        if self.level == "sequence":
            mean = entropy.sum(dim=1) / batch.lengths().clamp_min(1)
            value = self._shared(mean[:, None], right[:, None], scored[:, None], cell[:, None], n)[:, 0]
            return batch.replace(rewards=torch.where(scored, value, torch.full_like(value, float("nan"))))
        width = batch.mask.shape[1]
        place = cell[:, None] * width + places(batch.mask).clamp_min(0)
        value = self._shared(entropy, right[:, None].expand_as(taking), taking, place, n * width)
        return batch.replace(token_rewards=value)

    def _shared(self, entropy: Tensor, right: Tensor, taking: Tensor, cell: Tensor, n: int) -> Tensor:
        """Return the reward of everything that takes part, 0 elsewhere; a bonus is shared inside its cell."""
        floored = entropy.clamp_min(ENTROPY_FLOOR)
        claim = torch.where(taking, torch.where(right, floored, 1 / floored), torch.zeros_like(floored))
        count = _cell_sum(taking.to(claim.dtype), cell, n)
        total = _cell_sum(claim, cell, n)
        part = count * claim / torch.where(taking, total, torch.ones_like(total))
        size = self.base + self.bonus * part
        return torch.where(taking, torch.where(right, size, -size), torch.zeros_like(size))


def _cell_sum(values: Tensor, cell: Tensor, n: int) -> Tensor:
    flat = cell.flatten()
    return values.new_zeros(n).index_add(0, flat, values.flatten())[flat].view_as(values)


@dataclass(frozen=True)
class ClassNormalized:
    """(r - mean) / deviation over the right responses of the group, and apart from them over the wrong ones.

    `token`: over all their tokens and token rewards; `sequence`: over the responses. Equal rewards give 0: class by
    class, right and wrong are not compared, and a constant or a factor common to a class drops out. `over` "group"
    compares all of the group's. The deviation is the population's.
    """

    level: Literal["token", "sequence"]
    over: Literal["class", "group"] = "class"

    @property
    def needs(self) -> frozenset[str]:
        """The rewards, and what tells the classes apart."""
        return frozenset({"correct", "group"} | ({"token_rewards"} if self.level == "token" else {"rewards"}))

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Return advantages `[B, T]` or `[B]`."""
        owner = "the class-wise advantage"
        scored, cell, n = classes(batch, owner)
        cell = cell // 2 if self.over == "group" else cell
        if self.level == "token":
            taking = batch.mask & scored[:, None]
            return standardized(require(batch, "token_rewards", owner), taking, cell[:, None].expand_as(taking), n)
        rewards = combine(require(batch, "rewards", owner)).nan_to_num()
        return standardized(rewards[:, None], scored[:, None], cell[:, None], n)[:, 0]


@dataclass(frozen=True)
class NoAdvantage:
    """A = 0: there is no reward to compare (EM-FT)."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Return zeros `[B]`."""
        return batch.logp.new_zeros(len(batch.logp))


@dataclass(frozen=True)
class TokenEntropy:
    """H itself is the loss of a token, differentiated directly; ratio and advantage have no part in it (EM-FT)."""

    fine: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({"entropy"})
    scores: ClassVar[frozenset[str]] = frozenset({"entropy", "entropy_grad"})

    def __call__(self, ratio: RatioValue, advantage: Tensor, batch: TokenBatch) -> SurrogateValue:
        """Return the entropies."""
        return SurrogateValue(require(batch, "entropy", "the entropy loss"))
