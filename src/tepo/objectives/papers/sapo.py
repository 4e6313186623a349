"""SAPO: soft adaptive policy optimisation (arXiv 2511.20347).

    J = (1/G) sum_i (1/L_i) sum_t f(r_{i,t}) A_i,  f(r) = (4/tau) sigmoid(tau (r - 1)),  tau by the sign of A_i

A gate without an edge in place of a clip: df/dr is 1 at r = 1 and falls off on both sides, faster where A < 0.
Confirmed in TRL and verl (tau 1.0 and 1.05, sequence mean). A = 0 takes the negative tau, which changes nothing.
The value at r = 1 is 2 A / tau, so losses of different tau are not comparable; gradients are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tepo.objectives.method import GroupMethod, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import TokenRatio
from tepo.objectives.reducers import SequenceMean
from tepo.objectives.surrogates import SoftGate


@dataclass(frozen=True, kw_only=True)
class SAPO(GroupMethod):
    """Group-normalised advantage, a soft gate on the token ratio, sequence mean."""

    name = "sapo"
    paper = Paper("Soft Adaptive Policy Optimization", 2025, "2511.20347")
    formula = "J = 1/G Σᵢ 1/Lᵢ Σₜ (4/τ)·σ(τ(rᵢₜ - 1))·Aᵢ,  τ = τ₊ if Aᵢ > 0 else τ₋"
    status = "confirmed"

    tau_positive: float = setting(1.0, "sharpness of the gate where A > 0", "paper, by TRL and verl: 1.0")
    tau_negative: float = setting(1.05, "sharpness of the gate elsewhere", "paper, by TRL and verl: 1.05")
    empty_rows: Literal["skip", "count"] = setting(
        "skip", "whether a response without tokens counts in the mean", "verl: skip (TRL: count)"
    )

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            advantage=self.normalized(),
            ratio=TokenRatio(),
            surrogate=SoftGate(self.tau_positive, self.tau_negative),
            reducer=SequenceMean(self.empty_rows),
        )
