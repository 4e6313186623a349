"""CISPO: clipped importance-sampling weights (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5).

    J = (1/N) sum_i sum_t sg[clip(r_{i,t}, low, high)] A_i log pi

The cap is on the weight, not on the update: a clipped token keeps its gradient, where PPO's falls silent.
Confirmed: no lower bound (clip_low=None), only the upper one tuned. Its value is not public to us; 5 is the absolute
cap of ScaleRL (arXiv 2510.13786) and TRL. `cap` says how clip_high (and clip_low) are read: "absolute" bounds the
ratio by clip_high itself, as TRL; "relative" by 1 + clip_high and 1 - clip_low, as the paper writes it and verl.
The loss's value depends on the scale of log pi: compare gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tepo.objectives.detached_surrogates import CappedWeight
from tepo.objectives.method import GroupMethod, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import TokenRatio
from tepo.objectives.reducers import TokenMean


@dataclass(frozen=True, kw_only=True)
class CISPO(GroupMethod):
    """Group-normalised advantage, a capped and detached token ratio as weight, token mean."""

    name = "cispo"
    paper = Paper("MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", 2025, "2506.13585")
    formula = "J = 1/N Σᵢ Σₜ sg[clip(rᵢₜ, 1-ε₋, 1+ε₊)]·Aᵢ log πᵢₜ"
    status = "confirmed"

    cap: Literal["absolute", "relative"] = setting(
        "absolute", "absolute: ratio <= clip_high; relative: ratio <= 1 + clip_high", "TRL (paper, verl: relative)"
    )
    clip_high: float = setting(5.0, "upper bound of the weight, read as `cap` says", "ScaleRL by TRL: 5", "inferred")
    clip_low: float | None = setting(None, "lower bound of the weight, read as `cap` says; none: 0", "paper: none")
    scope: Literal["mini", "group"] = setting(
        "mini", "whose tokens divide: the mini-batch's, or each group's", "TRL, verl: mini"
    )

    def compose(self) -> Objective:
        """Return the composition."""
        high, low = self.clip_high, self.clip_low
        if self.cap == "relative":
            high, low = 1 + high, None if low is None else 1 - low
        return self.composition(
            advantage=self.normalized(),
            ratio=TokenRatio(),
            surrogate=CappedWeight(high, low),
            reducer=TokenMean(self.scope),
        )
