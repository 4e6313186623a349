"""Where a lenient and a strict grader disagree: the responses whose grade depends on how an answer is looked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tepo.evaluation.results import Evaluation
from tepo.tasks.config import RewardConfig
from tepo.tasks.grader import Grader
from tepo.tasks.problem import Problem

SHOWN = 200


@dataclass(frozen=True)
class Disagreement:
    """One response graded right in one mode alone; `end` is its last characters, `found` what each mode took."""

    question: str
    sample: int
    reference: str | None
    lenient: bool
    strict: bool
    found: tuple[str | None, str | None]
    end: str

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return asdict(self)


def disagreements(problems: Sequence[Problem], evaluation: Evaluation, reward: RewardConfig) -> list[Disagreement]:
    """Grade every response again, leniently (the last expression) and strictly (a box only), and return the rest.

    Limits of time and memory are those of `reward`; what else it is made of does not count.
    """
    pairs = [
        (problem, question.id, place, sample.text)
        for problem, question in zip(problems, evaluation.questions, strict=True)
        for place, sample in enumerate(question.samples)
    ]
    modes = []
    for mode in ("lenient", "strict"):
        limits = {"timeout_s": reward.timeout_s, "memory_mb": reward.memory_mb, "workers": reward.workers}
        with Grader(RewardConfig.model_validate({"kind": "math", "mode": mode, **limits})) as grader:
            modes.append(grader.grade([problem for problem, *_ in pairs], [text for *_, text in pairs]))
    return [
        Disagreement(
            name, place, problem.answer, one.passed, two.passed, (one.answer, two.answer), text.strip()[-SHOWN:]
        )
        for (problem, name, place, text), one, two in zip(pairs, *modes, strict=True)
        if one.passed != two.passed
    ]
