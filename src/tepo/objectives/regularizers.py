"""Regularisers: what holds the policy back. Each adds coef * reduce(values over its own tokens) to the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from tepo.core.errors import InputError
from tepo.objectives.batch import TokenBatch, require

State = Mapping[str, Tensor]
Estimator = Literal["k1", "abs", "k2", "k3", "k3-old", "full"]


@runtime_checkable
class Tuned(Protocol):
    """A part that tunes something on the way."""

    def init_state(self) -> dict[str, Tensor]:
        """Return the state at the start of a run."""
        ...

    def update(self, state: State, metrics: Mapping[str, float]) -> dict[str, Tensor]:
        """Return the state after an optimizer step with these metrics."""
        ...


class Regularizer(Protocol):
    """A term beside the policy term, with its own tokens, coefficient and (rarely) state."""

    @property
    def name(self) -> str:
        """The term's name in metrics and in the state."""
        ...

    @property
    def needs(self) -> frozenset[str]:
        """Fields of the token batch that this part reads."""
        ...

    @property
    def scores(self) -> frozenset[str]:
        """Statistics that the scorer must produce for it."""
        ...

    @property
    def norm(self) -> Literal["all", "masked"]:
        """Whether all tokens divide, or only the term's own."""
        ...

    @property
    def current(self) -> bool:
        """Whether its tokens depend on current-policy values over the whole mini-batch."""
        ...

    def values(self, batch: TokenBatch, clamp: float) -> Tensor:
        """Return the penalty of every token, `[B, T]`."""
        ...

    def tokens(self, batch: TokenBatch) -> Tensor:
        """Return which tokens carry the term, bool `[B, T]`."""
        ...

    def coefficient(self, state: State) -> Tensor | float:
        """Return the coefficient in force."""
        ...

    def init_state(self) -> dict[str, Tensor]:
        """Return the state at the start of a run."""
        ...

    def update(self, state: State, metrics: Mapping[str, float]) -> dict[str, Tensor]:
        """Return the state after an optimizer step with these metrics."""
        ...


class TokenMask(Protocol):
    """Which tokens a KL term holds back."""

    @property
    def needs(self) -> frozenset[str]:
        """Fields of the token batch that this part reads."""
        ...

    @property
    def scores(self) -> frozenset[str]:
        """Statistics that the scorer must produce for it."""
        ...

    @property
    def current(self) -> bool:
        """Whether the choice is made over the whole mini-batch, with the current policy's values."""
        ...

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Return bool `[B, T]`, a subset of the batch's mask."""
        ...


