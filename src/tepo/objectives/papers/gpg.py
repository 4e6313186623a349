"""GPG: group policy gradient (Chu et al., arXiv 2504.02546).

    J = reduce(A_i log pi),  A_i = alpha (R_i - mean_g) / F,  alpha = B / (B - M)

No ratio, no clip, no KL, no critic. B groups in the batch, M of them with equal rewards and so without a gradient;
alpha makes up for them, so that the step does not shrink as the task is learnt. The paper's definition, from memory;
its code divides by the share of groups that remain instead, which is the same up to 1e-5. `alpha="rewards"` is what
verl's estimator computes: B / (number of responses with a reward other than 0), which is 1 for rewards of +1 and -1.
F is 1 (the paper's) or the group's standard deviation. Confirmed but for alpha, whose source is above. Only the first
update of a rollout batch is on-policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tepo.objectives.advantages import Advantage, GroupNormalized
from tepo.objectives.baselines import SignalRescaled
from tepo.objectives.method import GroupMethod, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import NoRatio
from tepo.objectives.reducers import ReducerName, reducer_of
from tepo.objectives.surrogates import PolicyGradient


@dataclass(frozen=True, kw_only=True)
class GPG(GroupMethod):
    """Plain policy gradient of centred rewards, rescaled for the groups without signal."""

    name = "gpg"
    paper = Paper("GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning", 2025, "2504.02546")
    formula = "J = 1/N Σᵢ Σₜ Aᵢ log πᵢₜ,  Aᵢ = α(Rᵢ - mean)/F,  α = B/(B - M)"
    status = "confirmed"

    alpha: Literal["groups", "rewards", "none"] = setting(
        "groups", "groups: B/(B-M) groups; rewards: verl's B/(number of rewards not 0); none: 1", "paper", "inferred"
    )
    divide_by_std: bool = setting(False, "whether F is the group's standard deviation, and not 1", "paper: F = 1")
    reducer: ReducerName = setting(
        "token-mean", "who is averaged over whom", "verl: token-mean (authors' code: sequence-mean)", "inferred"
    )

    def compose(self) -> Objective:
        """Return the composition."""
        scaled = self.normalized() if self.divide_by_std else GroupNormalized("none")
        advantage: Advantage = scaled if self.alpha == "none" else SignalRescaled(scaled, self.alpha)
        return self.composition(
            advantage=advantage,
            ratio=NoRatio(),
            surrogate=PolicyGradient(),
            reducer=reducer_of(self.reducer),
        )
