"""80/20: learn from the tokens of highest entropy only.

Wang et al., "Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective Reinforcement Learning for LLM
Reasoning", arXiv 2506.01939.

    J = (1 / |S|) sum over (i,t) in S of P(r_{i,t}, A_i; low, high),  S: the fraction of the tokens with largest H

Confirmed in the authors' code: the top ceil(0.2 N) tokens by the current policy's entropy, divided by the selected
tokens; DAPO's clips, dual clip 10. That code chooses inside each micro-batch, the paper's formula inside the batch, as
ours does, in the mini-batch. TRL's `top_entropy_quantile` keeps every token at or above a quantile (`rule`) and
divides by all tokens (`denominator`): a loss about five times smaller. A KL or an entropy bonus acts on all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tepo.objectives.entropies import TopEntropy
from tepo.objectives.method import GroupMethod, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import TokenRatio
from tepo.objectives.reducers import TokenMean
from tepo.objectives.selectors import Selector
from tepo.objectives.surrogates import PPOClip


@dataclass(frozen=True, kw_only=True)
class HighEntropy(GroupMethod):
    """DAPO on the tokens of highest entropy."""

    name = "high-entropy"
    paper = Paper(
        "Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective RL for LLM Reasoning", 2025, "2506.01939"
    )
    formula = "J = 1/|S| Σ_{(i,t)∈S} min(rᵢₜAᵢ, clip(rᵢₜ)Aᵢ),  S = the ⌈ρN⌉ tokens of largest Hᵢₜ"
    status = "confirmed"

    entropy_fraction: float = setting(0.2, "share of the tokens that are learned from; 1 is DAPO", "paper: 0.2")
    rule: Literal["top-k", "quantile"] = setting(
        "top-k", "exactly that many tokens, or all at or above a quantile", "the authors' code (TRL: quantile)"
    )
    denominator: Literal["selected", "all"] = setting("selected", "which tokens divide", "the authors' code (TRL: all)")
    clip_low: float = setting(0.2, "lower clip of the ratio", "DAPO")
    clip_high: float = setting(0.28, "upper clip of the ratio", "DAPO")
    clip_dual: float | None = setting(10.0, "dual clip for A < 0", "the authors' script")

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            advantage=self.normalized(),
            ratio=TokenRatio(),
            surrogate=PPOClip(self.clip_low, self.clip_high, self.clip_dual),
            reducer=TokenMean(),
        )

    def selectors(self) -> tuple[Selector, ...]:
        """Return the row filters, then the choice by entropy."""
        return (*super().selectors(), TopEntropy(self.entropy_fraction, self.rule, self.denominator))
