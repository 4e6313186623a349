"""Maximum-entropy policy gradient: soft actor-critic's two ideas, on groups of responses.

Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", arXiv 1812.05905 (temperature, eq. 18), and
"Reinforcement Learning with Deep Energy-Based Policies", arXiv 1702.08165 (soft value, eq. 3).

    J = (1/N) sum_i sum_t [ P(r_{i,t}, A_i; low, high) + alpha H_{i,t} ]
    A_i = R_i - tau log mean_j exp(R_j / tau)                                    soft value of the group as baseline
    alpha <- alpha exp(-rate (H - target))                                       after every optimizer step

Experimental: an idea carried over, no published recipe. The bonus is the entropy itself, differentiated over the
vocabulary, not -log pi of samples. `tuning="steps"` is Skywork-OR1's rule as TRL has it (`use_adaptive_entropy`):
alpha up or down by `temperature_rate`, and no bonus while the entropy is above the target. tau and alpha are two
settings: alpha falls to nearly nothing while the entropy is high, and tau with it would leave the best response alone
without a push down. The temperature is saved with checkpoints; `state/temperature` shows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tepo.objectives.advantages import Advantage, GroupNormalized
from tepo.objectives.max_entropy import DualAscent, SoftBaseline, Steps, TemperedEntropy
from tepo.objectives.method import Method, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import TokenRatio
from tepo.objectives.reducers import TokenMean
from tepo.objectives.regularizers import Regularizer
from tepo.objectives.surrogates import PPOClip


@dataclass(frozen=True, kw_only=True)
class MaxEntropy(Method):
    """PPO with the group's soft value as baseline and an entropy bonus tuned to a target."""

    name = "max-entropy"
    paper = Paper("Soft Actor-Critic Algorithms and Applications", 2018, "1812.05905")
    formula = "J = 1/N Σᵢ Σₜ [ min(rᵢₜAᵢ, clip(rᵢₜ)Aᵢ) + αHᵢₜ ],  Aᵢ = Rᵢ - τ log mean exp(R/τ),  α ← α·exp(-η(H - H̄))"
    status = "experimental"

    temperature: float = setting(1e-3, "alpha, or where it starts", "ours", "experimental")
    target_entropy: float = setting(
        0.3, "nats a token that alpha aims at; set it below what training starts with", "ours", "experimental"
    )
    tuning: Literal["dual", "steps", "fixed"] = setting("dual", "how alpha follows the entropy", "1812.05905 eq. 18")
    temperature_rate: float = setting(
        0.1, "dual: factor e^(rate x nats off target) a step; steps: what alpha moves by", "ours", "experimental"
    )
    temperature_max: float = setting(0.1, "largest alpha", "ours", "experimental")
    baseline: Literal["soft", "mean"] = setting("soft", "soft value or mean of the group", "1702.08165 eq. 3")
    baseline_temperature: float = setting(1.0, "tau, in units of reward; large is the mean", "ours", "experimental")
    clip_low: float = setting(0.2, "lower clip of the ratio", "DAPO", "inferred")
    clip_high: float = setting(0.28, "upper clip of the ratio", "DAPO", "inferred")

    def compose(self) -> Objective:
        """Return the composition."""
        soft: Advantage = SoftBaseline(self.baseline_temperature)
        return self.composition(
            advantage=soft if self.baseline == "soft" else GroupNormalized(scale="none"),
            ratio=TokenRatio(),
            surrogate=PPOClip(self.clip_low, self.clip_high),
            reducer=TokenMean(),
        )

    def regularizers(self) -> tuple[Regularizer, ...]:
        """Return the tuned bonus and the shared terms."""
        rule = Steps if self.tuning == "steps" else DualAscent
        rate = 0.0 if self.tuning == "fixed" else self.temperature_rate
        bonus = TemperedEntropy(self.temperature, rule(self.target_entropy, rate, self.temperature_max))
        return (bonus, *super().regularizers())
