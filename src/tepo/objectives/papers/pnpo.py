"""PNPO: prefix-normalised policy optimisation (arXiv 2608.01418). Experimental.

    w_{i,t} = exp((1/t) sum_{k<=t} D_{i,k}),  D = log pi/pi_old
    rejection: J = (1/N) sum_i sum_t 1[lo <= w_{i,t} <= hi] w_{i,t} A_i
    clip:      J = (1/N) sum_i sum_t min(w_{i,t} A_i, clip(w_{i,t}, 1-low, 1+high) A_i)

Confirmed by the abstract: the cumulative ratio of a token's prefix is replaced by its geometric mean; better than
GSPO with 4 epochs a rollout batch, not consistently with 1. Reported by readers: hard rejection, the same statistic
as weight and as test. Not public to us, so ours: the thresholds (a method built on it rejects outside [0.5, 5]), the
token mean, and whether w is differentiated. `gradient="prefix"` does, so that an early token hears from every later
one, 1/t from each; "token" keeps w as a weight and gives each token its own gradient. t counts response tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tepo.objectives.method import GroupMethod, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import PrefixRatio
from tepo.objectives.reducers import ReducerName, reducer_of
from tepo.objectives.surrogates import PPOClip, Rejection, Surrogate

BY_OTHERS = "a method built on it; the paper's is not public"


@dataclass(frozen=True, kw_only=True)
class PNPO(GroupMethod):
    """Group-normalised advantage, geometric-mean ratio of each token's prefix, rejection outside an interval."""

    name = "pnpo"
    paper = Paper(
        "Reusing Rollouts under Policy Lag: Prefix-Normalized Policy Optimization for LLM Reinforcement Learning",
        2026,
        "2608.01418",
    )
    formula = "J = 1/N Σᵢ Σₜ 1[lo <= wᵢₜ <= hi]·wᵢₜAᵢ,  wᵢₜ = exp(1/t Σₖ≤ₜ log πᵢₖ/π_old)"
    status = "experimental"
    notes = "Thresholds, reducer and gradient of the prefix ratio are ours until the paper's are public."

    surrogate: Literal["rejection", "clip"] = setting("rejection", "what bounds the ratio", "readers", "experimental")
    gradient: Literal["token", "prefix"] = setting(
        "token",
        "token: w is a weight, each token has its own gradient; prefix: w is differentiated",
        "ours",
        "experimental",
    )
    accept_low: float = setting(0.5, "smallest ratio that is not rejected", BY_OTHERS, "experimental")
    accept_high: float = setting(5.0, "largest ratio that is not rejected", BY_OTHERS, "experimental")
    clip_low: float = setting(0.2, "lower clip, with surrogate='clip'", "DAPO", "experimental")
    clip_high: float = setting(0.28, "upper clip, with surrogate='clip'", "DAPO", "experimental")
    reducer: ReducerName = setting("token-mean", "who is averaged over whom", "ours", "experimental")

    def compose(self) -> Objective:
        """Return the composition."""
        clipped: Surrogate = PPOClip(self.clip_low, self.clip_high)
        return self.composition(
            advantage=self.normalized(),
            ratio=PrefixRatio(self.gradient),
            surrogate=clipped if self.surrogate == "clip" else Rejection(self.accept_low, self.accept_high),
            reducer=reducer_of(self.reducer),
        )
