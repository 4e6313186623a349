"""Dr.GRPO: GRPO done right, without its length and difficulty biases (Liu et al., arXiv 2503.20783).

    J = (1/G) sum_i (1/K) sum_t min(r_{i,t} A_i, clip(r_{i,t}, 1-eps, 1+eps) A_i),  A_i = R_i - mean_g

K is a constant, the generation budget; no division by the standard deviation or by L_i. Confirmed in the
authors' code. verl's default K is the padded width, which makes the loss depend on padding; ours is a number.
"""

from __future__ import annotations

from dataclasses import dataclass

from tepo.objectives.advantages import GroupNormalized
from tepo.objectives.method import Method, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import TokenRatio
from tepo.objectives.reducers import SequenceSum
from tepo.objectives.surrogates import PPOClip


@dataclass(frozen=True, kw_only=True)
class DrGRPO(Method):
    """Centred advantage, token ratio, sequence sum over a constant."""

    name = "dr-grpo"
    paper = Paper("Understanding R1-Zero-Like Training: A Critical Perspective", 2025, "2503.20783")
    formula = "J = 1/G Σᵢ 1/K Σₜ min(rᵢₜAᵢ, clip(rᵢₜ, 1-ε, 1+ε)Aᵢ),  Aᵢ = Rᵢ - mean"
    status = "confirmed"

    clip_low: float = setting(0.2, "lower clip of the ratio", "authors' code")
    clip_high: float = setting(0.2, "upper clip of the ratio", "authors' code")
    clip_dual: float | None = setting(None, "dual clip for A < 0", "authors' code: none")
    max_length: int = setting(
        3000,
        "the constant K: the longest response allowed (the trainer sets sampling.max_tokens)",
        "authors' code",
        lowest=1,
    )

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            advantage=GroupNormalized(scale="none"),
            ratio=TokenRatio(),
            surrogate=PPOClip(self.clip_low, self.clip_high, self.clip_dual),
            reducer=SequenceSum(self.max_length),
        )
