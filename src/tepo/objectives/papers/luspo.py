"""LUSPO: length-unbiased sequence policy optimisation (arXiv 2602.05261), GSPO times the response's length.

    J = (1/G) sum_i L_i min(s_i A_i, clip(s_i, 1-low, 1+high) A_i),  s_i = exp((1/L_i) sum_t D_{i,t})

GSPO's gradient at a token is A s / (G L_i): long responses learn less from each token. The factor L_i takes that
back, so every token's coefficient is A s / G. It is TEPO's policy term but for the constant: there A s / N, with N
the tokens of the mini-batch. Confirmed in TRL (clips 2e-3/2.5e-3); written here as the sum over a response's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tepo.objectives.method import GroupMethod, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import SequenceRatio
from tepo.objectives.reducers import SequenceSum
from tepo.objectives.surrogates import PPOClip


@dataclass(frozen=True, kw_only=True)
class LUSPO(GroupMethod):
    """Group-normalised advantage, sequence ratio with a fine clip, weighted by the length."""

    name = "luspo"
    paper = Paper("Length-Unbiased Sequence Policy Optimization", 2026, "2602.05261")
    formula = "J = 1/G Σᵢ Lᵢ·min(sᵢAᵢ, clip(sᵢ, 1-ε₋, 1+ε₊)Aᵢ),  sᵢ = exp(1/Lᵢ Σₜ log π/π_old)"
    status = "confirmed"

    clip_low: float = setting(2e-3, "lower clip of the sequence ratio", "paper, by TRL's documentation")
    clip_high: float = setting(2.5e-3, "upper clip of the sequence ratio", "paper, by TRL's documentation")
    clip_dual: float | None = setting(None, "dual clip for A < 0", "paper: none")
    empty_rows: Literal["skip", "count"] = setting(
        "skip", "whether a response without tokens counts in the mean", "ours: skip (TRL: count)"
    )

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            advantage=self.normalized(),
            ratio=SequenceRatio(),
            surrogate=PPOClip(self.clip_low, self.clip_high, self.clip_dual),
            reducer=SequenceSum(1.0, self.empty_rows),
        )
