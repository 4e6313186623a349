"""Sums and counts: what a micro-batch hands on, so that any split adds up to the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Sums:
    """Metrics that merge exactly: `totals` add, `means` are (sum, count), `maxima` and `minima` compare."""

    totals: Mapping[str, Tensor] = field(default_factory=dict)
    means: Mapping[str, Pair] = field(default_factory=dict)
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    minima: Mapping[str, Tensor] = field(default_factory=dict)

    def __add__(self, other: Sums) -> Sums:
        totals = dict(self.totals)
        for name, value in other.totals.items():
            totals[name] = totals[name] + value if name in totals else value
        means = dict(self.means)
        for name, (total, count) in other.means.items():
            means[name] = (means[name][0] + total, means[name][1] + count) if name in means else (total, count)
        maxima = dict(self.maxima)
        for name, value in other.maxima.items():
            maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
        minima = dict(self.minima)
        for name, value in other.minima.items():
            minima[name] = torch.minimum(minima[name], value) if name in minima else value
        return Sums(totals, means, maxima, minima)

    def values(self) -> dict[str, float]:
        """Divide once, at the end; a mean over nothing and an extreme of nothing are left out."""
        result = {name: float(value) for name, value in self.totals.items()}
        result |= {name: float(total / count) for name, (total, count) in self.means.items() if float(count) > 0}
        extremes = {**self.maxima, **self.minima}
        result |= {name: float(value) for name, value in extremes.items() if bool(torch.isfinite(value))}
        return result


@dataclass(frozen=True, eq=False)
class Parts:
    """One micro-batch's share of the loss (with gradient) and of the metrics; shares add up."""

    loss: Tensor
    sums: Sums

    def __add__(self, other: Parts) -> Parts:
        return Parts(self.loss + other.loss, self.sums + other.sums)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of everything added so far, `{name: float}`."""
        return self.sums.values()


def over(values: Tensor, where: Tensor) -> Pair:
    """Return (sum of `values` where true, how many), detached."""
    return torch.where(where, values.detach(), torch.zeros_like(values)).sum(), where.sum()


def extremes(values: Tensor, where: Tensor) -> Pair:
    """Return (maximum, minimum) of `values` where true; -inf and +inf over nothing."""
    detached = values.detach()
    low, high = torch.full_like(detached, float("-inf")), torch.full_like(detached, float("inf"))
    if detached.numel() == 0:
        return detached.new_tensor(float("-inf")), detached.new_tensor(float("inf"))
    return torch.where(where, detached, low).amax(), torch.where(where, detached, high).amin()
