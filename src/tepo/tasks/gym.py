"""reasoning-gym families: problems made on the fly, judged by the family's own scorer.

Items are a function of the family, its options, a seed and a number, so a draw is addressed like any other.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tepo.core.errors import InputError, MissingExtra, nearest
from tepo.core.seeds import address
from tepo.tasks.problem import Problem, normalised
from tepo.tasks.prompts import Prompter

TEMPLATE = "{question}\n\nGive your final answer between <answer> and </answer>."
MANY = 2**31 - 1  # the library wants a size; items are made one by one whatever it is


@dataclass(frozen=True)
class GymPool:
    """One family with its options: any number is a problem, and two numbers may give the same question."""

    family: str
    options: Mapping[str, Any]
    seed: int
    prompter: Prompter
    dataset: Any = dataclasses.field(compare=False, repr=False)

    @property
    def size(self) -> None:
        """Unlimited."""
        return None

    def get(self, index: int) -> Problem:
        """Return problem `index`."""
        entry = self.dataset[index]
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


def gym_pool(family: str, options: Mapping[str, Any], seed: int, prompter: Prompter) -> GymPool:
    """Return the pool of a family; raise InputError for an unknown family or option, with the nearest known."""
    dataset = create(family, options, seed % 2**31)
    return GymPool(family, dict(options), seed % 2**31, prompter, dataset)


def create(family: str, options: Mapping[str, Any], seed: int) -> Any:
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
            return create_dataset(family, seed=seed, size=MANY, **given)
        except Exception as error:  # assertions and type errors of 106 families
            last = error
    raise InputError(f"task.options: gym:{family} refuses {dict(options)}: {last!r}") from None


def held_out(pool: GymPool, wanted: int | None) -> tuple[list[Problem], int]:
    """Return `wanted` problems with distinct questions (None: 200, or a tenth of a small family) and the draws taken.

    Raise InputError when the family does not have so many.
    """
    goal = 200 if wanted is None else wanted
    found: dict[str, Problem] = {}
    draws, barren = 0, 0
    while len(found) < goal and barren < 20 * (len(found) + 10):
        problem = pool.get(draws)
        draws += 1
        fresh = found.setdefault(normalised(problem.question), problem) is problem
        barren = 0 if fresh else barren + 1
    problems = list(found.values())
    if wanted is None and len(problems) < goal:
        return problems[: len(problems) // 10], draws
    if len(problems) < goal:
        raise InputError(
            f"task.held_out: gym:{pool.family} with these options has only about {len(problems)} distinct "
            f"questions ({draws} draws), not {goal} to hold out; lower held_out or widen task.options"
        )
    return problems, draws


def pool_seed(seed: int, purpose: str) -> int:
    """Return the library seed for one purpose ("train" or "held-out") of a run or split seed."""
    return address(seed, f"task/gym/{purpose}") % 2**31


def describe(family: str) -> str:
    """Return the family's options with their defaults, one a line."""
    from reasoning_gym.factory import DATASETS

    lines = []
    for field in dataclasses.fields(DATASETS[family][1]):
        if field.name in {"seed", "size"}:
            continue
        default: Any = field.default
        with contextlib.suppress(TypeError):
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
        lines.append(f"{field.name} = {default!r}")
    return "\n".join(lines)
