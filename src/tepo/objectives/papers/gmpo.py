"""GMPO: geometric-mean policy optimisation (Zhao et al., arXiv 2507.20673, eq. 4).

    J = (1/G) sum_i A_i exp((1/L_i) sum_t d_{i,t})
    d = min(D, high) where A > 0, max(D, -low) where A < 0,  D = log pi/pi_old

The clip sits inside the mean, token by token, in log space and on one side, so it may be wide: ratios from e^-0.4 to
e^0.4. Confirmed in the authors' code and verl's. Unlike GSPO a clipped token falls silent alone, not its response.
At A = 0 nothing is clipped; the loss is 0 either way. A response without tokens adds nothing (TRL would add -A).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tepo.objectives.method import GroupMethod, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import HolderRatio
from tepo.objectives.reducers import SequenceMean
from tepo.objectives.surrogates import Unclipped


@dataclass(frozen=True, kw_only=True)
class GMPO(GroupMethod):
    """Group-normalised advantage times the geometric mean of token ratios clipped in log space."""

    name = "gmpo"
    paper = Paper("Geometric-Mean Policy Optimization", 2025, "2507.20673")
    formula = "J = 1/G Σᵢ Aᵢ exp(1/Lᵢ Σₜ dᵢₜ),  d = min(log r, ε₊) if A > 0, max(log r, -ε₋) if A < 0"
    status = "confirmed"

    clip_low: float = setting(0.4, "lower clip of the log-ratio, nats", "section 4: (e^-0.4, e^0.4)")
    clip_high: float = setting(0.4, "upper clip of the log-ratio, nats", "section 4: (e^-0.4, e^0.4)")
    empty_rows: Literal["skip", "count"] = setting(
        "skip", "whether a response without tokens counts in the mean", "ours: skip (verl, TRL: count)"
    )

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            advantage=self.normalized(),
            ratio=HolderRatio(0.0, self.clip_low, self.clip_high),
            surrogate=Unclipped(),
            reducer=SequenceMean(self.empty_rows),
        )
