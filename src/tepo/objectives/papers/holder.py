"""HolderPO: Hölder policy optimisation (Chen et al., arXiv 2605.12058).

    J = (1/G) sum_i min(h_i A_i, clip(h_i, 1-eps, 1+eps) A_i),  h_i = ((1/L_i) sum_t r_{i,t}^p)^(1/p)

The power mean of the token ratios, from the arithmetic mean (p = 1) over the geometric one (p -> 0, which is GSPO's)
downwards. Its gradient is spread over tokens as r^p: a large p follows the few tokens that moved most (sparse
signals), a small one bounds the gradient's variance. So p falls in the course of training.
Confirmed by the authors' code: the formula, clip 0.2 on the sequence, mean over responses, p from 2 to -2 in a
straight line over 500 rollout batches; one of its batches makes 8 updates, and ours counts updates. `clip="token"`
is its other variant: each token's ratio is clipped from the side its advantage gains on, before the mean, and the
mean is not (with p = 0 and a clip in nats that is GMPO).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tepo.core.errors import InputError
from tepo.objectives.method import GroupMethod, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import AnnealedHolderRatio, HolderRatio
from tepo.objectives.reducers import SequenceMean
from tepo.objectives.surrogates import PPOClip, Surrogate, Unclipped


@dataclass(frozen=True, kw_only=True)
class Holder(GroupMethod):
    """Group-normalised advantage, power-mean ratio with a falling exponent, PPO clip, mean over responses."""

    name = "holder"
    paper = Paper("Hölder Policy Optimisation", 2026, "2605.12058")
    formula = "J = 1/G Σᵢ min(hᵢAᵢ, clip(hᵢ, 1-ε₋, 1+ε₊)Aᵢ),  hᵢ = (1/Lᵢ Σₜ rᵢₜᵖ)^(1/p),  p: 2 → -2"
    status = "confirmed"

    p: float = setting(
        2.0, "exponent at the start; 1: arithmetic mean, 0: geometric mean", "authors' script: 2", lowest=-math.inf
    )
    p_end: float | None = setting(-2.0, "exponent at the end; none: it stays", "authors' script: -2", lowest=-math.inf)
    p_updates: int = setting(
        4000, "optimizer updates from p to p_end", "authors' script: 500 batches of 8 updates", lowest=1
    )
    clip: Literal["sequence", "token"] = setting(
        "sequence", "what is clipped: the mean, or each token", "authors' code"
    )
    clip_low: float = setting(0.2, "lower clip of the ratio", "authors' script: 0.2")
    clip_high: float = setting(0.2, "upper clip of the ratio", "authors' script: 0.2")
    empty_rows: Literal["skip", "count"] = setting(
        "skip", "whether a response without tokens counts in the mean", "ours: skip"
    )

    def compose(self) -> Objective:
        """Return the composition."""
        by_token = self.clip == "token"
        if by_token and not (0 <= self.clip_low < 1 and self.clip_high >= 0):
            raise InputError(f"clip_low={self.clip_low}, clip_high={self.clip_high}: expected 0 <= clip_low < 1")
        bounds = (-math.log1p(-self.clip_low), math.log1p(self.clip_high)) if by_token else (None, None)
        surrogate: Surrogate = Unclipped() if by_token else PPOClip(self.clip_low, self.clip_high)
        return self.composition(
            advantage=self.normalized(),
            ratio=HolderRatio(self.p, *bounds)
            if self.p_end is None
            else AnnealedHolderRatio(self.p, self.p_end, self.p_updates, *bounds),
            surrogate=surrogate,
            reducer=SequenceMean(self.empty_rows),
        )
