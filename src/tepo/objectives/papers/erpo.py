"""ERPO: token advantages gated by entropy (experimental).

Yu et al., "ERPO: Token-Level Entropy-Regulated Policy Optimization for Large Reasoning Models", arXiv 2603.28204.

    A_{i,t} = A_i + eta W_{i,t} sgn(A_i) s~_{i,t},  kept on A_i's side of 0
    W_{i,t} = sigmoid(gamma z_G(H_{i,t}))                         entropy-aware gate, z over the group's tokens
    s~_{i,t} = z of log pi_old - log pi_ref over the group, inside equal stretches of the responses

Confirmed by the abstract: three parts, entropy-aware gating, normalisation inside buckets of progress, advantages
anchored by the result. By third parties' notes: W with gamma 5, Psi = W sgn(A) s~, and eta 0.2 as its weight.
Experimental, because put together by us: what the progress signal is (the implicit reward of the policy against its
start), the number of buckets, the sum, and that it never turns an advantage round. Base: DAPO's clips and token mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tepo.objectives.entropies import ProgressGate
from tepo.objectives.method import GroupMethod, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import TokenRatio
from tepo.objectives.reducers import TokenMean
from tepo.objectives.surrogates import PPOClip


@dataclass(frozen=True, kw_only=True)
class ERPO(GroupMethod):
    """DAPO with token advantages from progress, gated by entropy and anchored by the result."""

    name = "erpo"
    paper = Paper(
        "ERPO: Token-Level Entropy-Regulated Policy Optimization for Large Reasoning Models", 2026, "2603.28204"
    )
    formula = "J = 1/N Σᵢ Σₜ min(rᵢₜAᵢₜ, clip(rᵢₜ)Aᵢₜ),  Aᵢₜ = Aᵢ + η·σ(γ·z(Hᵢₜ))·sgn(Aᵢ)·s̃ᵢₜ"
    status = "experimental"
    notes = "The public record names the parts; how they are put together is ours."

    gate: float = setting(
        5.0, "gamma: how sharply the gate opens with entropy", "third-party notes", "experimental", lowest=-math.inf
    )
    progress: float = setting(0.2, "eta: size of the token term; 0 is DAPO", "third-party notes", "experimental")
    buckets: int = setting(10, "equal stretches of a response to normalise in", "ours", "experimental", lowest=1)
    clip_low: float = setting(0.2, "lower clip of the ratio", "DAPO", "inferred")
    clip_high: float = setting(0.28, "upper clip of the ratio", "DAPO", "inferred")
    clip_dual: float | None = setting(None, "dual clip for A < 0", "DAPO", "inferred")

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            advantage=self.normalized(),
            transforms=(ProgressGate(self.gate, self.progress, self.buckets),),
            ratio=TokenRatio(),
            surrogate=PPOClip(self.clip_low, self.clip_high, self.clip_dual),
            reducer=TokenMean(),
        )
