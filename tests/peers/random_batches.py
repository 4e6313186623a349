"""Seeded token batches for both sides of a comparison, and the comparison itself.

Padding is on the right and finite, as the peers need it; ours may hold anything there (tested elsewhere).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tepo.objectives import Objective, TokenBatch

BATCHES = 200
FEWER = 50  # for variations of what 200 batches already compare
SPREADS = (0.01, 0.1, 0.5, 1.0)  # standard deviation of logp - old_logp, from a tiny step to a wild one


@dataclass(frozen=True)
class Draw:
    """What a random batch may contain."""

    spread: tuple[float, ...] = SPREADS
    holes: bool = True  # positions inside a response that are not the model's (tool output)
    empty_rows: bool = True  # responses without any counted token
    equal_groups: bool = False  # groups of one size, in order (TRL); otherwise sizes 2 to 5, shuffled
    components: int = 0  # columns of rewards with some entries unscorable (NaN); 0 = one reward each
    dtype: torch.dtype = torch.float64

    def batches(self, count: int = BATCHES) -> Iterator[TokenBatch]:
        """Yield the first `count` batches."""
        return (self.batch(seed) for seed in range(count))

    def batch(self, seed: int) -> TokenBatch:
        """Return the batch of this seed: 4 to 20 responses of 1 to 14 tokens in 2 to 4 groups."""
        rng = torch.Generator().manual_seed(seed)
        group = self._groups(rng)
        rows, width = len(group), _integer(rng, 2, 14)
        shape = (rows, width)
        length = torch.randint(1, width + 1, (rows,), generator=rng)
        length[_integer(rng, 0, rows - 1)] = width
        mask = torch.arange(width)[None] < length[:, None]
        if self.holes and seed % 2:
            mask = mask & (torch.rand(shape, generator=rng) > 0.2)
        if self.empty_rows and seed % 3 == 0:
            mask[_integer(rng, 0, rows - 1)] = False
        mask[_integer(rng, 0, rows - 1), 0] = True  # at least one token is left
        old = -torch.rand(shape, generator=rng, dtype=self.dtype) * 3
        spread = self.spread[seed % len(self.spread)]
        entropy = torch.rand(shape, generator=rng, dtype=self.dtype) * 2
        change = torch.randn(shape, generator=rng, dtype=self.dtype) * 0.1
        return TokenBatch(
            logp=old + torch.randn(shape, generator=rng, dtype=self.dtype) * spread,
            mask=mask,
            old_logp=old,
            ref_logp=old + torch.randn(shape, generator=rng, dtype=self.dtype) * 0.2,
            rollout_logp=(old + torch.randn(shape, generator=rng, dtype=self.dtype) * 0.4).float().to(self.dtype),
            entropy=entropy,
            old_entropy=entropy + change,
            rewards=self._rewards(rng, rows),
            group=group,
            truncated=torch.rand(rows, generator=rng) < 0.2,
        )

    def _groups(self, rng: torch.Generator) -> Tensor:
        groups = _integer(rng, 2, 4)
        if self.equal_groups:
            return torch.arange(groups).repeat_interleave(_integer(rng, 2, 5))
        sizes = torch.randint(2, 6, (groups,), generator=rng)
        ids = torch.randperm(100, generator=rng)[:groups].repeat_interleave(sizes)
        return ids[torch.randperm(len(ids), generator=rng)]

    def _rewards(self, rng: torch.Generator, rows: int) -> Tensor:
        """Half the batches have rewards of 0 and 1, where whole groups are often equal; half any number."""
        shape = (rows, self.components) if self.components else (rows,)
        binary = _integer(rng, 0, 1)
        values = torch.rand(shape, generator=rng, dtype=self.dtype)
        values = values.round() if binary else values * 4 - 2
        if self.components:
            unscored = torch.rand(shape, generator=rng) < 0.25
            values = torch.where(unscored, torch.full_like(values, float("nan")), values)
        return values


@dataclass
class Comparison:
    """Collects every deviation of ours from the peer's over many batches, and what the batches exercised."""

    tolerance: float = 1e-10
    batches: int = 0
    worst: float = 0.0
    where: str = ""
    seen: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, ours: Tensor, peer: Tensor, floor: float = 1e-9) -> None:
        """Compare two tensors: the largest difference, relative to the peer's largest entry (at least `floor`)."""
        assert ours.shape == peer.shape, f"{name}: {tuple(ours.shape)} against {tuple(peer.shape)}"
        size = max(float(peer.detach().abs().max()), floor)
        deviation = float((ours.detach() - peer.detach()).abs().max()) / size
        if not deviation <= self.worst:
            self.worst, self.where = deviation, f"{name} of batch {self.batches}"

    def note(self, metrics: dict[str, float]) -> None:
        """Count the batches in which a metric is not zero."""
        self.batches += 1
        self.seen.update(name for name, value in metrics.items() if value != 0)

    def verdict(self, *exercised: str, batches: int = BATCHES) -> None:
        """Fail unless all is equal, all batches were compared and each of `exercised` happened in one of 20."""
        assert self.batches == batches
        assert self.worst <= self.tolerance, f"{self.where}: relative deviation {self.worst:.2e}"
        for name in exercised:
            assert self.seen[name] >= batches // 20, f"{name} happened in {self.seen[name]} of {batches} batches"


