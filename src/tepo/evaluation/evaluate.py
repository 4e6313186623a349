"""Sampling a benchmark from a policy and grading it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tepo.core.errors import InputError
from tepo.evaluation.results import Evaluation, QuestionResult, SampleResult

if TYPE_CHECKING:
    from tepo.policy import Policy
    from tepo.rollout import Response, SamplingConfig
    from tepo.tasks.grader import Grade, Grader
    from tepo.tasks.problem import Problem

PURPOSE = "evaluation"


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
) -> Evaluation:
    """Sample `samples` responses to each problem, grade them and return every result.

    The draws of problem i depend on (seed, i, sample) alone, so two policies evaluated with one seed answer the same
    questions from the same random numbers. `sampler` replaces `tepo.rollout.sample`, for engines and tests.
    Comparing evaluations is fair only at equal sampling settings, which the result records.
    """
    if not problems:
        raise InputError("there is no problem to evaluate on")
    if samples < 1:
        raise InputError(f"eval.samples must be at least 1, not {samples}")
    prompts = [policy.encode(problem.messages, chat=chat) for problem in problems]
    groups = (sampler or _default_sampler())(
        policy,
        prompts,
        samples=samples,
        config=sampling,
        seed=seed,
        purpose=PURPOSE,
        draws=range(len(problems)),
        progress=progress,
    )
    asked = [problem for problem in problems for _ in range(samples)]
    grades = iter(grader.grade(asked, [response.text for group in groups for response in group]))
    questions = tuple(
        QuestionResult(
            problem.id,
            problem.question,
            problem.answer,
            tuple(_result(response, next(grades)) for response in group),
        )
        for problem, group in zip(problems, groups, strict=True)
    )
    settings = {"policy": policy.name, "chat": chat, "seed": seed, "samples": samples}
    return Evaluation(questions, settings | {"sampling": sampling.model_dump(mode="json")})


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
