"""DPPO: divergence proximal policy optimisation, binary form (Qi et al., arXiv 2602.04879).

    J = (1/N) sum_i sum_t M_{i,t} sg[min(r_{i,t}, cap)] A_i log pi
    tv: M = 1[p - p_old <= high] where A > 0, 1[p_old - p <= low] elsewhere
    kl: M = 1[KL((p_old, 1-p_old) || (p, 1-p)) <= threshold], or the token moved back towards p_old

A trust region in probability instead of a ratio's: doubling a token of probability 1e-4 moves nothing, lowering one
from 0.99 to 0.8 does. Confirmed in verl (which points to the authors); thresholds 0.15 (tv) and 0.05 (kl) are its
example's. verl takes the cap from its dual clip, 3; its documentation recommends a large one, and so the paper: 20.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tepo.objectives.detached_surrogates import DivergenceMask
from tepo.objectives.method import GroupMethod, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import TokenRatio
from tepo.objectives.reducers import ReducerName, reducer_of

THRESHOLDS = {"tv": 0.15, "kl": 0.05}


@dataclass(frozen=True, kw_only=True)
class DPPO(GroupMethod):
    """Group-normalised advantage, truncated token ratio, a trust region in probability, token mean."""

    name = "dppo"
    paper = Paper("Rethinking the Trust Region in LLM Reinforcement Learning", 2026, "2602.04879")
    formula = "J = 1/N Σᵢ Σₜ 1[D(π_old, π)ᵢₜ <= δ or moving back]·sg[min(rᵢₜ, c)]·Aᵢ log πᵢₜ"
    status = "confirmed"

    divergence: Literal["tv", "kl"] = setting("tv", "of the sampled token's probability against the rest", "verl: tv")
    threshold_low: float | None = setting(None, "for A <= 0; none: 0.15 (tv) or 0.05 (kl)", "verl's example")
    threshold_high: float | None = setting(None, "for A > 0; none: 0.15 (tv) or 0.05 (kl)", "verl's example")
    ratio_cap: float = setting(20.0, "largest weight", "verl's fallback: 20 (its default config: 3)")
    reducer: ReducerName = setting("token-mean", "who is averaged over whom", "verl: token-mean")

    def compose(self) -> Objective:
        """Return the composition."""
        low, high = (
            THRESHOLDS[self.divergence] if value is None else value
            for value in (self.threshold_low, self.threshold_high)
        )
        return self.composition(
            advantage=self.normalized(),
            ratio=TokenRatio(),
            surrogate=DivergenceMask(self.divergence, low, high, self.ratio_cap),
            reducer=reducer_of(self.reducer),
        )
