"""Sampling a benchmark from a policy and grading it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tepo.core.errors import InputError
from tepo.evaluation.results import Evaluation, QuestionResult, SampleResult
from tepo.evaluation.store import Store

if TYPE_CHECKING:
    from tepo.policy import Policy
    from tepo.rollout import Response, SamplingConfig
    from tepo.tasks.grader import Grade, Grader
    from tepo.tasks.problem import Problem

PURPOSE = "evaluation"
BLOCK_ROWS = 4
"""Times `sampling.rows` responses are sampled between two writes to a store: the most that a kill can cost."""
LABELS = ("subject", "level", "type", "subfield", "domain", "difficulty", "category", "topic")
"""Columns of a source by which results are broken down."""


class Sampler(Protocol):
    """Anything that samples as `tepo.rollout.sample` does."""

    def __call__(
        self,
        policy: Any,
        prompts: Sequence[Sequence[int]],
        *,
        samples: int,
        config: Any,
        seed: int,
        purpose: str,
        draws: Sequence[int],
        progress: Callable[[int, int], None] | None = None,
    ) -> list[list[Response]]:
        """Return `samples` responses to each prompt."""


def evaluate(
    policy: Policy,
    problems: Sequence[Problem],
    grader: Grader,
    *,
    samples: int,
    sampling: SamplingConfig,
    seed: int,
    chat: bool,
    progress: Callable[[int, int], None] | None = None,
    sampler: Sampler | None = None,
    store: Store | None = None,
) -> Evaluation:
    """Sample `samples` responses to each problem, grade them and return every result.

    The draws of problem i depend on (seed, i, sample) alone, so two policies evaluated with one seed answer the same
    questions from the same random numbers. `sampler` replaces `tepo.rollout.sample`, for engines and tests.
    With a `store` every finished question is kept there at once, and those it already has are not asked again.
    Comparing evaluations is fair only at equal sampling settings, which the result records.
    """
    if not problems:
        raise InputError("there is no problem to evaluate on")
    if samples < 1:
        raise InputError(f"eval.samples must be at least 1, not {samples}")
    prompts = [policy.encode(problem.messages, chat=chat) for problem in problems]
    settings = {"policy": policy.name, "chat": chat, "seed": seed, "samples": samples}
    settings |= {"sampling": sampling.model_dump(mode="json")}
    found = store.open(settings, problems) if store is not None else {}
    missing = [place for place in range(len(problems)) if place not in found]
    block = len(missing) if store is None else max(1, BLOCK_ROWS * sampling.rows // samples)
    for start in range(0, len(missing), max(1, block)):
        places = missing[start : start + block]
        groups = (sampler or _default_sampler())(
            policy,
            [prompts[place] for place in places],
            samples=samples,
            config=sampling,
            seed=seed,
            purpose=PURPOSE,
            draws=places,
            progress=_shifted(progress, (len(problems) - len(missing) + start) * samples, len(problems) * samples),
        )
        for place, result in zip(places, _graded([problems[place] for place in places], groups, grader), strict=True):
            found[place] = result
            if store is not None:
                store.add(place, result)
    return Evaluation(tuple(found[place] for place in range(len(problems))), settings)


def _graded(
    problems: Sequence[Problem], groups: Sequence[Sequence[Response]], grader: Grader
) -> Iterator[QuestionResult]:
    """Yield the result of each problem from its responses."""
    asked = [problem for problem, group in zip(problems, groups, strict=True) for _ in group]
    grades = iter(grader.grade(asked, [response.text for group in groups for response in group]))
    for problem, group in zip(problems, groups, strict=True):
        results = tuple(_result(response, next(grades)) for response in group)
        yield QuestionResult(problem.id, problem.question, problem.answer, results, _labels(problem))


def _labels(problem: Problem) -> dict[str, str]:
    """Return what the problem's source says that results can be broken down by."""
    return {name: str(problem.metadata[name]) for name in LABELS if problem.metadata.get(name) not in (None, "")}


def _shifted(progress: Callable[[int, int], None] | None, done: int, total: int) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda now, _: progress(done + now, total)


def _default_sampler() -> Sampler:
    from tepo.rollout import sample

    return sample


def _result(response: Response, grade: Grade) -> SampleResult:
    return SampleResult(
        text=response.text,
        score=grade.score,
        passed=grade.passed,
        answer=grade.answer,
        length=len(response.token_ids),
        stop_reason=response.stop_reason,
        parts=dict(grade.parts),
        error=grade.error,
        timed_out=grade.timed_out,
    )
