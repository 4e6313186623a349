"""OPO: on-policy RL with optimal reward baseline (Hao et al., arXiv 2505.23585).

    J = reduce(A_i log pi),  A_i = R_i - sum_j L_j R_j / sum_j L_j

The baseline that minimises the gradient's variance, where the squared gradient of a response is proportional to its
length. No KL, no entropy term, no ratio: the paper insists on exactly one update a rollout batch
(`train.mini_batches = 1`, `train.epochs = 1`), and nothing here corrects later ones. Confirmed: the baseline (verl's
estimator is the authors'). Inferred: the token mean, which is verl's default.
"""

from __future__ import annotations

from dataclasses import dataclass

from tepo.objectives.baselines import LengthWeightedBaseline
from tepo.objectives.method import Method, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import NoRatio
from tepo.objectives.reducers import ReducerName, reducer_of
from tepo.objectives.surrogates import PolicyGradient


@dataclass(frozen=True, kw_only=True)
class OPO(Method):
    """Plain policy gradient with the length-weighted mean reward as baseline."""

    name = "opo"
    paper = Paper("On-Policy RL with Optimal Reward Baseline", 2025, "2505.23585")
    formula = "J = 1/N Σᵢ Σₜ Aᵢ log πᵢₜ,  Aᵢ = Rᵢ - Σⱼ LⱼRⱼ / Σⱼ Lⱼ"
    status = "confirmed"

    reducer: ReducerName = setting("token-mean", "who is averaged over whom", "verl: token-mean", "inferred")

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            advantage=LengthWeightedBaseline(),
            ratio=NoRatio(),
            surrogate=PolicyGradient(),
            reducer=reducer_of(self.reducer),
        )
