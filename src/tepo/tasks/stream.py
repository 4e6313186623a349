"""Endless streams of training problems in which draw number i is a function of (seed, i) alone.

A finite pool is gone through epoch by epoch, each in an order of its own. The orders are permutations that can be
evaluated at one place without making the rest (a Feistel network with cycle walking), so a resumed run needs no
state but the number of draws, and a pool of 10^12 arithmetic problems is shuffled as well as a file of 30.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from tepo.core.errors import WorkError
from tepo.core.seeds import address
from tepo.tasks.problem import Problem, normalised

ROUNDS = 6  # Feistel rounds; four already make a pseudorandom permutation (Luby & Rackoff, 1988)
MAX_REDRAWS = 1000


def permuted(position: int, size: int, key: int) -> int:
    """Return what the permutation of range(size) chosen by the 128-bit `key` has at `position`."""
    if not 0 <= position < size:
        raise IndexError(f"position {position} outside range({size})")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask, length, secret = (1 << half) - 1, (half + 7) // 8, key.to_bytes(16, "little")
    value = position
    while True:  # walk the cycle of the permutation of 2^(2 half) values until it is inside again
        left, right = value >> half, value & mask
        for number in range(ROUNDS):
            data = bytes([number]) + right.to_bytes(length, "little")
            digest = hashlib.blake2b(data, key=secret, digest_size=min(64, length + 8)).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        value = left << half | right
        if value < size:
            return value


def split_key(split_seed: int) -> int:
    """Return the key of the permutation that splits a finite pool into held-out and training problems."""
    return address(split_seed, "task/split")


class NoProblemError(WorkError, LookupError):
    """A stream in which a thousand draws gave no problem that may be trained on."""


class Pool(Protocol):
    """A set of problems addressed by number; `size` None means that any number is a problem."""

    @property
    def size(self) -> int | None:
        """Number of problems."""

    def get(self, index: int) -> Problem:
        """Return problem `index`."""


@dataclass(frozen=True)
class ListPool:
    """Problems held in memory."""

    problems: Sequence[Problem]

    @property
    def size(self) -> int:
        """Number of problems."""
        return len(self.problems)

    def get(self, index: int) -> Problem:
        """Return problem `index`."""
        return self.problems[index]


@dataclass(frozen=True)
class Slice:
    """Places [start, start + size) of a permutation of a finite pool, without the places in `skipped`."""

    pool: Pool
    key: int
    start: int
    size: int
    skipped: tuple[int, ...] = ()

    def get(self, index: int) -> Problem:
        """Return problem `index` of the slice."""
        place = self.start + index
        for skip in sorted(self.skipped):
            place += place >= skip >= self.start
        assert self.pool.size is not None
        return self.pool.get(permuted(place, self.pool.size, self.key))


class ProblemStream(Protocol):
    """The training side of a task."""

    @property
    def size(self) -> int | None:
        """Distinct problems of one epoch; None when unlimited."""

    def problem(self, draw: int) -> Problem:
        """Return the problem of draw number `draw` (0, 1, 2, ...)."""

    def where(self, accept: Callable[[Problem], bool]) -> tuple[ProblemStream, int | None]:
        """Return the stream of accepted problems and how many were dropped; None: they are skipped as they come."""


@dataclass(frozen=True)
class ShuffledStream:
    """A pool in addressed order: epoch e of a finite pool visits every problem once.

    Problems whose normalised question is in `excluded`, or that `accept` refuses, are drawn again.
    """

    pool: Pool
    seed: int
    excluded: frozenset[str] = frozenset()
    accept: Callable[[Problem], bool] | None = field(default=None, compare=False)

    @property
    def size(self) -> int | None:
        """Distinct problems of one epoch; None when unlimited."""
        return self.pool.size

    def problem(self, draw: int) -> Problem:
        """Return the problem of draw number `draw`; raise NoProblemError when the pool has next to nothing allowed."""
        for attempt in range(MAX_REDRAWS):
            problem = self.pool.get(self._index(draw, attempt))
            if normalised(problem.question) in self.excluded:
                continue
            if self.accept is None or self.accept(problem):
                return problem
        raise NoProblemError(
            f"no usable training problem in {MAX_REDRAWS} tries: nearly all are held out or over "
            "max_prompt_tokens. Lower held_out, raise max_prompt_tokens or widen the family's options."
        )

    def where(self, accept: Callable[[Problem], bool]) -> tuple[ShuffledStream, int | None]:
        """Return the stream of accepted problems; those of a list are dropped now and counted."""
        if isinstance(self.pool, ListPool):
            kept = [problem for problem in self.pool.problems if accept(problem)]
            return replace(self, pool=ListPool(kept)), len(self.pool.problems) - len(kept)
        return replace(self, accept=accept), None

    def _index(self, draw: int, attempt: int) -> int:
        size = self.pool.size
        if size is None:  # numbers from 2^30 on are for draws taken again; neighbours stay neighbours
            return draw if attempt == 0 else 2**30 + 2**20 * attempt + draw
        epoch, place = divmod(draw, size)
        return permuted(place, size, address(self.seed, "task/order", epoch, attempt))
