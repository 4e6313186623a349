"""verl's own functions put together as its trainer and `ppo_loss` do, from the rewards of a token batch to the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from random_batches import Result, differentiate, leaf
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

from tepo.objectives import TokenBatch

# verl's aggregation modes beside token-mean.
MEAN = "seq-mean-token-mean"
SUM = "seq-mean-token-sum"
NORM = "seq-mean-token-sum-norm"


@dataclass(frozen=True)
class Verl:
    """How verl is asked for a method, from rewards to loss."""

    loss: str = "vanilla"
    mode: str = "token-mean"
    estimator: str = "grpo"
    by_std: bool = True
    clip: tuple[float, float, float] = (0.2, 0.2, 3.0)  # low, high, dual
    scale: int | None = None  # of seq-mean-token-sum-norm
    kl: tuple[float, str] | None = None  # coefficient and kind of a KL to the reference in the loss
    reward_kl: float = 0.0  # coefficient of a KL in the reward
    masked_kl: tuple[float, str] | None = None  # KL to the old policy on TEPO's tokens, composed here
    entropy: float = 0.0
    weights: tuple[str, str | float] | None = None  # level and threshold of rollout weights
    gamma: float = 1.0  # of token returns
    policy_loss: Mapping[str, float] = field(default_factory=dict)  # fields of verl's PolicyLossConfig

    def config(self) -> ActorConfig:
        low, high, dual = self.clip
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=2,
            ppo_micro_batch_size_per_gpu=1,
            clip_ratio_low=low,
            clip_ratio_high=high,
            clip_ratio_c=dual,
            policy_loss=PolicyLossConfig(**self.policy_loss),  # type: ignore[arg-type]
        )
        config.global_batch_info["loss_scale_factor"] = self.scale
        return config

    def advantages(self, batch: TokenBatch) -> Tensor:
        """Return verl's advantages [B, T]; the reward sits on the last token, the KL penalty on each token.

        A response without tokens has its reward on the last position, where the group's statistics see it.
        """
        assert batch.rewards is not None
        assert batch.group is not None
        rewards = torch.zeros_like(batch.logp)
        last = (batch.mask * torch.arange(1, batch.mask.shape[1] + 1)).amax(dim=1) - 1
        rewards[torch.arange(len(last)), last] = batch.rewards
        if self.reward_kl:
            rewards = (
                rewards - self.reward_kl * core_algos.kl_penalty(batch.old_logp, batch.ref_logp, "kl") * batch.mask
            )
        estimator = core_algos.get_adv_estimator_fn(self.estimator)
        named: dict[str, Any] = {"norm_adv_by_std_in_grpo": self.by_std} if self.estimator.startswith("grpo") else {}
        if self.estimator in ("grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
            named = {"config": AlgoConfig(gamma=self.gamma, norm_adv_by_std_in_grpo=self.by_std)}
        return estimator(
            token_level_rewards=rewards, response_mask=batch.mask.long(), index=batch.group.numpy(), **named
        )[0]

    def aggregate(self, values: Tensor, batch: TokenBatch) -> Tensor:
        return core_algos.agg_loss(values, batch.mask, self.mode, loss_scale_factor=self.scale)

    def result(self, batch: TokenBatch) -> Result:
        """Return the loss, gradients and metrics of the batch."""
        logp, entropy = leaf(batch.logp), leaf(batch.entropy)
        advantages = self.advantages(batch)
        policy_loss = (
            core_algos.compute_policy_loss_reinforce
            if self.loss == "reinforce"
            else core_algos.get_policy_loss_fn(self.loss)
        )
        weights = None
        if self.weights is not None:
            level, threshold = self.weights
            mismatch = batch.old_logp - batch.rollout_logp
            weights, _ = compute_rollout_correction_weights(mismatch, batch.mask, level, threshold)
        old = batch.old_logp if batch.old_logp is not None else logp.detach()
        loss, metrics = policy_loss(
            old, logp, advantages, batch.mask, self.mode, config=self.config(), rollout_is_weights=weights
        )
        if self.kl is not None:
            coefficient, kind = self.kl
            loss = loss + coefficient * self.aggregate(core_algos.kl_penalty(logp, batch.ref_logp, kind), batch)
        if self.masked_kl is not None:
            coefficient, kind = self.masked_kl
            falling = (batch.entropy < batch.old_entropy - 1e-3) & (advantages > 0)
            loss = loss + coefficient * self.aggregate(core_algos.kl_penalty(logp, old, kind) * falling, batch)
        if self.entropy:
            loss = loss - self.entropy * self.aggregate(entropy, batch)
        return differentiate(loss, logp, entropy, metrics)
