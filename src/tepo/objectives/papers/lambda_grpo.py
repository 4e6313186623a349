"""lambda-GRPO: how much long responses count is learned.

Wang et al., "lambda-GRPO: Unifying the GRPO Frameworks with Learnable Token Preferences", arXiv 2510.06870.

    J = (1 / sum_i L_i) sum_i f_i sum_t P(r_{i,t}, A_i; low, high)
    f_i = G softmax_i(h^lambda),  h_i = 1 + rho z_i,  z_i = (L_i - mean) / std over the group

Confirmed in a public re-implementation: the weights, rho 1/9, lambda from 0 with a learning rate of its own (0.1
there; ours is `optim.state_lr`). lambda = 0 is DAPO, lambda < 0 leans to GRPO, lambda > 0 to long responses. Inferred:
the population's deviation. h is kept at 1e-6 or more. With nothing against it, a learned lambda goes wherever the
loss falls, which may be no better policy: watch `state/lambda`. Not the lambda-GRPO of arXiv 2509.21154, nor
GRPO-lambda (arXiv 2510.00194).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tepo.objectives.method import GroupMethod, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import TokenRatio
from tepo.objectives.reducers import TokenMean
from tepo.objectives.row_weights import LengthPreference
from tepo.objectives.surrogates import PPOClip


@dataclass(frozen=True, kw_only=True)
class LambdaGRPO(GroupMethod):
    """DAPO whose responses are weighted by a learned preference for length."""

    name = "lambda-grpo"
    paper = Paper("λ-GRPO: Unifying the GRPO Frameworks with Learnable Token Preferences", 2025, "2510.06870")
    formula = "J = 1/Σᵢ Lᵢ Σᵢ fᵢ Σₜ min(rᵢₜAᵢ, clip(rᵢₜ)Aᵢ),  fᵢ = G·softmax((1 + ρzᵢ)^λ)"
    status = "inferred"

    length_preference: float = setting(
        0.0, "lambda, or where it starts", "paper, by a re-implementation: 0", lowest=-math.inf
    )
    learn: bool = setting(True, "learn lambda with the policy; false keeps it", "paper")
    length_scale: float = setting(1 / 9, "rho: how far lengths move the weights", "paper, by a re-implementation: 1/9")
    clip_low: float = setting(0.2, "lower clip of the ratio", "DAPO", "inferred")
    clip_high: float = setting(0.28, "upper clip of the ratio", "DAPO", "inferred")
    clip_dual: float | None = setting(None, "dual clip for A < 0", "DAPO", "inferred")

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            advantage=self.normalized(),
            ratio=TokenRatio(),
            surrogate=PPOClip(self.clip_low, self.clip_high, self.clip_dual),
            row_weight=LengthPreference(self.length_preference, self.length_scale),
            reducer=TokenMean(),
            learnable=("lambda",) if self.learn else (),
        )
