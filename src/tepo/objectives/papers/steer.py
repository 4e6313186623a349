"""STEER: weigh tokens down by how much they change the entropy.

Hao et al., "Rethinking Entropy Interventions in RLVR: An Entropy Change Perspective", arXiv 2510.10150.

    J = (1/N) sum_i sum_t w_{i,t} P(r_{i,t}, A_i; low, high)
    Omega_{i,t} = (A_i / pi_old) pi (1 - pi) (log pi + H)          the token's change of entropy, up to the step size
    exponential  w = exp(-k |Omega|) within [weight_low, 1],  k = -ln(weight_low) / max(max |Omega|, 0.02)
    linear       w from weight_high at the smallest |Omega| to weight_low at the largest

Confirmed in the authors' code: both maps, 0.8 (exponential) and 1.2 to 0.8 (linear), clips 0.2/0.28, dual clip 10,
token mean. There the extremes are each micro-batch's; ours are the mini-batch's. Everything in w is detached, and
probabilities are kept 1e-8 away from 0 and 1 (in logarithms: in float32, 1 - (1 - 1e-8) would be 0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tepo.objectives.entropies import EntropyChangeWeights
from tepo.objectives.method import GroupMethod, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import TokenRatio
from tepo.objectives.reducers import TokenMean
from tepo.objectives.surrogates import PPOClip


@dataclass(frozen=True, kw_only=True)
class STEER(GroupMethod):
    """PPO whose tokens count less the more they change the entropy."""

    name = "steer"
    paper = Paper("Rethinking Entropy Interventions in RLVR: An Entropy Change Perspective", 2025, "2510.10150")
    formula = "J = 1/N Σᵢ Σₜ w(|Ωᵢₜ|)·min(rᵢₜAᵢ, clip(rᵢₜ)Aᵢ),  Ωᵢₜ = Aᵢ/π_old·π(1-π)(log π + H)"
    status = "confirmed"

    weight_map: Literal["exponential", "linear"] = setting(
        "exponential", "how weights fall with |Omega|", "the paper's (its code has both)"
    )
    weight_low: float = setting(0.8, "smallest weight", "the authors' code")
    weight_high: float = setting(1.2, "largest weight of the linear map", "the authors' code")
    clip_low: float = setting(0.2, "lower clip of the ratio", "the authors' scripts")
    clip_high: float = setting(0.28, "upper clip of the ratio", "the authors' scripts")
    clip_dual: float | None = setting(10.0, "dual clip for A < 0", "the authors' scripts")

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            advantage=self.normalized(),
            transforms=(EntropyChangeWeights(self.weight_map, self.weight_low, self.weight_high),),
            ratio=TokenRatio(),
            surrogate=PPOClip(self.clip_low, self.clip_high, self.clip_dual),
            reducer=TokenMean(),
        )
