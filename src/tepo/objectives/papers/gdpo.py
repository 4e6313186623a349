"""GDPO: group reward-decoupled normalisation (arXiv 2601.05242), for several rewards a response.

    A_i = whiten( sum_k w_k (R_{i,k} - mean_g R_k) / std_g R_k ),  then GRPO's clipped surrogate

Rewards are [B, K]; each is compared with its group by itself, so that no reward drowns another: summing first, the
pairs (1, 0) and (0, 1) of (correct, well formed) would look alike. NaN: reward k cannot score this response, which
then has no say in k and gets nothing from k. Confirmed in TRL (`multi_objective_aggregation="normalize_then_sum"`)
and verl (`gdpo`), which whiten differently: TRL over responses, verl over tokens. With one reward [B] and
whiten="none" this is GRPO.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tepo.objectives.method import GroupMethod, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import TokenRatio
from tepo.objectives.reducers import ReducerName, reducer_of
from tepo.objectives.several_rewards import PerReward
from tepo.objectives.surrogates import PPOClip
from tepo.objectives.transforms import Whitened


@dataclass(frozen=True, kw_only=True)
class GDPO(GroupMethod):
    """Each reward normalised within its group, weighted, summed and whitened; PPO clip."""

    name = "gdpo"
    paper = Paper(
        "GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL Optimization",
        2026,
        "2601.05242",
    )
    formula = "Aᵢ = whiten(Σₖ wₖ(Rᵢₖ - meanₖ)/stdₖ),  J = reduce( min(rᵢₜAᵢ, clip(rᵢₜ, 1-ε₋, 1+ε₊)Aᵢ) )"
    status = "confirmed"

    reward_weights: tuple[float, ...] | None = setting(
        None, "w, one number a reward; none: 1 each", "TRL, verl: 1", lowest=-math.inf
    )
    whiten: Literal["responses", "tokens", "none"] = setting(
        "responses", "over what the sum is whitened within the rollout batch", "paper, TRL: responses (verl: tokens)"
    )
    clip_low: float = setting(0.2, "lower clip of the ratio", "GRPO's")
    clip_high: float = setting(0.2, "upper clip of the ratio", "GRPO's")
    clip_dual: float | None = setting(None, "dual clip for A < 0", "paper: none (verl: 3)")
    reducer: ReducerName = setting("sequence-mean", "who is averaged over whom", "GRPO's (verl: token-mean)")
    empty_rows: Literal["skip", "count"] = setting(
        "skip", "whether a response without tokens counts in a mean over responses", "verl: skip (TRL: count)"
    )

    def compose(self) -> Objective:
        """Return the composition."""
        weights = None if self.reward_weights is None else tuple(float(weight) for weight in self.reward_weights)
        over_responses: Literal["responses", "none"] = "responses" if self.whiten == "responses" else "none"
        return self.composition(
            advantage=PerReward(self.normalized(), weights, over_responses),
            transforms=(Whitened(),) if self.whiten == "tokens" else (),
            ratio=TokenRatio(),
            surrogate=PPOClip(self.clip_low, self.clip_high, self.clip_dual),
            reducer=reducer_of(self.reducer, empty_rows=self.empty_rows),
        )
