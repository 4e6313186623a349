"""PPO's clipped surrogate without a critic (Schulman et al., arXiv 1707.06347, eq. 7), for any advantage.

    J = reduce( min(r_{i,t} A_{i,t}, clip(r_{i,t}, 1-low, 1+high) A_{i,t}) ),  r = pi/pi_old

The bench on which one part at a time is exchanged: four advantages from rewards (or any given one, [B] or [B, T],
as `advantage=` of the token batch) times three reducers. batch-scaled with the token mean is Lite PPO (arXiv
2508.08221); normalized with the token mean and clip_high=0.28 is DAPO; centred with sequence-sum is Dr.GRPO.
Confirmed: the surrogate and its clip of 0.2. Inferred: everything around it, which the paper takes from a critic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tepo.objectives.advantages import Advantage, GroupNormalized, LeaveOneOut
from tepo.objectives.method import GroupMethod, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import TokenRatio
from tepo.objectives.reducers import ReducerName, reducer_of
from tepo.objectives.surrogates import PPOClip


@dataclass(frozen=True, kw_only=True)
class PPOClipped(GroupMethod):
    """Token ratio with PPO's clip, any advantage, any reducer, no critic."""

    name = "ppo-clip"
    paper = Paper("Proximal Policy Optimization Algorithms", 2017, "1707.06347")
    formula = "J = reduce( min(rᵢₜAᵢₜ, clip(rᵢₜ, 1-ε₋, 1+ε₊)Aᵢₜ) )"
    status = "confirmed"
    notes = "Without a critic: the advantage comes from the group, or with the batch."

    advantage: Literal["normalized", "batch-scaled", "centred", "leave-one-out"] = setting(
        "normalized",
        "(R - mean)/std of the group; /std of the batch; R - mean; R - mean of the others",
        "GRPO's; the paper has a critic",
        "inferred",
    )
    clip_low: float = setting(0.2, "lower clip of the ratio", "section 6.1")
    clip_high: float = setting(0.2, "upper clip of the ratio", "section 6.1")
    clip_dual: float | None = setting(None, "dual clip for A < 0", "paper: none (verl: 3)")
    reducer: ReducerName = setting("token-mean", "who is averaged over whom", "verl's default")
    scope: Literal["mini", "group"] = setting(
        "mini", "whose tokens divide, with the token mean: the mini-batch's or each group's", "verl, TRL: mini"
    )
    max_length: int = setting(
        1, "constant that divides with sequence-sum, e.g. the longest response", "ours: none", lowest=1
    )
    empty_rows: Literal["skip", "count"] = setting(
        "skip", "whether a response without tokens counts in a mean over responses", "verl: skip (TRL: count)"
    )

    def compose(self) -> Objective:
        """Return the composition."""
        advantages: dict[str, Advantage] = {
            "normalized": self.normalized(),
            "batch-scaled": GroupNormalized("batch", eps=self.advantage_eps),
            "centred": GroupNormalized("none"),
            "leave-one-out": LeaveOneOut(),
        }
        return self.composition(
            advantage=advantages[self.advantage],
            ratio=TokenRatio(),
            surrogate=PPOClip(self.clip_low, self.clip_high, self.clip_dual),
            reducer=reducer_of(self.reducer, scope=self.scope, constant=self.max_length, empty_rows=self.empty_rows),
        )
