"""GTPO and GRPO-S: rewards shared out by the policy's entropy.

Tan et al., "GTPO and GRPO-S: Token and Sequence-Level Reward Shaping with Policy Entropy", arXiv 2508.04349.

    O+ right, O- wrong responses of a group; d_t, h_t how many of them reach place t
    GTPO    r_{i,t} =  a1 + a2 d_t H_{i,t} / sum_{O+} H_{k,t}                          for o_i in O+
            r_{i,t} = -a1 - a2 h_t (1/H_{i,t}) / sum_{O-} (1/H_{k,t})                  for o_i in O-
            A = (r - mean) / std over the tokens of O+, and apart over those of O-
            J = (1/N) sum_i sum_t P(r_{i,t}(theta), A_{i,t}; low, high)
    GRPO-S  the same with mean entropies, per response; ratio (1/L_i) sum_t r_{i,t}; mean over responses

Confirmed by readings of the paper: the formulas, 1 and 0.1 for base and bonus, clips 0.2/0.28. Inferred: r_i = 1 for
right responses (`correct` tells them), classes inside the group, the population's deviation, entropies of the
sampling policy. 1/H is bounded by an entropy of at least 1e-8. Normalising class by class removes what tells right
from wrong: a1 drops out and a2 > 0 with it, right responses push as many tokens down as up, and with a2 = 0 nothing
is left. `normalize="group"` compares all of the group's tokens instead, so that both count.
Not the GTPO of Simoni et al. (arXiv 2508.03772).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tepo.objectives.entropy_rewards import ClassNormalized, EntropySharedRewards
from tepo.objectives.method import Method, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import HolderRatio, TokenRatio
from tepo.objectives.reducers import SequenceMean, TokenMean
from tepo.objectives.surrogates import PPOClip

PAPER = Paper(
    "GTPO and GRPO-S: Token and Sequence-Level Reward Shaping with Policy Entropy", 2025, "2508.04349", "ICML 2026"
)


@dataclass(frozen=True, kw_only=True)
class GTPO(Method):
    """Token rewards shared out by entropy, normalised apart for right and wrong responses."""

    name = "gtpo"
    paper = PAPER
    formula = "J = 1/N Σᵢ Σₜ min(ρᵢₜAᵢₜ, clip(ρᵢₜ)Aᵢₜ),  rᵢₜ = ±(a₁ + a₂·dₜ·Hᵢₜ^±¹/Σₖ Hₖₜ^±¹),  A = (r - mean)/std"
    status = "inferred"
    notes = "Class-wise normalisation is the paper's; it leaves only the differences that entropy makes."

    reward_base: float = setting(1.0, "a1: reward of a right response, minus that of a wrong one", "paper: 1")
    reward_bonus: float = setting(0.1, "a2: size of the share by entropy", "paper: 0.1")
    normalize: Literal["class", "group"] = setting(
        "class", "normalise right and wrong apart, where base and bonus drop out, or the group together", "paper"
    )
    clip_low: float = setting(0.2, "lower clip of the ratio", "paper: 0.2")
    clip_high: float = setting(0.28, "upper clip of the ratio", "paper: 0.28")
    clip_dual: float | None = setting(None, "dual clip for A < 0", "paper: none")

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            shaping=(self.rewards("token"),),
            advantage=ClassNormalized("token", self.normalize),
            ratio=TokenRatio(),
            surrogate=PPOClip(self.clip_low, self.clip_high, self.clip_dual),
            reducer=TokenMean(),
        )

    def rewards(self, level: Literal["token", "sequence"]) -> EntropySharedRewards:
        """Return the rewards; a base that drops out is left out, for the digits that it would cost."""
        base = self.reward_base if self.normalize == "group" else 0.0
        return EntropySharedRewards(level, base, self.reward_bonus)


@dataclass(frozen=True, kw_only=True)
class GRPOS(GTPO):
    """Response rewards shared out by mean entropy, with the arithmetic mean of the token ratios."""

    name = "grpo-s"
    formula = "J = 1/G Σᵢ min(ρᵢAᵢ, clip(ρᵢ)Aᵢ),  ρᵢ = 1/Lᵢ Σₜ ρᵢₜ,  rᵢ = ±(b₁ + b₂·n·H̄ᵢ^±¹/Σₖ H̄ₖ^±¹)"

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            shaping=(self.rewards("sequence"),),
            advantage=ClassNormalized("sequence", self.normalize),
            ratio=HolderRatio(p=1.0),
            surrogate=PPOClip(self.clip_low, self.clip_high, self.clip_dual),
            reducer=SequenceMean(),
        )
