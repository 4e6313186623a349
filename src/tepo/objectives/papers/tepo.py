"""TEPO: token-level policy optimisation through the sequence-level likelihood.

Lin et al., "Token-Level Policy Optimization: Linking Group-Level Rewards to Token-Level Aggregation via
Sequence-Level Likelihood", ACL 2026 (long 1488), arXiv 2604.12736; first text arXiv 2510.09369 ("... via Markov
Likelihood"), which has no KL mask.

    J = (1/N) sum_i sum_t [ min(s_i A_i, clip(s_i, 1-low, 1+high) A_i) - kl_coef * M_{i,t} * KL_{i,t} ]
    s_i = exp((1/L_i) sum_t log pi(o_t)/pi_old(o_t))    M_{i,t} = 1[A_i > 0] 1[entropy decreasing at (i,t)]

Confirmed by the abstracts: a sequence-level likelihood links the group's reward to token-level aggregation; a
token-level KL mask targets tokens with positive advantage and decreasing entropy, to mitigate abrupt updates.
Reported by readers: the ratio is a geometric mean; 64 prompts x 8 responses, 8 updates a rollout batch.
Inferred by us (the paper's text and code are not public to us): group-normalised advantage, the token mean, the
clip range, and everything about the KL (coefficient, estimator, target, how a decrease is decided, denominator).

At the first update of a rollout batch the entropies are equal and the mask is empty, so TEPO's gradient is
DAPO's; the two differ from the second update on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tepo.objectives.method import Method, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import SequenceRatio, SequenceTokenRatio
from tepo.objectives.reducers import TokenMean
from tepo.objectives.regularizers import KL, Estimator, FallingEntropy, Regularizer
from tepo.objectives.surrogates import PPOClip


@dataclass(frozen=True, kw_only=True)
class TEPOMarkov(Method):
    """The 2025 version: sequence likelihood and token mean, no KL mask."""

    name = "tepo-markov"
    paper = Paper("Token-Level Policy Optimization ... via Markov Likelihood", 2025, "2510.09369")
    formula = "J = 1/N Σᵢ Σₜ min(sᵢAᵢ, clip(sᵢ, 1-ε₋, 1+ε₊)Aᵢ),  sᵢ = exp(1/Lᵢ Σₜ log π/π_old)"
    status = "inferred"

    ratio: Literal["sequence", "sequence-token"] = setting(
        "sequence",
        "sequence-token: the same value with each token's own gradient",
        "readers report a geometric mean",
        "inferred",
    )
    clip_low: float = setting(0.2, "lower clip of the ratio", "DAPO; the paper's is not public", "inferred")
    clip_high: float = setting(0.28, "upper clip of the ratio", "DAPO; the paper's is not public", "inferred")
    clip_dual: float | None = setting(None, "dual clip for A < 0", "DAPO: none; the paper's is not public", "inferred")

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            ratio=SequenceRatio() if self.ratio == "sequence" else SequenceTokenRatio(),
            surrogate=PPOClip(self.clip_low, self.clip_high, self.clip_dual),
            reducer=TokenMean(),
        )


@dataclass(frozen=True, kw_only=True)
class TEPO(TEPOMarkov):
    """The ACL 2026 version, with the token-level KL mask."""

    name = "tepo"
    paper = Paper(
        "Token-Level Policy Optimization: Linking Group-Level Rewards to Token-Level Aggregation via "
        "Sequence-Level Likelihood",
        2026,
        "2604.12736",
        "ACL 2026 long 1488",
    )
    formula = (
        "J = 1/N Σᵢ Σₜ [ min(sᵢAᵢ, clip(sᵢ, 1-ε₋, 1+ε₊)Aᵢ) - β·1[Aᵢ>0]·1[ΔHᵢₜ<0]·KLᵢₜ ],  sᵢ = exp(1/Lᵢ Σₜ log π/π_old)"
    )
    notes = "The KL's coefficient, estimator, target and entropy criterion are ours until the paper's are public."

    kl_coef: float = setting(1.0, "coefficient of the masked KL; 0 removes it", "KL-Cov's 1 with abs", "inferred")
    kl_estimator: Estimator = setting(
        "k3",
        "k3 does nothing near the old policy and grows with abrupt change",
        "ours: the paper's is not public",
        "inferred",
    )
    kl_target: Literal["old", "reference"] = setting(
        "old", "the policy the KL holds to", "ours: the paper's is not public; old needs no second model", "inferred"
    )
    kl_norm: Literal["all", "masked"] = setting(
        "all", "tokens that divide the KL term", "ours: the paper's is not public", "inferred"
    )
    entropy_criterion: Literal["realised", "first-order", "sign"] = setting(
        "realised", "how a decreasing entropy is decided", "literal reading of the abstract", "inferred"
    )
    entropy_margin: float = setting(1e-3, "nats of decrease that float noise does not reach", "ours", "inferred")

    def regularizers(self) -> tuple[Regularizer, ...]:
        """Return the masked KL and the shared terms."""
        if self.kl_coef == 0:
            return super().regularizers()
        mask = FallingEntropy(self.entropy_criterion, self.entropy_margin)
        kl = KL(self.kl_coef, self.kl_target, self.kl_estimator, mask, self.kl_norm)
        return (kl, *super().regularizers())
