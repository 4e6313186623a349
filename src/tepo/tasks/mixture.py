"""Several streams drawn by weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tepo.core.seeds import address
from tepo.tasks.problem import Problem
from tepo.tasks.stream import ProblemStream, permuted

BLOCK = 1000  # draws in which the shares are exact; weights are resolved to a thousandth


def shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Return how many of `BLOCK` draws each part gets: largest remainders, at least one each."""
    total = sum(weights)
    exact = [weight / total * BLOCK for weight in weights]
    counts = [max(1, int(value)) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda part: (counts[part] - exact[part], part))
    for place in range(max(0, BLOCK - sum(counts))):
        counts[by_remainder[place % len(counts)]] += 1
    while sum(counts) > BLOCK:
        counts[counts.index(max(counts))] -= 1
    return tuple(counts)


@dataclass(frozen=True)
class MixtureStream:
    """Draw i belongs to one part, chosen by a permutation of its block, and is that part's next draw."""

    parts: tuple[ProblemStream, ...]
    counts: tuple[int, ...]
    seed: int

    @property
    def size(self) -> int | None:
        """Unlimited: parts start a new epoch when they are through."""
        return None

    def problem(self, draw: int) -> Problem:
        """Return the problem of draw number `draw`."""
        part, index = self.place(draw)
        return self.parts[part].problem(index)

    def place(self, draw: int) -> tuple[int, int]:
        """Return which part draw number `draw` belongs to, and its number within the part."""
        block, place = divmod(draw, BLOCK)
        place = permuted(place, BLOCK, address(self.seed, "task/mixture", block))
        for part, count in enumerate(self.counts):
            if place < count:
                return part, block * count + place
            place -= count
        raise AssertionError("the shares of a block add up to its length")

    def where(self, accept: Callable[[Problem], bool]) -> tuple[MixtureStream, int | None]:
        """Return the stream of accepted problems, and how many were dropped from the parts that are lists."""
        filtered = [part.where(accept) for part in self.parts]
        dropped = sum(count for _, count in filtered if count is not None)
        return MixtureStream(tuple(stream for stream, _ in filtered), self.counts, self.seed), dropped