@dataclass(frozen=True)
class Result:
    """A loss and its gradients with respect to the log-probs and entropies (zeros where the loss has none)."""

    loss: Tensor
    logp: Tensor
    entropy: Tensor
    metrics: dict[str, float] = field(default_factory=dict)


def differentiate(loss: Tensor, logp: Tensor, entropy: Tensor, metrics: dict[str, float] | None = None) -> Result:
    """Return the loss with both gradients."""
    gradients = torch.autograd.grad(loss, (logp, entropy), allow_unused=True, materialize_grads=True)
    return Result(loss.detach(), *gradients, metrics=metrics or {})


def leaf(value: Tensor) -> Tensor:
    """Return a copy that collects gradients."""
    return value.detach().clone().requires_grad_(True)


def ours(objective: Objective, batch: TokenBatch) -> Result:
    """Return our objective's loss and gradients on the batch."""
    assert batch.entropy is not None
    logp, entropy = leaf(batch.logp), leaf(batch.entropy)
    out = objective(batch.replace(logp=logp, entropy=entropy))
    return differentiate(out.loss, logp, entropy, out.metrics)


def compare(comparison: Comparison, mine: Result, peer: Result) -> None:
    """Compare loss and gradients of one batch."""
    comparison.add("loss", mine.loss, peer.loss, floor=1e-2)  # its terms have both signs and may cancel
    comparison.add("d loss / d logp", mine.logp, peer.logp)
    comparison.add("d loss / d entropy", mine.entropy, peer.entropy)
    comparison.note(mine.metrics)


def doubles(values: Any) -> Tensor:
    """Return a float64 tensor."""
    return torch.tensor(values, dtype=torch.float64)


def tiny(log_ratios: list[list[float]], rewards: list[float], **fields: Any) -> TokenBatch:
    """Return a batch made by hand: these log-ratios, old and reference log-probs -1, one group, nothing masked."""
    change = doubles(log_ratios)
    old = torch.full_like(change, -1.0)
    base = {
        "logp": old + change,
        "mask": torch.ones_like(change, dtype=torch.bool),
        "old_logp": old,
        "ref_logp": old,
        "entropy": torch.ones_like(old),
        "rewards": doubles(rewards),
        "group": torch.zeros(len(log_ratios), dtype=torch.long),
        "truncated": torch.zeros(len(log_ratios), dtype=torch.bool),
    }
    return TokenBatch(**{**base, **fields})


def _integer(rng: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, (), generator=rng))
