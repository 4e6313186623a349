"""GRPO: group relative policy optimisation (Shao et al., DeepSeekMath, arXiv 2402.03300, eq. 3 and 4).

    J = (1/G) sum_i (1/L_i) sum_t [ min(r_{i,t} A_i, clip(r_{i,t}, 1-eps, 1+eps) A_i) - beta k3(pi || pi_ref) ]
    A_i = (R_i - mean_g) / std_g

Confirmed: the formula (restated as DAPO's eq. 4-6). Known pitfalls: 1/L_i favours short right answers and 1/std
favours extreme groups (see Dr.GRPO); k3 as a loss is a biased gradient of the KL off-policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tepo.objectives.method import GroupMethod, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import TokenRatio
from tepo.objectives.reducers import SequenceMean
from tepo.objectives.regularizers import KL, AdaptiveCoefficient, Estimator, Regularizer
from tepo.objectives.surrogates import PPOClip


@dataclass(frozen=True, kw_only=True)
class GRPO(GroupMethod):
    """Group-normalised advantage, token ratio, sequence mean, KL to the reference in the loss."""

    name = "grpo"
    paper = Paper(
        "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
        2024,
        "2402.03300",
    )
    formula = "J = 1/G Σᵢ 1/Lᵢ Σₜ [ min(rᵢₜAᵢ, clip(rᵢₜ, 1-ε, 1+ε)Aᵢ) - β·KL(π‖π_ref)ᵢₜ ],  Aᵢ = (Rᵢ - mean)/std"
    status = "confirmed"

    clip_low: float = setting(0.2, "lower clip of the ratio", "TRL and verl: 0.2")
    clip_high: float = setting(0.2, "upper clip of the ratio", "TRL and verl: 0.2")
    clip_dual: float | None = setting(None, "dual clip for A < 0", "paper: none (verl: 3)")
    kl_coef: float = setting(
        0.04, "coefficient of the KL to the reference; 0 removes it", "DeepSeekMath, from memory", "inferred"
    )
    kl_estimator: Estimator = setting("k3", "estimator of the KL", "eq. 4")
    kl_adapt_to: float | None = setting(None, "tune kl_coef so that the KL stays near this", "ours: fixed")
    empty_rows: Literal["skip", "count"] = setting(
        "skip", "whether a response without tokens counts in the mean", "verl: skip (TRL: count)"
    )

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            advantage=self.normalized(),
            ratio=TokenRatio(),
            surrogate=PPOClip(self.clip_low, self.clip_high, self.clip_dual),
            reducer=SequenceMean(self.empty_rows),
        )

    def regularizers(self) -> tuple[Regularizer, ...]:
        """Return the KL to the reference and the shared terms."""
        if self.kl_coef == 0:
            return super().regularizers()
        adaptive = None if self.kl_adapt_to is None else AdaptiveCoefficient(self.kl_adapt_to)
        kl = KL(self.kl_coef, "reference", self.kl_estimator, adaptive=adaptive)
        return (kl, *super().regularizers())