@dataclass(frozen=True)
class EveryToken:
    """The whole response."""

    current: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()
    scores: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Return the mask itself."""
        return batch.mask


@dataclass(frozen=True)
class FallingEntropy:
    """TEPO's mask: tokens with positive advantage whose entropy is decreasing (arXiv 2604.12736, abstract).

    How "decreasing" is decided is not public; three readings:
    `realised`     H < H_old - margin, both measured (ours; inferred);
    `first-order`  the exact first-order change of H under a step on A log p of this token is negative:
                   A [p (log p + H) - sum_v p_v^2 (log p_v + H)] > 0;
    `sign`         its cheap proxy, A (log p + H) > 0 (the sign condition of the paper's theorem, as reported).
    The margin (nats) applies to `realised` only: at equal weights, float noise alone makes H < H_old on nearly
    half of all tokens. Everything is detached: the mask is a decision, not a term.
    """

    criterion: Literal["realised", "first-order", "sign"] = "realised"
    margin: float = 1e-3
    current: ClassVar[bool] = False
    only_positive: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:
        """Entropies, and for `first-order` the second-moment statistics."""
        extra = {"old_entropy"} if self.criterion == "realised" else set()
        return frozenset({"entropy"} | extra | (self.scores - {"entropy"}))

    @property
    def scores(self) -> frozenset[str]:
        """What the scorer must produce."""
        return frozenset({"entropy", "sum_p2", "sum_p2_logp"} if self.criterion == "first-order" else {"entropy"})

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Return the masked tokens."""
        owner = "TEPO's KL mask"
        positive = batch.mask & (require(batch, "advantage", owner) > 0)
        entropy = require(batch, "entropy", owner).detach()
        if self.criterion == "realised":
            return positive & (entropy < require(batch, "old_entropy", owner).detach() - self.margin)
        logp = batch.logp.detach()
        if self.criterion == "sign":
            return positive & (logp + entropy > 0)
        p2, p2_logp = require(batch, "sum_p2", owner), require(batch, "sum_p2_logp", owner)
        change = logp.exp() * (logp + entropy) - (p2_logp + entropy * p2).detach()
        return positive & (change > 0)


@dataclass(frozen=True)
class AdaptiveCoefficient:
    """coef <- coef * (1 + gain * clip(KL / target - 1, -0.2, 0.2)) once an optimizer step (arXiv 1909.08593)."""

    target: float
    gain: float = 0.1

    def __post_init__(self) -> None:
        if not self.target > 0:
            raise InputError(f"kl_adapt_to={self.target}: expected a number of nats > 0, or none")

    def __call__(self, coef: Tensor, kl: float) -> Tensor:
        """Return the next coefficient."""
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return coef * (1.0 + self.gain * error)


@dataclass(frozen=True)
class KL:
    """coef * KL(policy, target) on some tokens; d = target_logp - logp, clamped, gradient 0 beyond.

    estimator: `k1` -d · `abs` |d| · `k2` d^2/2 · `k3` e^d - d - 1 (verl: low_var_kl) · `k3-old` e^-d + d - 1 ·
    `full` the exact sum over the vocabulary (reference only; from the scorer). As a loss, k1's expected gradient
    is 0 on-policy; abs, k2 and k3 do nothing at d = 0 (arXiv 2402.03300 eq. 4 for k3).
    """

    coef: float
    target: Literal["old", "reference"] = "old"
    estimator: Estimator = "k3"
    mask: TokenMask = EveryToken()
    norm: Literal["all", "masked"] = "all"
    adaptive: AdaptiveCoefficient | None = None
    name: str = "kl"

    def __post_init__(self) -> None:
        if self.estimator == "full" and self.target == "old":
            raise InputError(
                "kl_estimator='full' with kl_target='old': the old policy's distribution is not kept; "
                "use kl_target='reference', or an estimator from log-probs (k1, abs, k2, k3, k3-old)"
            )

    @property
    def only_positive(self) -> bool:
        """Whether its tokens all have a positive advantage."""
        return getattr(self.mask, "only_positive", False)

    @property
    def needs(self) -> frozenset[str]:
        """The target's log-probs and what the mask reads."""
        target = {"kl_full"} if self.estimator == "full" else {"ref_logp"} if self.target == "reference" else set()
        return self.mask.needs | target

    @property
    def scores(self) -> frozenset[str]:
        """What the scorer must produce."""
        return self.mask.scores | ({"kl_full"} if self.estimator == "full" else set())

    @property
    def current(self) -> bool:
        """Masked tokens are chosen over the mini-batch where the mask says so, and counted when they alone divide."""
        return self.mask.current or (self.norm == "masked" and not isinstance(self.mask, EveryToken))

    def values(self, batch: TokenBatch, clamp: float) -> Tensor:
        """Return the estimate of every token."""
        if self.estimator == "full":
            return require(batch, "kl_full", "kl_estimator='full'")
        field = "old_logp" if self.target == "old" else "ref_logp"
        target = require(batch, field, f"kl_target={self.target!r}").detach()
        return estimate_kl((target - batch.logp).clamp(-clamp, clamp), self.estimator)

    def tokens(self, batch: TokenBatch) -> Tensor:
        """Return the tokens held back."""
        return self.mask(batch)

    def coefficient(self, state: State) -> Tensor | float:
        """Return the fixed or adapted coefficient."""
        return state[f"{self.name}_coef"] if self.adaptive else self.coef

    def init_state(self) -> dict[str, Tensor]:
        """Return the coefficient, where it adapts."""
        return {f"{self.name}_coef": torch.tensor(self.coef)} if self.adaptive else {}

    def update(self, state: State, metrics: Mapping[str, float]) -> dict[str, Tensor]:
        """Adapt the coefficient to the measured KL."""
        if self.adaptive is None:
            return {}
        key = f"{self.name}_coef"
        measured = metrics.get("kl/ref" if self.target == "reference" else "kl/old")
        return {key: state[key] if measured is None else self.adaptive(state[key], measured)}


def estimate_kl(d: Tensor, estimator: Estimator) -> Tensor:
    """Return the token estimate of KL from d = target_logp - logp."""
    match estimator:
        case "k1":
            return -d
        case "abs":
            return d.abs()
        case "k2":
            return d**2 / 2
        case "k3":
            return torch.expm1(d) - d
        case "k3-old":
            return torch.expm1(-d) + d
        case _:
            raise InputError(f"estimator {estimator!r} does not come from log-probs")


class FixedTerm:
    """What a regulariser on every token has in common with others whose coefficient nothing tunes on the way."""

    coef: float

    def tokens(self, batch: TokenBatch) -> Tensor:
        """Return the mask itself."""
        return batch.mask

    def coefficient(self, state: State) -> Tensor | float:
        """Return the fixed coefficient."""
        return self.coef

    def init_state(self) -> dict[str, Tensor]:
        """Nothing changes on the way."""
        return {}

    def update(self, state: State, metrics: Mapping[str, float]) -> dict[str, Tensor]:
        """Nothing changes on the way."""
        return {}


@dataclass(frozen=True)
class EntropyBonus(FixedTerm):
    """-coef * mean entropy: a reward for staying undecided. Needs the entropy's gradient from the scorer."""

    coef: float
    name: str = "entropy_bonus"
    norm: Literal["all", "masked"] = "all"
    current: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({"entropy"})
    scores: ClassVar[frozenset[str]] = frozenset({"entropy", "entropy_grad"})

    def values(self, batch: TokenBatch, clamp: float) -> Tensor:
        """Return -H of every token."""
        return -require(batch, "entropy", "the entropy bonus")
