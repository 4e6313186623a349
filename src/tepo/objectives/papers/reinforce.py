"""REINFORCE with a group baseline, and RLOO.

    REINFORCE  J = reduce(A_i log pi),  A_i = R_i - mean_g          (Williams 1992; the group mean as baseline)
    RLOO       J = (1/G) sum_i A_i sum_t log pi,  A_i = R_i - mean of the others   (Ahmadian et al., arXiv 2402.14740)

RLOO's reward carries the KL to the reference: R_i <- R_i - kl_coef sum_t (log pi_old - log pi_ref). With
`ratio="sequence-sum"` it is TRL's clipped form, exp(sum_t D) with a PPO clip; our clamp keeps long responses
finite. Without a ratio only the first update of a rollout batch is on-policy: nothing corrects later ones.
Confirmed in TRL and verl code; the paper's kl_coef 0.03 through TRL's paper index.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tepo.objectives.advantages import GroupNormalized, LeaveOneOut
from tepo.objectives.method import Method, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import NoRatio, SequenceSumRatio
from tepo.objectives.reducers import ReducerName, SequenceMean, SequenceSum, reducer_of
from tepo.objectives.shaping import SequenceKLPenalty
from tepo.objectives.surrogates import PolicyGradient, PPOClip


@dataclass(frozen=True, kw_only=True)
class Reinforce(Method):
    """The plain policy gradient, with the group's mean reward as baseline."""

    name = "reinforce"
    paper = Paper("Simple Statistical Gradient-Following Algorithms for Connectionist RL", 1992, "")
    formula = "J = 1/N Σᵢ Σₜ Aᵢ log πᵢₜ,  Aᵢ = Rᵢ - mean"
    status = "confirmed"

    reducer: ReducerName = setting(
        "token-mean", "who is averaged over whom; sequence-sum is the textbook gradient", "ours"
    )

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            advantage=GroupNormalized(scale="none"),
            ratio=NoRatio(),
            surrogate=PolicyGradient(),
            reducer=reducer_of(self.reducer),
        )


@dataclass(frozen=True, kw_only=True)
class RLOO(Method):
    """Leave-one-out baseline on whole sequences."""

    name = "rloo"
    paper = Paper("Back to Basics: Revisiting REINFORCE-Style Optimization for RLHF", 2024, "2402.14740")
    formula = "J = 1/G Σᵢ Aᵢ Σₜ log πᵢₜ,  Aᵢ = Rᵢ - mean of the others,  R ← R - β Σₜ log π_old/π_ref"
    status = "confirmed"

    ratio: Literal["none", "sequence-sum"] = setting("none", "sequence-sum: TRL's clipped ratio exp(Σₜ D)", "paper")
    clip_low: float = setting(0.2, "lower clip, with ratio='sequence-sum'", "TRL: 0.2")
    clip_high: float = setting(0.2, "upper clip, with ratio='sequence-sum'", "TRL: 0.2")
    kl_coef: float = setting(0.03, "coefficient of the KL in the reward; 0 removes it", "paper, by TRL's paper index")
    empty_rows: Literal["skip", "count"] = setting(
        "skip", "whether a response without tokens counts in the mean", "verl: skip (TRL: count)"
    )

    def compose(self) -> Objective:
        """Return the composition."""
        clipped = self.ratio == "sequence-sum"
        return self.composition(
            shaping=(SequenceKLPenalty(self.kl_coef),) if self.kl_coef else (),
            advantage=LeaveOneOut(),
            ratio=SequenceSumRatio() if clipped else NoRatio(),
            surrogate=PPOClip(self.clip_low, self.clip_high) if clipped else PolicyGradient(),
            reducer=SequenceMean(self.empty_rows) if clipped else SequenceSum(empty_rows=self.empty_rows),
        )
