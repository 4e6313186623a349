"""Two evaluations of the same questions: by how much they differ, and on which questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tepo.core.errors import InputError
from tepo.evaluation.results import Evaluation, QuestionResult
from tepo.evaluation.statistics import Estimate, difference
from tepo.tasks.problem import Problem, normalised

FAIR = ("sampling", "chat")
"""Settings that must be the same for a fair comparison."""
SPEED = ("rows", "decoder")
"""Settings of the sampling that change its speed alone."""


@dataclass(frozen=True)
class Comparison:
    """What changed from a first evaluation to a second one, over the questions both have.

    `gap` is second minus first of the mean share of right samples, paired by question. `gained` and `lost` are the
    questions that flipped: most samples right in one evaluation and not in the other. `alone` counts distinct
    questions that only one has; `unequal` names settings that differ and make the comparison unfair.
    """

    gap: Estimate
    first: float
    second: float
    gained: tuple[str, ...]
    lost: tuple[str, ...]
    better: int
    worse: int
    alone: int
    unequal: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {**vars(self), "gap": self.gap.to_json()}

    def __str__(self) -> str:
        told = "not distinguishable"
        if self.gap.low > 0 or self.gap.high < 0:
            told = "better" if self.gap.low > 0 else "worse"
        return (
            f"{100 * self.second:.1f} % against {100 * self.first:.1f} %: {100 * self.gap.value:+.1f} points, "
            f"95 % [{100 * self.gap.low:+.1f}, {100 * self.gap.high:+.1f}], paired over {self.gap.n} questions: {told}"
        )


def compare(first: Evaluation, second: Evaluation, *, seed: int = 0) -> Comparison:
    """Compare two evaluations question by question; raise InputError where they share none."""
    before, after = _by_question(first), _by_question(second)
    shared = [key for key in before if key in after]
    if not shared:
        raise InputError("the two evaluations have no question in common")
    pairs = [(before[key], after[key]) for key in shared]
    shares = [(one.share, other.share) for one, other in pairs]
    gap = difference([share for share, _ in shares], [share for _, share in shares], seed=seed)
    return Comparison(
        gap=gap,
        first=sum(share for share, _ in shares) / len(shares),
        second=sum(share for _, share in shares) / len(shares),
        gained=tuple(other.id for one, other in pairs if not one.mostly_right and other.mostly_right),
        lost=tuple(other.id for one, other in pairs if one.mostly_right and not other.mostly_right),
        better=sum(other > one for one, other in shares),
        worse=sum(other < one for one, other in shares),
        alone=len(before) + len(after) - 2 * len(shared),
        unequal=tuple(name for name in FAIR if _setting(first, name) != _setting(second, name)),
    )


def refuse_unrelated(evaluation: Evaluation, problems: Sequence[Problem], *, name: str) -> None:
    """Raise InputError where none of the problems is in an earlier evaluation, called `name`: nothing to compare."""
    asked = _by_question(evaluation)
    if not any((normalised(problem.question), problem.answer) in asked for problem in problems):
        raise InputError(f"{name} has none of these {len(problems)} questions; expected results on the same source")


def _by_question(evaluation: Evaluation) -> dict[tuple[str, str | None], QuestionResult]:
    return {(normalised(one.question), one.answer): one for one in evaluation.merged().questions}


def _setting(evaluation: Evaluation, name: str) -> Any:
    value = evaluation.settings.get(name)
    return {key: item for key, item in value.items() if key not in SPEED} if isinstance(value, dict) else value
