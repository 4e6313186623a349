"""Advantage transforms: how a response's credit is spread over its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from tepo.objectives.advantages import combine, whiten
from tepo.objectives.batch import TokenBatch


class Transform(Protocol):
    """A pure, detached function of a clean batch and its advantages to new advantages.

    `current` false: applied once to the whole rollout batch; true: applied to each mini-batch with the current
    policy's values.
    """

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
        """Whether current-policy values of the whole mini-batch decide."""
        ...

    def __call__(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        """Return advantages `[B, T]`."""
        ...


@dataclass(frozen=True)
class Whitened:
    """A <- (A - mean) / sqrt(var + eps) over every response token of the rollout batch.

    The variance is the sample's (verl's masked_whiten). Long responses weigh more, since tokens are counted.
    Advantages that are equal up to rounding become exactly 0, as does a single token (verl raises there). Tokens of
    responses that no reward can score stay at 0 and out of the statistics.
    """

    eps: float = 1e-8
    needs: ClassVar[frozenset[str]] = frozenset()
    scores: ClassVar[frozenset[str]] = frozenset()
    current: ClassVar[bool] = False

    def __call__(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        """Return whitened advantages `[B, T]`."""
        counted = batch.mask
        if batch.rewards is not None:
            counted = counted & ~torch.isnan(combine(batch.rewards))[:, None]
        return whiten(advantage, counted, variance_eps=self.eps)
