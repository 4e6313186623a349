"""Reducers: who is averaged over whom. A reducer is linear: a weight for every token and a count for every row.

loss = sum_{i,t} weight_{i,t} * loss_{i,t} / sum_i count_i, with both sums over the mini-batch. The weights and
counts depend on masks and groups alone, so they are known before the backward pass and any split adds up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from tepo.core.errors import InputError
from tepo.objectives.batch import TokenBatch, require
from tepo.objectives.selectors import group_tokens


@dataclass(frozen=True, eq=False)
class Weights:
    """Token weights `[B, T]` and row counts `[B]`."""

    tokens: Tensor
    rows: Tensor


class Reducer(Protocol):
    """A pure function of the counted tokens of a mini-batch to weights."""

    @property
    def needs(self) -> frozenset[str]:
        """Fields of the token batch that this part reads."""
        ...

    def __call__(self, counted: Tensor, batch: TokenBatch) -> Weights:
        """Return weights for the counted tokens (bool `[B, T]`)."""
        ...


@dataclass(frozen=True)
class TokenMean:
    """sum over tokens / number of tokens: every token weighs the same (DAPO, arXiv 2503.14476 eq. 8).

    scope "mini" divides by the mini-batch's tokens (verl's global token-mean, TRL's dapo); "group" takes the
    token mean inside each group, then the mean over groups, as the paper writes it.
    """

    scope: Literal["mini", "group"] = "mini"

    @property
    def needs(self) -> frozenset[str]:
        """The group, where groups are averaged."""
        return frozenset({"group"}) if self.scope == "group" else frozenset()

    def __call__(self, counted: Tensor, batch: TokenBatch) -> Weights:
        """Return weight 1, or 1 / tokens of the group."""
        tokens = counted.to(batch.logp.dtype)
        if self.scope == "group":
            tokens = tokens / group_tokens(counted, require(batch, "group", "scope='group'")).clamp_min(1)[:, None]
        return Weights(tokens, tokens.sum(dim=1))


@dataclass(frozen=True)
class SequenceMean:
    """Mean over responses of their token means (GRPO, arXiv 2402.03300 eq. 3).

    `empty_rows`: whether a response without any counted token is one of the responses averaged over: "skip"
    (verl) or "count" (TRL).
    """

    empty_rows: Literal["skip", "count"] = "skip"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, counted: Tensor, batch: TokenBatch) -> Weights:
        """Return weight 1 / L_i."""
        length = counted.sum(dim=1)
        tokens = counted.to(batch.logp.dtype) / length.clamp_min(1)[:, None]
        return Weights(tokens, _rows(length, self.empty_rows, batch))


@dataclass(frozen=True)
class SequenceSum:
    """Mean over responses of their token sums divided by a constant (Dr.GRPO, arXiv 2503.20783).

    The constant is a number, never the padded width, so padding cannot change the loss.
    """

    constant: float = 1.0
    empty_rows: Literal["skip", "count"] = "skip"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        if not self.constant > 0:
            raise InputError(f"constant={self.constant}: expected a number > 0, usually the longest response allowed")

    def __call__(self, counted: Tensor, batch: TokenBatch) -> Weights:
        """Return weight 1 / constant."""
        tokens = counted.to(batch.logp.dtype) / self.constant
        return Weights(tokens, _rows(counted.sum(dim=1), self.empty_rows, batch))


ReducerName = Literal["token-mean", "sequence-mean", "sequence-sum"]


def reducer_of(
    name: ReducerName,
    *,
    scope: Literal["mini", "group"] = "mini",
    constant: float = 1.0,
    empty_rows: Literal["skip", "count"] = "skip",
) -> Reducer:
    """Return the reducer of this name, as settings spell it; each takes of the options what it has."""
    match name:
        case "token-mean":
            return TokenMean(scope)
        case "sequence-mean":
            return SequenceMean(empty_rows)
        case _:
            return SequenceSum(constant, empty_rows)


def _rows(length: Tensor, empty_rows: str, batch: TokenBatch) -> Tensor:
    rows = torch.ones_like(length) if empty_rows == "count" else (length > 0)
    return rows.to(batch.logp.dtype)
