"""S-GRPO and T-SPMO: learning from few tokens of a response.

Lee and Tong, "Token-Efficient RL for LLM Reasoning", arXiv 2504.20834.

    S-GRPO  J = (1/G) sum_i (1/|S_i|) sum_{t in S_i} [ P(r_{i,t}, A_i; eps, eps) - beta k3(pi || pi_ref) ]
            S_i: the first `always` tokens, then each with `probability`, at most `most` in all
    T-SPMO  J = (1/|pairs|) sum over (prefix p, next token v) of r_v A(v|p),  A(v|p) = E[R | p, v] - E[R | p]

Confirmed by the abstract: random subsets (30 to 50 % of the tokens; here 40 %), and token credit from matching
prefixes within the group (under 5 %). Inferred, so experimental: the sampling rule, both denominators, that T-SPMO has
no clip (its L2 regularisation is weight decay here). S-GRPO's draw is a function of `seed`, row id and place, so it
is the same in every epoch and for any split. T-SPMO counts a (prefix, token) once however many responses share it,
and only where credit is not 0. Not Stable GRPO nor Serial-Group GRPO, which share the name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tepo.objectives.method import GroupMethod, Method, Paper, setting
from tepo.objectives.objective import Objective
from tepo.objectives.ratios import TokenRatio
from tepo.objectives.reducers import SequenceMean, TokenMean
from tepo.objectives.regularizers import KL, Regularizer
from tepo.objectives.selectors import RandomTokens, Selector
from tepo.objectives.surrogates import PPOClip, Unclipped
from tepo.objectives.trie import PrefixAdvantage, UniquePrefixes

PAPER = Paper("Token-Efficient RL for LLM Reasoning", 2025, "2504.20834")


@dataclass(frozen=True, kw_only=True)
class SGRPO(GroupMethod):
    """GRPO on a random subset of every response's tokens."""

    name = "s-grpo"
    paper = PAPER
    formula = "J = 1/G Σᵢ 1/|Sᵢ| Σ_{t∈Sᵢ} [ min(rᵢₜAᵢ, clip(rᵢₜ)Aᵢ) - β·KL(π‖π_ref)ᵢₜ ],  Sᵢ a random subset"
    status = "experimental"
    notes = "The sampling rule is reconstructed; a token left out carries neither the policy term nor the KL."

    probability: float = setting(0.4, "chance of a token to be used", "abstract: 30 to 50 %", "inferred")
    always: int = setting(0, "the first tokens of a response that are always used", "from memory", "experimental")
    most: int | None = setting(None, "at most this many tokens of a response", "from memory", "experimental", lowest=1)
    seed: int = setting(0, "seed of the draw", "ours", lowest=-math.inf)
    clip_low: float = setting(0.2, "lower clip of the ratio", "GRPO", "inferred")
    clip_high: float = setting(0.2, "upper clip of the ratio", "GRPO", "inferred")
    kl_coef: float = setting(0.0, "coefficient of the KL to the reference", "ours: none", "inferred")

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            advantage=self.normalized(),
            ratio=TokenRatio(),
            surrogate=PPOClip(self.clip_low, self.clip_high),
            reducer=SequenceMean(),
        )

    def selectors(self) -> tuple[Selector, ...]:
        """Return the row filters, then the draw."""
        return (*super().selectors(), RandomTokens(self.probability, self.always, self.most, self.seed))

    def regularizers(self) -> tuple[Regularizer, ...]:
        """Return the KL, if any, and the shared terms."""
        return (*((KL(self.kl_coef, "reference"),) if self.kl_coef else ()), *super().regularizers())


@dataclass(frozen=True, kw_only=True)
class TSPMO(Method):
    """Credit for the tokens at which the responses of a group part, from the rewards of each branch."""

    name = "t-spmo"
    paper = PAPER
    formula = "J = 1/|pairs| Σ_{(p,v)} r_v·A(v|p),  A(v|p) = E[R | p,v] - E[R | p]"
    status = "experimental"
    notes = "Prefixes are compared by token ids; tool output between them is passed over."

    def compose(self) -> Objective:
        """Return the composition."""
        return self.composition(
            advantage=PrefixAdvantage(), ratio=TokenRatio(), surrogate=Unclipped(), reducer=TokenMean()
        )

    def selectors(self) -> tuple[Selector, ...]:
        """Return the row filters, then one token for every pair."""
        return (*super().selectors(), UniquePrefixes())
