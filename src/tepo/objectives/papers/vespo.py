"""VESPO: variational sequence-level soft policy optimisation (arXiv 2602.10693).

    J = (1/N) sum_i sum_t sg[phi(W_i)] A_i log pi,  W_i = exp(sum_t D_{i,t})
    phi(W) = e^lam W^k e^(-lam W),  (k, lam) = (2, 3) where A >= 0, (3, 2) where A < 0

The ratio of the whole response, shaped so that it needs no length normalisation: phi(1) = 1, and responses that
drifted in either direction fade out. Confirmed in TRL (constants, token mean). Everything is computed from log W,
clamped to +-20, so a response of any length stays finite. TRL multiplies a sampler's mismatch into W; ours, as in
every method, weighs the loss (`importance_weight`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tepo.objectives.detached_surrogates import GammaWeight
from tepo.objectives.method import GroupMethod, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import SequenceSumRatio
from tepo.objectives.reducers import TokenMean


@dataclass(frozen=True, kw_only=True)
class VESPO(GroupMethod):
    """Group-normalised advantage, a soft weight on the whole response's ratio, token mean."""

    name = "vespo"
    paper = Paper("VESPO: Variational Sequence-Level Soft Policy Optimization", 2026, "2602.10693")
    formula = "J = 1/N Σᵢ Σₜ sg[φ(Wᵢ)]·Aᵢ log πᵢₜ,  Wᵢ = exp(Σₜ log π/π_old),  φ(W) = e^λ·W^k·e^(-λW)"
    status = "confirmed"

    k_positive: float = setting(2.0, "k where A >= 0: how fast small W fade", "paper, by TRL: 2")
    lam_positive: float = setting(3.0, "λ where A >= 0: how fast large W fade", "paper, by TRL: 3")
    k_negative: float = setting(3.0, "k where A < 0", "paper, by TRL: 3")
    lam_negative: float = setting(2.0, "λ where A < 0", "paper, by TRL: 2")
    scope: Literal["mini", "group"] = setting("mini", "whose tokens divide: the mini-batch's, or each group's", "TRL")

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            advantage=self.normalized(),
            ratio=SequenceSumRatio(),
            surrogate=GammaWeight(self.k_positive, self.lam_positive, self.k_negative, self.lam_negative),
            reducer=TokenMean(self.scope),
        )
