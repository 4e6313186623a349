"""CoDistill-GRPO: a small and a large policy trained together, the small one sampling for both (arXiv 2605.08873).

    small:  GRPO on R_i + alpha (1/L_i) sum_t (log pi_large - log pi_small)_t: distillation as a reward
    large:  J = (1/G) sum_i (1/L_i) sum_t w_t min(r_t A_i, clip(r_t) A_i),  A from R alone
            r_t = pi_large / pi_large,old,  w_t = min(pi_large,old / pi_small,old, cap), a constant

Experimental. Known, from secondary readings: the two roles, the log-ratio as a reward, importance reweighting of the
large policy by pi_large / pi_small. Ours: the mean over the response, alpha, where the reward enters (before the group
is normalised), and that the cross-policy ratio is a truncated weight beside a clip against the large policy's own old
values, since a clip against the small one would cut nearly every token. Not here: the paper's
down-sampling of rollouts by a combined score, since the public record tells neither the score nor how many rollouts
stay. Pitfall: in a group whose task rewards all agree, the normalisation blows the distillation
reward alone up to variance 1. The small policy is the run's model; `partner.path` names the large one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tepo.objectives.method import GroupMethod, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import TokenRatio
from tepo.objectives.reducers import SequenceMean
from tepo.objectives.shaping import DistillationReward
from tepo.objectives.surrogates import PPOClip
from tepo.objectives.weights import Truncated


@dataclass(frozen=True, kw_only=True)
class CoDistillGRPO(GroupMethod):
    """GRPO of two policies on the small one's samples; the large one is the small one's teacher."""

    name = "codistill-grpo"
    paper = Paper("CoDistill-GRPO", 2026, "2605.08873")
    formula = (
        "J = 1/G Σᵢ 1/Lᵢ Σₜ min(rᵢₜAᵢ, clip(rᵢₜ, 1-ε, 1+ε)Aᵢ),  Aᵢ = (Rᵢ + α/Lᵢ Σₜ log π_large/π_small - mean)/std;  "
        "large: the same with R alone, times min(π_large/π_small, c)"
    )
    status = "experimental"

    distill_coef: float = setting(0.1, "coefficient of the distillation reward", "not public: ours", "experimental")
    partner_cap: float = setting(
        2.0, "cap of the large policy's importance weight", "not public: open-instruct's cap", "experimental"
    )
    clip_low: float = setting(0.2, "lower clip of either ratio", "GRPO's: 0.2", "inferred")
    clip_high: float = setting(0.2, "upper clip of either ratio", "GRPO's: 0.2", "inferred")

    def compose(self) -> Objective:
        """Return the small policy's objective, with the large one's as its partner."""
        own = self.composition(
            advantage=self.normalized(),
            ratio=TokenRatio(),
            surrogate=PPOClip(self.clip_low, self.clip_high),
            reducer=SequenceMean(),
        )
        large = dataclasses.replace(own, name=f"{self.name}/partner", weight=Truncated(self.partner_cap))
        return dataclasses.replace(own, shaping=(DistillationReward(self.distill_coef),), partner=large)
