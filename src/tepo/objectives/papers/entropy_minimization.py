"""Entropy minimisation: training on the policy's own confidence, without any reward.

Agarwal et al., "The Unreasonable Effectiveness of Entropy Minimization in LLM Reasoning", arXiv 2505.15134.

    EM-FT            minimise the entropy of the tokens of own samples, differentiated directly      (section 3.1)
    EM-RL-sequence   R_i = sum_t log pi(o_{i,t})                                                     (eq. 3)
    EM-RL-token      R_i = -sum_t H_{i,t}                                                            (eq. 4)
    EM-RL            J = (1/G) sum_i A_i sum_t log pi,  A_i = R_i - mean of the others,  KL to the start policy
    EM-INF           z <- a few Adam steps down H(softmax z) + w KL(p || softmax z), then draw       (section 4)

Confirmed in the paper: the rewards (its Table 1), the leave-one-out baseline, a KL weighted 0.001, 4 samples a
prompt, learning rate 1e-6. EM-FT is the sum over tokens there; a mean over tokens differs by a constant and does not
depend on lengths. EM-INF's objective and settings are those of the authors' evaluation script; the paper tells of 5 to
15 steps and thresholds of 0.1 to 0.5. It trains nothing: the sampler has it (`sampling.em_inf`).
Inferred: that EM-RL's KL is in the reward, as in RLOO. Rewards are the sampling policy's values.
Collapse is the goal: stop early, and look at samples. Dynamic sampling looks at the task's rewards, so leave it off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tepo.objectives.advantages import LeaveOneOut
from tepo.objectives.described import DecodingOption
from tepo.objectives.entropy_rewards import ConfidenceReward, NoAdvantage, TokenEntropy
from tepo.objectives.method import Method, Paper, Setting, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import NoRatio, TokenRatio
from tepo.objectives.reducers import Reducer, SequenceMean, SequenceSum, TokenMean
from tepo.objectives.shaping import SequenceKLPenalty, Shaping
from tepo.objectives.surrogates import PolicyGradient, PPOClip

PAPER = Paper("The Unreasonable Effectiveness of Entropy Minimization in LLM Reasoning", 2025, "2505.15134")


@dataclass(frozen=True, kw_only=True)
class EMRLSequence(Method):
    """REINFORCE with the response's own log-likelihood as the only reward."""

    name = "em-rl-sequence"
    paper = PAPER
    formula = "J = 1/G Σᵢ Aᵢ Σₜ log πᵢₜ,  Aᵢ = Rᵢ - mean of the others,  Rᵢ = Σₜ log π_old(oᵢₜ) - β Σₜ log π_old/π_ref"
    status = "confirmed"

    ratio: Literal["none", "token"] = setting(
        "none", "token: a clipped token ratio, for several updates a rollout batch", "paper's Table 1: none"
    )
    clip_low: float = setting(0.2, "lower clip, with ratio='token'", "verl: 0.2")
    clip_high: float = setting(0.2, "upper clip, with ratio='token'", "verl: 0.2")
    kl_coef: float = setting(1e-3, "coefficient of the KL in the reward; 0 removes it", "section 3.3")

    def compose(self) -> Objective:
        """Return the composition."""
        clipped = self.ratio == "token"
        kl: tuple[Shaping, ...] = (SequenceKLPenalty(self.kl_coef),) if self.kl_coef else ()
        return self.composition(
            shaping=(self.reward(), *kl),
            advantage=LeaveOneOut(),
            ratio=TokenRatio() if clipped else NoRatio(),
            surrogate=PPOClip(self.clip_low, self.clip_high) if clipped else PolicyGradient(),
            reducer=SequenceSum(),
        )

    def reward(self) -> ConfidenceReward:
        """Return the reward."""
        return ConfidenceReward("sequence")


@dataclass(frozen=True, kw_only=True)
class EMRLToken(EMRLSequence):
    """REINFORCE with the negative entropy of the response's tokens as the only reward."""

    name = "em-rl-token"
    formula = "J = 1/G Σᵢ Aᵢ Σₜ log πᵢₜ,  Aᵢ = Rᵢ - mean of the others,  Rᵢ = -Σₜ Hᵢₜ - β Σₜ log π_old/π_ref"

    def reward(self) -> ConfidenceReward:
        """Return the reward."""
        return ConfidenceReward("token")


@dataclass(frozen=True, kw_only=True)
class EMFT(Method):
    """Minimise the mean entropy of the tokens of own samples."""

    name = "em-ft"
    paper = PAPER
    formula = "J = -1/N Σᵢ Σₜ Hᵢₜ"
    status = "confirmed"

    reducer: Literal["token-mean", "sequence-mean", "sequence-sum"] = setting(
        "token-mean", "who is averaged over whom; sequence-sum is the paper's Table 1", "ours", "inferred"
    )

    def compose(self) -> Objective:
        """Return the composition."""
        reducers: dict[str, Reducer] = {
            "token-mean": TokenMean(),
            "sequence-mean": SequenceMean(),
            "sequence-sum": SequenceSum(),
        }
        return self.composition(
            advantage=NoAdvantage(), ratio=NoRatio(), surrogate=TokenEntropy(), reducer=reducers[self.reducer]
        )


_SCRIPT = "the authors' script"
EM_INF = DecodingOption(
    name="em-inf",
    paper=PAPER,
    formula="z ← z - η·Adam[f(z)] while H(softmax(z)) ≥ τ,  f(z) = H(softmax(z)) + w·KL(p ‖ softmax(z))",
    status="confirmed",
    summary="Decoding option: sharpen every token's distribution by minimising its entropy before it is drawn.",
    notes="Nothing of the model changes. Inferred: that temperature divides the logits first.",
    section="sampling.em_inf",
    settings=(
        Setting("steps", "int", 3, "Most Adam steps a token.", f"{_SCRIPT}: 3 (paper: 5 to 15)"),
        Setting("lr", "float", 0.1, "Size of a step, in units of a logit.", f"{_SCRIPT}: 0.1"),
        Setting(
            "threshold",
            "float",
            0.3,
            "Entropy (nats) below which a token's logits are left as they are.",
            f"{_SCRIPT}: 0.3 (paper: 0.1 to 0.5)",
        ),
        Setting(
            "kl_coef",
            "float",
            0.05,
            "Coefficient of the KL from the distribution as it was, which holds the logits back.",
            f"{_SCRIPT}: 0.05",
        ),
    ),
)
