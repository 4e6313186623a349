"""DAPO: decoupled clip and dynamic sampling (Yu et al., arXiv 2503.14476, eq. 8-13).

    J = (1 / sum_i L_i) sum_i sum_t min(r_{i,t} A_i, clip(r_{i,t}, 1-low, 1+high) A_i),  0 < #correct < G

Confirmed in the paper: clip-higher 0.2/0.28, token-level mean, no KL. Dynamic sampling (groups without signal are
drawn again) is the trainer's `train.dynamic_sampling`; overlong filtering is `truncated="drop"`, the soft overlong
punishment (eq. 13) `overlong_length` and `overlong_cache`. The paper divides per group; verl and TRL, and so our
default, divide by the whole mini-batch (`scope`). The punishment enters the group's mean and deviation; which groups
have a signal is judged by the reward before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tepo.objectives.method import GroupMethod, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import TokenRatio
from tepo.objectives.reducers import TokenMean
from tepo.objectives.shaping import Shaping, SoftOverlong
from tepo.objectives.surrogates import PPOClip


@dataclass(frozen=True, kw_only=True)
class DAPO(GroupMethod):
    """Group-normalised advantage, token ratio with a higher upper clip, token mean."""

    name = "dapo"
    paper = Paper("DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025, "2503.14476")
    formula = "J = 1/Σᵢ Lᵢ Σᵢ Σₜ min(rᵢₜAᵢ, clip(rᵢₜ, 1-ε₋, 1+ε₊)Aᵢ),  Aᵢ = (Rᵢ - mean)/std"
    status = "confirmed"

    clip_low: float = setting(0.2, "lower clip of the ratio", "section 4.1")
    clip_high: float = setting(0.28, "upper clip of the ratio", "section 4.1")
    clip_dual: float | None = setting(None, "dual clip for A < 0", "paper: none (its verl script: 10)")
    scope: Literal["mini", "group"] = setting(
        "mini",
        "whose tokens divide: the mini-batch's, or each group's (as the paper writes)",
        "verl, TRL: mini",
    )
    overlong_length: int | None = setting(
        None, "longest response, in tokens: nearing it costs up to overlong_penalty; none: no punishment", "ours: off"
    )
    overlong_cache: int = setting(
        4096, "tokens before overlong_length over which the punishment grows", "section 4.1", lowest=1
    )
    overlong_penalty: float = setting(1.0, "punishment at overlong_length and beyond", "eq. 13: 1")

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            shaping=self.overlong(),
            advantage=self.normalized(),
            ratio=TokenRatio(),
            surrogate=PPOClip(self.clip_low, self.clip_high, self.clip_dual),
            reducer=TokenMean(self.scope),
        )

    def overlong(self) -> tuple[Shaping, ...]:
        """Return the soft overlong punishment, if any."""
        if self.overlong_length is None:
            return ()
        return (SoftOverlong(self.overlong_length, self.overlong_cache, self.overlong_penalty),)


@dataclass(frozen=True, kw_only=True)
class DAPOOverlong(DAPO):
    """DAPO with both of its pieces against overlong responses, at the paper's lengths."""

    name = "dapo-overlong"
    formula = DAPO.formula + ",  Rᵢ ← Rᵢ - min(1, max(0, Lᵢ - (L_max - L_cache))/L_cache)"
    notes = "Set overlong_length to the sampling limit; the paper's table adds both pieces, its verl script one."

    truncated: Literal["keep", "drop"] = setting(
        "drop", "drop: responses cut at the length limit leave the loss, not the group's statistics", "table 1"
    )
    overlong_length: int | None = setting(20480, "longest response, in tokens; none: no punishment", "section 4.1")
