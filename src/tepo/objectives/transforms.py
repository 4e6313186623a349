"""Advantage transforms: how a response's credit is spread over its tokens."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

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
