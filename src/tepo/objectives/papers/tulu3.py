"""Tulu 3 RLVR: PPO on a verifiable reward (Lambert et al., arXiv 2411.15124, section 6, eq. 7 and 8).

    R = v if the answer is verifiably right, else 0; -10 where the response was cut before its end
    reward_t = -beta log(pi_old / pi_ref)_t + 1[t = last] R,  A by GAE, whitened; policy and value losses as PPO's

Confirmed: v = 10, the penalty -10 that takes the reward's place, beta 0.05 (0.07 for 70B), clip 0.2, whitened
advantages (open-instruct's Tulu 3 documentation and its PPO script). The critic of the paper starts from a reward
model: give its folder as `critic.path`. Differences: open-instruct takes masked means per micro-batch, we per
mini-batch; `correct` is a full score of the reward, so partial scores count as wrong. lam and value_coef are
open-instruct's as its script had them, from memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tepo.objectives.method import Paper, setting
from tepo.objectives.papers.ppo import PPO
from tepo.objectives.shaping import MissingEOS, Shaping, TokenKLPenalty, Verified


@dataclass(frozen=True, kw_only=True)
class Tulu3RLVR(PPO):
    """PPO on a reward of 10 for a verified answer, -10 for a missing end, and the KL to the reference in it."""

    name = "tulu3-rlvr"
    paper = Paper("Tulu 3: Pushing Frontiers in Open Language Model Post-Training", 2024, "2411.15124")
    formula = f"{PPO.formula},  rewardₜ = -β log(π_old/π_ref)ₜ + 1[t last]·R,  R = 10·1[right], -10 if cut"
    status = "confirmed"

    lam: float = setting(0.95, "GAE's lambda: 1 trusts returns, 0 the critic", "open-instruct, from memory", "inferred")
    kl_coef: float = setting(0.05, "coefficient of the KL in the reward; 0 removes it", "Tulu 3 documentation: 0.05")
    verified_reward: float = setting(10.0, "reward of a verified answer", "paper: 10")
    missing_eos: float | None = setting(
        -10.0,
        "reward of a response cut at the length limit, in place of its own; None: its own",
        "open-instruct: -10",
        lowest=-math.inf,
    )

    def shaping(self) -> tuple[Shaping, ...]:
        """Return the verdict, the missing end and the KL in the reward."""
        parts: list[Shaping] = [Verified(self.verified_reward)]
        if self.missing_eos is not None:
            parts.append(MissingEOS(self.missing_eos))
        if self.kl_coef:
            parts.append(TokenKLPenalty(self.kl_coef))
        return tuple(parts)
