"""InstructGPT: PPO on a reward model, with the KL to the reference in the reward (Ouyang et al., arXiv 2203.02155).

    reward_t = -beta log(pi_old / pi_ref)_t + 1[t = last] RM(q, o)            (eq. 2, first line)
    A by GAE on these token rewards, policy and value losses as PPO's

The reward model is a sequence-classification model (`reward.kind = "model"`); any other reward does as well. The KL is
that of the sampling policy, a constant of the updates. The coefficient is fixed, or steered to a target by the
controller of arXiv 1909.08593 (eq. 4 there: once a batch and by the KL of whole responses; here once an optimizer
step, by the KL of a token, as verl measures it). Confirmed: the reward's formula; beta 0.02, clip 0.2, lambda 0.95,
gamma 1 are from memory of the paper's appendix C.

The pre-training mix of eq. 2 (PPO-ptx), gamma_ptx E log pi(x) on text, is off unless ptx_coef is set: the trainer adds
it to every update, as a mean over tokens (the paper's 27.8 goes with a normalisation that it does not state).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tepo.objectives.method import Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.papers.ppo import PPO
from tepo.objectives.regularizers import AdaptiveCoefficient
from tepo.objectives.shaping import ClippedReward, Shaping, TokenKLPenalty


@dataclass(frozen=True, kw_only=True)
class InstructGPT(PPO):
    """PPO whose token rewards carry the KL to the reference, on a reward model's score."""

    name = "instructgpt"
    paper = Paper("Training language models to follow instructions with human feedback", 2022, "2203.02155")
    formula = f"{PPO.formula},  rewardₜ = -β log(π_old/π_ref)ₜ + 1[t last]·RM"
    status = "confirmed"

    kl_coef: float = setting(
        0.02, "coefficient of the KL in the reward; 0 removes it", "appendix C, from memory (TRL: 0.05)", "inferred"
    )
    kl_adapt_to: float | None = setting(
        None, "steer kl_coef so that the KL to the reference stays near this many nats a token", "paper: fixed"
    )
    reward_clip: float | None = setting(None, "bound of the reward model's score", "ours: none (OpenRLHF: 10)")

    ptx_coef: float = setting(
        0.0, "coefficient of the log-likelihood of pre-training text, a mean over tokens; 0 is plain PPO", "paper: 27.8"
    )

    def compose(self) -> Objective:
        """Return the composition."""
        return dataclasses.replace(super().compose(), ptx_coef=self.ptx_coef)

    def shaping(self) -> tuple[Shaping, ...]:
        """Return the bounded score and the KL in the reward."""
        parts: list[Shaping] = []
        if self.reward_clip is not None:
            parts.append(ClippedReward(self.reward_clip))
        if self.kl_coef:
            adaptive = None if self.kl_adapt_to is None else AdaptiveCoefficient(self.kl_adapt_to)
            parts.append(TokenKLPenalty(self.kl_coef, adaptive))
        return tuple(parts)
