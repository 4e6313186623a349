"""DRO: direct reward optimisation, policy part (Richemond et al., arXiv 2405.19107), as verl has it online.

    J = (1/N) sum_i sum_t [ A_i log pi - (beta/2) D_{i,t}^2 ],  D = log pi/pi_old

A quadratic pull to the old policy in place of a clip: the token's optimum is D = A / beta. The paper works offline
with a learnt value and the reference policy; verl (and this entry) put the group's baseline and the old policy there.
Confirmed: verl's formula. Inferred: beta, which verl wants given; 1 is the paper's, from memory. Beyond the clamp of
the log-ratio (20 nats) the pull stops.
"""

from __future__ import annotations

from dataclasses import dataclass

from tepo.objectives.method import GroupMethod, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import TokenRatio
from tepo.objectives.reducers import ReducerName, reducer_of
from tepo.objectives.surrogates import QuadraticDrift


@dataclass(frozen=True, kw_only=True)
class DRO(GroupMethod):
    """Policy gradient of the group-normalised advantage, with a squared penalty on the log-ratio."""

    name = "dro"
    paper = Paper("Offline Regularised Reinforcement Learning for Large Language Models Alignment", 2024, "2405.19107")
    formula = "J = 1/N Σᵢ Σₜ [ Aᵢ log πᵢₜ - β/2·(log πᵢₜ/π_old)² ]"
    status = "inferred"

    beta: float = setting(1.0, "strength of the pull to the old policy", "paper's tau, from memory", "inferred")
    reducer: ReducerName = setting("token-mean", "who is averaged over whom", "verl: token-mean")

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            advantage=self.normalized(),
            ratio=TokenRatio(),
            surrogate=QuadraticDrift(self.beta),
            reducer=reducer_of(self.reducer),
        )
