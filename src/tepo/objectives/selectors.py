"""Selectors: which tokens carry the loss, and which of them count in the denominator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from tepo.core.errors import InputError
from tepo.objectives.advantages import combine, group_statistics
from tepo.objectives.batch import TokenBatch, group_index, require
from tepo.objectives.choice import chance, places


class Selector(Protocol):
    """A pure function of a clean mini-batch to a subset of its mask.

    `terms` says whether the tokens left out lose the whole loss ("all": row filters) or only the policy term
    ("policy"); `denominator` whether they leave the denominator as well; `current` whether the choice needs the
    current policy's values over the whole mini-batch.
    """

    @property
    def needs(self) -> frozenset[str]:
        """Fields of the token batch that this part reads."""
        ...

    @property
    def terms(self) -> Literal["policy", "all"]:
        """The terms that unselected tokens lose."""
        ...

    @property
    def denominator(self) -> Literal["selected", "all"]:
        """The tokens that count in the denominator."""
        ...

    @property
    def current(self) -> bool:
        """Whether current-policy values of the whole mini-batch decide."""
        ...

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Return bool `[B, T]`."""
        ...


@dataclass(frozen=True)
class NotTruncated:
    """Drop responses that hit the length limit from the loss (DAPO's overlong filtering, arXiv 2503.14476).

    Their rewards stay in the group's statistics: the filter comes after the advantage.
    """

    denominator: Literal["selected", "all"] = "selected"
    terms: Literal["policy", "all"] = "all"
    current: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({"truncated"})

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Return the mask without truncated rows."""
        return batch.mask & ~require(batch, "truncated", "truncated='drop'").bool()[:, None]


@dataclass(frozen=True)
class InformativeGroups:
    """Drop groups whose rewards are all equal, from the loss and from the denominator.

    `prepare` sees whole groups and leaves its verdict in `informative`; a mini-batch may hold a part of a group
    only, whose equal rewards say nothing.
    """

    denominator: Literal["selected", "all"] = "selected"
    terms: Literal["policy", "all"] = "all"
    current: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({"rewards", "group"})

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Return the mask without the rows of zero-variance groups."""
        informative = batch.informative
        if informative is None:
            owner = "zero_variance='drop'"
            rewards = combine(require(batch, "rewards", owner))
            informative = group_statistics(rewards, require(batch, "group", owner)).informative
        return batch.mask & informative[:, None]


@dataclass(frozen=True)
class RandomTokens:
    """A random subset of every response's tokens carries the whole loss (S-GRPO).

    The first `always` tokens, and of the rest each with `probability`, at most `most` in all. Whether a token is
    drawn is a function of `seed`, row id and place: the same in every epoch, process and split.
    """

    probability: float
    always: int = 0
    most: int | None = None
    seed: int = 0
    denominator: Literal["selected", "all"] = "selected"
    terms: Literal["policy", "all"] = "all"
    current: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({"row_id"})

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise InputError(f"probability={self.probability}: expected a number from 0 to 1")
        if self.always < 0 or (self.most is not None and self.most < 1):
            raise InputError(f"always={self.always}, most={self.most}: expected tokens >= 0, and >= 1 or none")

    def __call__(self, batch: TokenBatch) -> Tensor:
        """Return the drawn tokens."""
        drawn = chance(batch, self.probability, self.seed, "the random subset") | (places(batch.mask) < self.always)
        chosen = batch.mask & drawn
        return chosen if self.most is None else chosen & (chosen.cumsum(dim=1) <= self.most)


def group_tokens(counted: Tensor, group: Tensor) -> Tensor:
    """Number of counted tokens in each row's group, `[B]`."""
    index, n = group_index(group)
    return torch.zeros(n, dtype=torch.long, device=counted.device).index_add(0, index, counted.sum(dim=1))[index]
