"""REINFORCE++ and REINFORCE++-baseline: global advantage normalisation (Hu et al., arXiv 2501.03262).

    REINFORCE++           A_{i,t} = whiten(G_{i,t}),  G_t = r_t + gamma G_{t+1}
                          r_t = -kl_coef (log pi_old - log pi_ref) + 1[t last] R_i
    REINFORCE++-baseline  A_{i,t} = whiten(R_i - mean_g),  KL to the reference in the loss, k2
    both                  J = (1/N) sum_i sum_t min(r_{i,t} A_{i,t}, clip(r_{i,t}, 1-eps, 1+eps) A_{i,t})

Whitening is over every response token of the rollout batch, so no prompt's own spread divides its rewards: GRPO's
division by the group's deviation is biased, and large where a group hardly differs. It also makes a response's
advantage depend on the lengths of all. Confirmed: the estimators (verl's, OpenRLHF's), k1 in the reward and k2 in
the loss. Inferred: the coefficients, which are OpenRLHF's. The first needs no group: one response a prompt will do.
"""

from __future__ import annotations

from dataclasses import dataclass

from tepo.objectives.advantages import GroupNormalized
from tepo.objectives.method import Method, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import TokenRatio
from tepo.objectives.reducers import TokenMean
from tepo.objectives.regularizers import KL, Estimator, Regularizer
from tepo.objectives.returns import TokenReturns
from tepo.objectives.shaping import TokenKLPenalty
from tepo.objectives.surrogates import PPOClip
from tepo.objectives.transforms import Whitened

PAPER = Paper("REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Normalization", 2025, "2501.03262")


@dataclass(frozen=True, kw_only=True)
class ReinforcePP(Method):
    """Token returns with the KL in the reward, whitened over the batch; PPO clip, token mean."""

    name = "reinforce++"
    paper = PAPER
    formula = "J = 1/N Σᵢ Σₜ min(rᵢₜAᵢₜ, clip(rᵢₜ, 1-ε₋, 1+ε₊)Aᵢₜ),  Aᵢₜ = whiten(Rᵢ - β Σₖ≥ₜ log π_old/π_ref)"
    status = "confirmed"

    clip_low: float = setting(0.2, "lower clip of the ratio", "OpenRLHF, verl: 0.2")
    clip_high: float = setting(0.2, "upper clip of the ratio", "OpenRLHF, verl: 0.2")
    clip_dual: float | None = setting(None, "dual clip for A < 0", "paper: none (verl: 3)")
    kl_coef: float = setting(
        0.01, "coefficient of the KL in each token's reward; 0 removes it", "OpenRLHF: 0.01", "inferred"
    )
    gamma: float = setting(1.0, "discount of a token's reward at each token before it", "OpenRLHF, verl: 1")

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            shaping=(TokenKLPenalty(self.kl_coef),) if self.kl_coef else (),
            advantage=TokenReturns(self.gamma),
            transforms=(Whitened(),),
            ratio=TokenRatio(),
            surrogate=PPOClip(self.clip_low, self.clip_high, self.clip_dual),
            reducer=TokenMean(),
        )


@dataclass(frozen=True, kw_only=True)
class ReinforcePPBaseline(Method):
    """Centred rewards, whitened over the batch's tokens, KL to the reference in the loss; PPO clip, token mean."""

    name = "reinforce++-baseline"
    paper = PAPER
    formula = "J = 1/N Σᵢ Σₜ [ min(rᵢₜAᵢₜ, clip(rᵢₜ, 1-ε₋, 1+ε₊)Aᵢₜ) - β·KL(π‖π_ref)ᵢₜ ],  Aᵢₜ = whiten(Rᵢ - mean)"
    status = "confirmed"

    clip_low: float = setting(0.2, "lower clip of the ratio", "OpenRLHF, verl: 0.2")
    clip_high: float = setting(0.2, "upper clip of the ratio", "OpenRLHF, verl: 0.2")
    clip_dual: float | None = setting(None, "dual clip for A < 0", "paper: none (verl: 3)")
    kl_coef: float = setting(
        1e-5, "coefficient of the KL in the loss; 0 removes it", "OpenRLHF's example: 1e-5", "inferred"
    )
    kl_estimator: Estimator = setting("k2", "estimator of the KL", "paper, by OpenRLHF: k2")

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            advantage=GroupNormalized("none"),
            transforms=(Whitened(),),
            ratio=TokenRatio(),
            surrogate=PPOClip(self.clip_low, self.clip_high, self.clip_dual),
            reducer=TokenMean(),
        )

    def regularizers(self) -> tuple[Regularizer, ...]:
        """Return the KL to the reference and the shared terms."""
        kl = (KL(self.kl_coef, "reference", self.kl_estimator),) if self.kl_coef else ()
        return (*kl, *super().regularizers())
