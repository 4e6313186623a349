"""reasoning-gym families: problems made on the fly, judged by the family's own scorer.

Items are a function of the family, its options, a seed and a number, so a draw is addressed like any other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tepo.core.errors import InputError, MissingExtra, nearest
from tepo.core.seeds import address
from tepo.tasks.problem import Problem, normalised
from tepo.tasks.prompts import Prompter

TEMPLATE = "{question}\n\nGive your final answer between <answer> and </answer>."
CHUNK = 200  # items of one data set of the library; some families make, or draw the kinds of, all items at once
MANY = 200  # problems held out where nothing else is said
KEPT = 8  # chunks kept at hand, most recently used


@dataclass(frozen=True)
class GymPool:
    """One family with its options: any number is a problem, and two numbers may give the same question."""

    family: str
    options: Mapping[str, Any]
    seed: int
    prompter: Prompter
    _chunks: dict[int, Any] = dataclasses.field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def size(self) -> None:
        """Unlimited."""
        return None

    def get(self, index: int) -> Problem:
        """Return problem `index`."""
        entry = self._chunk(index // CHUNK)[index % CHUNK]
        question = str(entry["question"])
        return Problem(
            id=f"gym/{self.family}/{self.seed}/{index}",
            messages=self.prompter.messages(question),
            question=question,
            answer=None if entry["answer"] is None else str(entry["answer"]),
            metadata={
                "source": f"gym:{self.family}",
                "scorer": "gym",
                "family": self.family,
                "options": dict(self.options),
                "entry": dict(entry),
            },
        )

    def _chunk(self, number: int) -> Any:
        if number in self._chunks:
            self._chunks[number] = self._chunks.pop(number)
        else:
            seed = address(self.seed, "task/gym/chunk", number) % 2**31
            self._chunks[number] = create(self.family, self.options, seed, CHUNK)
            if len(self._chunks) > KEPT:
                self._chunks.pop(next(iter(self._chunks)))
        return self._chunks[number]


def create(family: str, options: Mapping[str, Any], seed: int, size: int) -> Any:
    """Build the library's data set; every fault is an InputError that names the family and the option."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError:
        raise MissingExtra("reasoning-gym", "gym", f"task.source='gym:{family}'") from None
    if family not in DATASETS:
        raise InputError(f"task.source: reasoning-gym has no family {family!r}.{nearest(family, DATASETS)}")
    if family == "composite":
        raise InputError("task.source: gym:composite is a mixture; list its families under task.mixture")
    known = {field.name for field in dataclasses.fields(DATASETS[family][1])} - {"seed", "size"}
    for name in options:
        if name not in known:
            raise InputError(f"task.options.{name}: gym:{family} has no such option.{nearest(name, known)}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    last: Exception | None = None
    for given in (values, dict(options)):  # some families want tuples, some lists
        try:
            return create_dataset(family, seed=seed, size=size, **given)
        except Exception as error:  # assertions and type errors of 106 families
            last = error
    raise InputError(f"task.options: gym:{family} refuses {dict(options)}: {last!r}") from None


def distinct_problems(
    pool: GymPool, wanted: int | None, excluded: frozenset[str] = frozenset()
) -> tuple[list[Problem], int]:
    """Return `wanted` problems with distinct questions outside `excluded`, and the number of draws that took.

    None asks for 200, at most about a tenth of the family. Raise InputError when the family does not have as many as
    wanted: when 20 times what was found, and 200 more, draws in a row bring nothing new.
    """
    goal = MANY if wanted is None else wanted
    found: dict[str, Problem] = {}
    draws, barren = 0, 0
    while len(found) < goal and barren < 20 * (len(found) + 10):
        problem = pool.get(draws)
        question = normalised(problem.question)
        draws += 1
        barren += 1
        if question not in found and question not in excluded:
            found[question] = problem
            barren = 0
    problems = list(found.values())
    if wanted is None:
        return problems[: int(min(MANY, family_size(len(problems), draws) / 10))], draws
    if len(problems) == goal:
        return problems, draws
    raise InputError(
        f"task.held_out: gym:{pool.family} with these options has only about {len(problems)} distinct questions "
        f"({draws} draws), not {goal} to set apart; ask for fewer or widen task.options"
    )


def family_size(distinct: int, draws: int) -> float:
    """Estimate how many questions a family has, all alike probable, when `draws` draws gave `distinct` of them.

    Solves distinct = N (1 - exp(-draws / N)) for N; infinity when nothing came twice.
    """
    if draws <= distinct:
        return math.inf
    low, high = float(distinct), 1e12
    for _ in range(200):
        middle = math.sqrt(low * high)
        expected = -middle * math.expm1(-draws / middle)
        low, high = (middle, high) if expected < distinct else (low, middle)
    return low


def pool_seed(seed: int, purpose: str) -> int:
    """Return the pool's seed for one purpose (train, held-out, examples) of a run or split seed."""
    return address(seed, f"task/gym/{purpose}") % 2**31
