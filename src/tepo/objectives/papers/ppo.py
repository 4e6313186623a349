"""PPO: proximal policy optimisation with a learned critic (Schulman et al., arXiv 1707.06347, eq. 7, 9 and 11).

    J = E_t[ min(r_t A_t, clip(r_t, 1-eps, 1+eps) A_t) ] - c1 E_t[ 1/2 max((V - R)^2, (V_clipped - R)^2) ] + c2 H
    A_t = d_t + gamma lam A_{t+1},  d_t = r_t + gamma V_{t+1} - V_t           (GAE, arXiv 1506.02438, eq. 16)
    R_t = A_t + V_t before whitening,  V_clipped = clip(V, V_old - eps_v, V_old + eps_v)

An episode is a response, an action a token, the reward comes with the last token. Confirmed: the formulas, and TRL's
and verl's code. The papers leave whitening, the clip of the value loss and its 1/2 to the implementations. Pitfalls:
the advantages are whitened, never the returns; positions outside the mask are no steps (values and advantages are
carried across); once all returns agree, whitening blows the critic's errors up to variance 1, so a solved task is
pushed at random (an entropy bonus or whiten = false helps); a value belongs to the state before its
token; the critic is a model of its own here (its gradient never reaches the policy), so value_coef matters only through
gradient clipping.
"""

from __future__ import annotations

from dataclasses import dataclass

from tepo.objectives.method import Method, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import TokenRatio
from tepo.objectives.reducers import TokenMean
from tepo.objectives.regularizers import Regularizer
from tepo.objectives.returns import GAE
from tepo.objectives.shaping import Shaping
from tepo.objectives.surrogates import PPOClip
from tepo.objectives.transforms import Whitened
from tepo.objectives.value import ValueLoss


@dataclass(frozen=True, kw_only=True)
class PPO(Method):
    """Token ratio with a clip, advantages by GAE against a learned critic, clipped value loss."""

    name = "ppo"
    paper = Paper("Proximal Policy Optimization Algorithms", 2017, "1707.06347")
    formula = (
        "J = 1/N Σᵢ Σₜ [ min(rᵢₜAᵢₜ, clip(rᵢₜ, 1-ε, 1+ε)Aᵢₜ) - c·½max((V-R)², (V_clip-R)²) ],  "
        "Aₜ = δₜ + γλAₜ₊₁,  δₜ = rewardₜ + γVₜ₊₁ - Vₜ,  R = A + V_old"
    )
    status = "confirmed"

    clip_low: float = setting(0.2, "lower clip of the ratio", "TRL and verl: 0.2")
    clip_high: float = setting(0.2, "upper clip of the ratio", "TRL and verl: 0.2")
    clip_dual: float | None = setting(None, "dual clip for A < 0", "paper: none (verl: 3)")
    gamma: float = setting(1.0, "discount of what comes later", "TRL and verl: 1")
    lam: float = setting(0.95, "GAE's lambda: 1 trusts returns, 0 the critic", "TRL: 0.95 (verl: 1)")
    whiten: bool = setting(True, "give advantages mean 0 and variance 1 over the rollout batch's tokens", "TRL, verl")
    value_clip: float | None = setting(0.2, "how far a value counts as moved from its old one", "TRL: 0.2 (verl: 0.5)")
    value_coef: float = setting(0.1, "coefficient of the value loss", "TRL: 0.1 (verl: 1)")

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            shaping=self.shaping(),
            advantage=GAE(self.gamma, self.lam),
            transforms=(Whitened(),) if self.whiten else (),
            ratio=TokenRatio(),
            surrogate=PPOClip(self.clip_low, self.clip_high, self.clip_dual),
            reducer=TokenMean(),
        )

    def shaping(self) -> tuple[Shaping, ...]:
        """Return what the reward is made of: the task's own, here."""
        return ()

    def regularizers(self) -> tuple[Regularizer, ...]:
        """Return the value loss and the shared terms."""
        return (ValueLoss(self.value_coef, self.value_clip), *super().regularizers())
