"""Clip-Cov and KL-Cov: hold back the few tokens whose covariance makes the entropy fall.

Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", arXiv 2505.22617.

    c_{i,t} = (A_{i,t} - mean A)(log pi_{i,t} - mean log pi)                       over the tokens of the mini-batch
    Clip-Cov  J = (1/N) sum m P(r, A),  m = 0 for floor(f N) random tokens with low < c < high that PPO leaves alone
    KL-Cov    J = (1/N) sum [ r A - kl_coef 1[c among the floor(f N) largest] |log pi - log pi_old| ]

Confirmed in the authors' code and in verl: the formulas, f = 2e-4 with bounds 1 and 5 and clips of 1 (Clip-Cov),
f = 2e-3 with coefficient 1 (KL-Cov, the 7B recipe; the 32B one has 2e-4). Both codes take mean, count and choice
over each micro-batch, so their result depends on its size; ours are the mini-batch's. Their draw is a running random
generator's; ours is a function of `seed`, row id and place. Clip-Cov has no dual clip, KL-Cov no clip at all, and
|D| has no gradient at D = 0, so at the first update of a rollout batch KL-Cov is the plain policy gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tepo.objectives.covariance import CovarianceBand, TopCovariance
from tepo.objectives.method import GroupMethod, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import TokenRatio
from tepo.objectives.reducers import TokenMean
from tepo.objectives.regularizers import KL, Estimator, Regularizer
from tepo.objectives.selectors import Selector
from tepo.objectives.surrogates import PPOClip, Unclipped

PAPER = Paper("The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", 2025, "2505.22617")


@dataclass(frozen=True, kw_only=True)
class ClipCov(GroupMethod):
    """PPO that lets go of a few random tokens of high covariance."""

    name = "clip-cov"
    paper = PAPER
    formula = "J = 1/N Σᵢ Σₜ mᵢₜ·min(rᵢₜAᵢ, clip(rᵢₜ)Aᵢ),  mᵢₜ = 0 for ⌊fN⌋ random tokens with c₋ < cᵢₜ < c₊"
    status = "confirmed"

    clip_low: float = setting(1.0, "lower clip of the ratio", "recipe: 1")
    clip_high: float = setting(1.0, "upper clip of the ratio", "recipe: 1")
    clip_fraction: float = setting(2e-4, "share of the tokens that is let go of, at least one token", "recipe: 2e-4")
    covariance_low: float = setting(1.0, "covariance above which a token may be drawn", "recipe: 1", lowest=-math.inf)
    covariance_high: float = setting(5.0, "covariance below which a token may be drawn", "recipe: 5", lowest=-math.inf)
    seed: int = setting(0, "seed of the draw", "ours", lowest=-math.inf)

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            advantage=self.normalized(), ratio=TokenRatio(), surrogate=self._clip(), reducer=TokenMean()
        )

    def selectors(self) -> tuple[Selector, ...]:
        """Return the row filters, then the draw."""
        bounds = (self.clip_fraction, self.covariance_low, self.covariance_high)
        return (*super().selectors(), CovarianceBand(*bounds, self._clip(), self.log_ratio_clamp, self.seed))

    def _clip(self) -> PPOClip:
        return PPOClip(self.clip_low, self.clip_high)


@dataclass(frozen=True, kw_only=True)
class KLCov(GroupMethod):
    """Unclipped policy gradient with a KL to the old policy on the tokens of highest covariance."""

    name = "kl-cov"
    paper = PAPER
    formula = "J = 1/N Σᵢ Σₜ [ rᵢₜAᵢ - β·1[cᵢₜ among the ⌊fN⌋ largest]·|log π/π_old|ᵢₜ ]"
    status = "confirmed"

    kl_coef: float = setting(1.0, "coefficient of the KL; 0 removes it", "7B recipe: 1 (verl's default: 0.1)")
    kl_fraction: float = setting(2e-3, "share of the tokens under the KL, at least one token", "7B recipe: 2e-3")
    kl_estimator: Estimator = setting("abs", "estimator of the KL", "the authors' code")

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            advantage=self.normalized(), ratio=TokenRatio(), surrogate=Unclipped(), reducer=TokenMean()
        )

    def regularizers(self) -> tuple[Regularizer, ...]:
        """Return the masked KL and the shared terms."""
        if self.kl_coef == 0:
            return super().regularizers()
        kl = KL(self.kl_coef, "old", self.kl_estimator, TopCovariance(self.kl_fraction))
        return (kl, *super().regularizers())
