"""CW-GRPO: tokens of extreme covariance count less, by a Gaussian kernel.

Wang et al., "Taming Extreme Tokens: Covariance-Aware GRPO with Gaussian-Kernel Advantage Reweighting",
arXiv 2605.11538.

    J = (1/G) sum_i (1/L_i) sum_t [ P(r_{i,t}, w~_{i,t} A_i; eps, eps) - beta k3(pi || pi_ref) ]
    c_{i,t} = (log pi - mean log pi)(A - mean A),  w = exp(-c^2 / (2 sigma^2)),  sigma = std of c,  w~ = N w / sum w

Confirmed by readings of the paper: the weights, which have no hyper-parameter, and a GRPO of TRL underneath (12
samples a prompt, temperature 0.7). Inferred: over what the mean, the deviation and N are taken (a reading says the
group; TRL's code would make it the micro-batch; ours is the mini-batch, and `scope` the group), the population's
deviation, clips and KL of TRL's defaults. The kernel is around 0, not around the mean of c. Everything in it is
detached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tepo.objectives.covariance import CovarianceKernel
from tepo.objectives.method import GroupMethod, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import TokenRatio
from tepo.objectives.reducers import SequenceMean
from tepo.objectives.regularizers import KL, Regularizer
from tepo.objectives.surrogates import PPOClip


@dataclass(frozen=True, kw_only=True)
class CWGRPO(GroupMethod):
    """GRPO whose advantages are damped where the covariance is extreme."""

    name = "cw-grpo"
    paper = Paper(
        "Taming Extreme Tokens: Covariance-Aware GRPO with Gaussian-Kernel Advantage Reweighting",
        2026,
        "2605.11538",
        "ACL 2026",
    )
    formula = "J = 1/G Σᵢ 1/Lᵢ Σₜ min(rᵢₜw̃ᵢₜAᵢ, clip(rᵢₜ)w̃ᵢₜAᵢ),  w̃ = N·w/Σw,  w = exp(-c²/2σ²)"
    status = "inferred"

    scope: Literal["mini", "group"] = setting(
        "mini", "whose tokens mean, deviation and N are of: the mini-batch's, or each group's", "ours", "inferred"
    )
    deviation: Literal["population", "sample"] = setting("population", "which deviation of c", "ours", "inferred")
    bandwidth: float = setting(1.0, "sigma in deviations of c; large is GRPO", "paper: 1")
    clip_low: float = setting(0.2, "lower clip of the ratio", "TRL: 0.2", "inferred")
    clip_high: float = setting(0.2, "upper clip of the ratio", "TRL: 0.2", "inferred")
    kl_coef: float = setting(0.0, "coefficient of the KL to the reference", "TRL: 0", "inferred")

    def compose(self) -> Objective:
        """Return the composition."""
        kernel = CovarianceKernel(self.scope, 0 if self.deviation == "population" else 1, self.bandwidth)
        return self.composition(
            advantage=self.normalized(),
            transforms=(kernel,),
            ratio=TokenRatio(),
            surrogate=PPOClip(self.clip_low, self.clip_high),
            reducer=SequenceMean(),
        )

    def regularizers(self) -> tuple[Regularizer, ...]:
        """Return the KL, if any, and the shared terms."""
        return (*((KL(self.kl_coef, "reference"),) if self.kl_coef else ()), *super().regularizers())
