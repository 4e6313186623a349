"""Splitting rows into what the device takes at once, and taking less when it runs out of memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from tepo.core.errors import WorkError
from tepo.policy import TokenSequence
from tepo.policy.batching import PADDED, Layout

T = TypeVar("T")


def micro_batches(
    sequences: Sequence[TokenSequence], rows: Sequence[int], budget: int, layout: Layout = PADDED
) -> list[list[int]]:
    """Split `rows` into micro-batches of at most `budget` computed tokens, padding included (0: no limit).

    `layout` is how the model lays out its passes. The split depends on lengths and on which prompts are equal alone. A
    row longer than the budget is a micro-batch of its own.
    """
    return layout.split(sequences, rows, budget)


class Budget:
    """How much is computed at once; halved when the device runs out of memory, and saved with the run.

    `what` names the amount in messages: `train.micro_tokens`, `sampling.rows`. 0 is no limit.
    """

    def __init__(self, amount: int, what: str, say: Callable[[str], None]) -> None:
        self.amount = amount
        self._what = what
        self._say = say

    def run(self, work: Callable[[int], T], *, largest: int) -> T:
        """Return `work(amount)`, again with half the amount after each out-of-memory error.

        `work` must be free to start over: it zeroes what it accumulates. `largest` is the most `work` could take at
        once, the start of halving where there is no limit. Raises `WorkError` when the smallest amount is too much.
        """
        while True:
            try:
                return work(self.amount)
            except torch.OutOfMemoryError as error:
                reason = str(error).splitlines()[0] if str(error) else "out of memory"
            # Outside the handler: the traceback no longer holds the tensors of the failed attempt.
            amount = min(self.amount or largest, largest) // 2
            if amount == 0:
                raise WorkError(f"the device is out of memory even with {self._what} = 1: {reason}")
            self.amount = amount
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._say(f"out of memory: going on with {self._what} = {amount}, which changes no result")


def padded_tokens(sequences: Sequence[TokenSequence], rows: Sequence[int]) -> int:
    """Return the padded tokens of one batch of these rows."""
    return len(rows) * max(len(sequences[row]) for row in rows)


def mini_batches(groups: Sequence[int], parts: int, order: Callable[[list[int]], None]) -> list[list[int]]:
    """Split rows, given the group of each, into at most `parts` mini-batches of nearly equal size.

    Whole groups stay together while there are at least as many groups as parts; otherwise rows are split.
    `order` shuffles a list in place; it is what the run's seed addresses.
    """
    by_group: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        by_group.setdefault(group, []).append(row)
    units = list(by_group.values()) if len(by_group) >= parts else [[row] for row in range(len(groups))]
    order_of_units = list(range(len(units)))
    order(order_of_units)
    parts = min(parts, len(units))
    bounds = [round(index * len(units) / parts) for index in range(parts + 1)]
    return [
        sorted(row for unit in order_of_units[start:end] for row in units[unit])
        for start, end in itertools.pairwise(bounds)
    ]
