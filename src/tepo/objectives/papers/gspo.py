"""GSPO and GSPO-token: group sequence policy optimisation (Zheng et al., arXiv 2507.18071, sections 4.1 and 4.3).

    GSPO        J = (1/G) sum_i min(s_i A_i, clip(s_i, 1-low, 1+high) A_i),  s_i = exp((1/L_i) sum_t log pi/pi_old)
    GSPO-token  the same with sg[s_i] pi/sg[pi] at every token: equal value, and equal gradient while A_i is the
                same for all tokens of a response

Confirmed through TRL's documentation: clips 3e-4/4e-4 and 4 mini-batches a rollout batch, no KL. A clip this
fine needs old log-probs from the scorer's own path. verl computes the token form under the name "gspo" and
bounds log s at 10 from above only; ours is clamped on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tepo.objectives.method import GroupMethod, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import Ratio, SequenceRatio, SequenceTokenRatio
from tepo.objectives.reducers import SequenceMean
from tepo.objectives.surrogates import PPOClip


@dataclass(frozen=True, kw_only=True)
class GSPO(GroupMethod):
    """Group-normalised advantage, sequence ratio with a fine clip, sequence mean."""

    name = "gspo"
    paper = Paper("Group Sequence Policy Optimization", 2025, "2507.18071")
    formula = "J = 1/G Σᵢ min(sᵢAᵢ, clip(sᵢ, 1-ε₋, 1+ε₊)Aᵢ),  sᵢ = exp(1/Lᵢ Σₜ log π/π_old)"
    status = "confirmed"

    clip_low: float = setting(3e-4, "lower clip of the sequence ratio", "section 5.1")
    clip_high: float = setting(4e-4, "upper clip of the sequence ratio", "section 5.1")
    clip_dual: float | None = setting(None, "dual clip for A < 0", "paper: none")
    empty_rows: Literal["skip", "count"] = setting(
        "skip", "whether a response without tokens counts in the mean", "verl: skip (TRL: count)"
    )

    def level(self) -> Ratio:
        """Return the ratio that is differentiated."""
        return SequenceRatio()

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            advantage=self.normalized(),
            ratio=self.level(),
            surrogate=PPOClip(self.clip_low, self.clip_high, self.clip_dual),
            reducer=SequenceMean(self.empty_rows),
        )


@dataclass(frozen=True, kw_only=True)
class GSPOToken(GSPO):
    """GSPO with the gradient of each token's own log-prob; right for token-wise advantages too."""

    name = "gspo-token"
    formula = "J = 1/G Σᵢ 1/Lᵢ Σₜ min(sᵢₜAᵢₜ, clip(sᵢₜ, 1-ε₋, 1+ε₊)Aᵢₜ),  sᵢₜ = sg[sᵢ]·π/sg[π]"

    def level(self) -> Ratio:
        """Return the ratio that is differentiated."""
        return SequenceTokenRatio()
