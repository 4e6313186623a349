"""Reasoning with Exploration: an entropy term in the advantage.

Cheng et al., "Reasoning with Exploration: An Entropy Perspective", arXiv 2506.14758.

    A'_{i,t} = A_i + min(alpha sg[H_{i,t}], |A_i| / kappa)        J = (1/N) sum_i sum_t P(r_{i,t}, A'_{i,t}; low, high)

Confirmed by readings of the paper: the formula, kappa 2 (above 1, so that no advantage changes its sign), alpha 0.4
for GRPO (0.1 for PPO), rewards +1/-1, clip-higher and the token mean. Inferred: whose entropy it is. It is detached,
so it shapes the credit and is no entropy bonus: its gradient goes through log pi alone. The two policies' entropies
agree at the first update of a rollout batch; ours is the sampling policy's, which needs no pass of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tepo.objectives.entropies import EntropyBonusAdvantage
from tepo.objectives.method import GroupMethod, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import TokenRatio
from tepo.objectives.reducers import TokenMean
from tepo.objectives.surrogates import PPOClip


@dataclass(frozen=True, kw_only=True)
class EntropyAdvantage(GroupMethod):
    """DAPO with more credit for tokens of high entropy."""

    name = "entropy-advantage"
    paper = Paper("Reasoning with Exploration: An Entropy Perspective", 2025, "2506.14758")
    formula = "J = 1/N Σᵢ Σₜ min(rᵢₜA′ᵢₜ, clip(rᵢₜ)A′ᵢₜ),  A′ᵢₜ = Aᵢ + min(α·sg[Hᵢₜ], |Aᵢ|/κ)"
    status = "confirmed"
    notes = "Whose entropy shapes the advantage is not public; old and current are settings."

    alpha: float = setting(0.4, "nats of entropy to advantage; 0 is DAPO", "paper, GRPO: 0.4")
    kappa: float = setting(2.0, "the term is at most |A| / kappa", "paper: 2")
    entropy: Literal["old", "current"] = setting("old", "whose entropy", "ours", "inferred")
    clip_low: float = setting(0.2, "lower clip of the ratio", "paper: clip-higher")
    clip_high: float = setting(0.28, "upper clip of the ratio", "paper: clip-higher")
    clip_dual: float | None = setting(None, "dual clip for A < 0", "paper: none")

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            advantage=self.normalized(),
            transforms=(EntropyBonusAdvantage(self.alpha, self.kappa, self.entropy),),
            ratio=TokenRatio(),
            surrogate=PPOClip(self.clip_low, self.clip_high, self.clip_dual),
            reducer=TokenMean(),
        )
