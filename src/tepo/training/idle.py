"""Rows that can change nothing: which they are, and what stands for them where they are not computed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from tepo.core.errors import InputError
from tepo.objectives import Objective, Parts, Statistics, TokenBatch
from tepo.policy import TokenSequence
from tepo.training.scoring import FIELDS


def to_compute(sequences: Sequence[TokenSequence], skipped: Sequence[int]) -> list[int]:
    """Return the rows that are not skipped; the shortest one where all are, so that the optimizer sees its gradient
    of 0 and its moments decay."""
    kept = sorted(set(range(len(sequences))) - set(skipped))
    return kept or [min(range(len(sequences)), key=lambda row: len(sequences[row]))]


def idle_parts(
    objective: Objective, state: Mapping[str, Tensor], mini: TokenBatch, fixed: Statistics, rows: Sequence[int]
) -> Parts:
    """Return the share of rows that are not computed: nothing of loss and gradient, and metrics as if the policy were
    still the old one there, since nothing else is known of them."""
    index = torch.tensor(rows, device=mini.logp.device)
    micro = mini.take(index)
    absent = [name for name in objective.needs.scores & set(FIELDS) if getattr(micro, name) is None]
    micro = micro.replace(**{name: torch.zeros_like(micro.logp) for name in absent})  # nothing of theirs is used
    with torch.no_grad():
        return objective.partial(micro, fixed.take(index), state)


def idle_rows(objective: Objective, batch: TokenBatch, state: Mapping[str, Tensor]) -> frozenset[int]:
    """Return the rows of a rollout batch that can change nothing, as far as that is known before they are scored.

    None where the objective's advantages need values that only scoring gives.
    """
    try:
        prepared = objective.prepare(batch, state)
        idle = objective.idle(objective.statistics(prepared.batch, state))
    except InputError:  # a field is missing; what is wrong with those there shows when all are
        return frozenset()
    return frozenset(idle.nonzero()[:, 0].tolist())


def apart(rows: Sequence[int], idle: Collection[int]) -> list[list[int]]:
    """Return the rows that are computed and the idle ones, each in a list of their own where there are any."""
    parts = [[row for row in rows if (row in idle) == still] for still in (False, True)]
    return [part for part in parts if part]


def computed_rows(batch: TokenBatch, idle: Collection[int]) -> Tensor:
    """Return which rows are not idle, bool `[B]`."""
    return torch.tensor([row not in idle for row in range(len(batch.mask))], device=batch.mask.device)
