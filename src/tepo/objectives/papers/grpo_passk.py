"""GRPO for pass@k, k the group's size (Tang et al., arXiv 2503.19595, as verl's grpo_passk).

    A_i = (R_max - R_second) / (std + eps) for the best response of the group, 0 for all others

What counts is that one response of the group succeeds; the others' failures cost nothing, and where two succeed
neither was needed, so all advantages are 0. Confirmed: verl's estimator. The division by the standard deviation is
verl's default, not the paper's; the clipped surrogate around it is PPO's.
"""

from __future__ import annotations

from dataclasses import dataclass

from tepo.objectives.baselines import BestOfGroup
from tepo.objectives.method import GroupMethod, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import TokenRatio
from tepo.objectives.reducers import ReducerName, reducer_of
from tepo.objectives.surrogates import PPOClip


@dataclass(frozen=True, kw_only=True)
class GRPOPassK(GroupMethod):
    """Only the best response of a group learns, by how much it beats the second; PPO clip, token mean."""

    name = "grpo-passk"
    paper = Paper(
        "Optimizing Language Models for Inference Time Objectives using Reinforcement Learning", 2025, "2503.19595"
    )
    formula = "J = 1/N Σᵢ Σₜ min(rᵢₜAᵢ, clip(rᵢₜ, 1-ε₋, 1+ε₊)Aᵢ),  A_best = (R_max - R_second)/std, else 0"
    status = "confirmed"

    divide_by_std: bool = setting(True, "whether the group's standard deviation divides", "verl (paper: no)")
    clip_low: float = setting(0.2, "lower clip of the ratio", "verl: 0.2")
    clip_high: float = setting(0.2, "upper clip of the ratio", "verl: 0.2")
    clip_dual: float | None = setting(None, "dual clip for A < 0, which does not occur", "verl: 3")
    reducer: ReducerName = setting("token-mean", "who is averaged over whom", "verl: token-mean")

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            advantage=BestOfGroup(self.divide_by_std, self.advantage_eps),
            ratio=TokenRatio(),
            surrogate=PPOClip(self.clip_low, self.clip_high, self.clip_dual),
            reducer=reducer_of(self.reducer),
        )
