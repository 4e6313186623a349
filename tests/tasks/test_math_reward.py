from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tepo.tasks import Grade, Grader, Problem, RewardConfig

Make = Callable[..., Problem]


@pytest.fixture(scope="module")
def lenient() -> Iterator[Grader]:
    with Grader(RewardConfig(kind="math", workers=1)) as grader:
        yield grader


@pytest.fixture(scope="module")
def strict() -> Iterator[Grader]:
    with Grader(RewardConfig(kind="math", mode="strict", workers=1)) as grader:
        yield grader


def graded(grader: Grader, problem: Problem, response: str) -> Grade:
    return grader.grade([problem], [response])[0]


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        (".5", r"\boxed{1/2}"),
        ("0.5", r"\boxed{\frac12}"),
        (r"\frac{1}{2}", r"\boxed{0.5}"),
        ("1,234", r"\boxed{1234}"),
        (r"x^2+2x+1", r"\boxed{(x+1)^2}"),
        (r"2\sqrt{2}", r"\boxed{\sqrt{8}}"),
        ("5", r"\boxed{x=5}"),
        (r"\{1,2,3\}", r"\boxed{\{3, 2, 1\}}"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3, \pi/2)}"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}"),
        (r"\text{Tuesday}", r"\boxed{Tuesday}"),
        ("A", r"\boxed{\text{(A)}}".replace("(A)", "A")),
        ("18", r"first \boxed{3}, then \boxed{18}"),
        ("42", "The answer is 42."),
        (r"\frac{3}{4}", "so we get $\\frac{3}{4}$"),
    ],
)
def test_equal_answers_score_one(lenient: Grader, problem: Make, answer: str, response: str) -> None:
    assert graded(lenient, problem(answer), response) == Grade(
        1.0, True, {"math": 1.0}, answer=graded(lenient, problem(answer), response).answer
    )


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("18", r"\boxed{18} or rather \boxed{3}"),
        ("[0,1)", r"\boxed{(0,1]}"),
        ("5", r"\boxed{}"),
        ("5", ""),
        ("5", "no idea"),
        ("5", r"\boxed{\boxed{\boxed{"),
        ("12", r"\boxed{1 2}"),
        ("None", r"\boxed{}"),
        ("nothing", "..."),
    ],
)
def test_unequal_and_empty_answers_score_zero(lenient: Grader, problem: Make, answer: str, response: str) -> None:
    grade = graded(lenient, problem(answer), response)
    assert (grade.score, grade.passed, grade.error) == (0.0, False, None)


@pytest.mark.parametrize("answer", [None, "", r"\boxed{}", "$ $"])
def test_nothing_never_equals_nothing(lenient: Grader, problem: Make, answer: str | None) -> None:
    for response in ("", r"\boxed{}", "$$"):
        grade = graded(lenient, problem(answer), response)
        assert (grade.score, grade.passed) == (None, False)


def test_strict_takes_a_box_only(strict: Grader, problem: Make) -> None:
    assert graded(strict, problem("42"), "The answer is $42$.").score == 0.0
    assert graded(strict, problem("42"), r"The answer is \boxed{42}.").score == 1.0


def test_equal_answers_have_one_spelling_for_votes(lenient: Grader, problem: Make) -> None:
    spellings = [r"\boxed{0.5}", r"\boxed{1/2}", r"\boxed{\frac{1}{2}}", r"so $\frac12$", r"\boxed{.50}"]
    assert {grade.answer for grade in lenient.grade([problem("7")] * 5, spellings)} == {"1/2"}
    assert graded(lenient, problem("7"), "no idea").answer is None


def test_an_expression_that_never_finishes_costs_only_its_own_score(problem: Make) -> None:
    with Grader(RewardConfig(kind="math", workers=2, timeout_s=2)) as grader:
        responses = [r"\boxed{5}", r"\boxed{10^{10^{10}}}", r"\boxed{5}", r"\boxed{6}"]
        grades = grader.grade([problem("5")] * 4, responses)
    assert [grade.score for grade in grades] == [1.0, 0.0, 1.0, 0.0]
    assert grades[1].timed_out
    assert grades[1].error == "ran longer than 2 s"
    assert not any(grade.timed_out or grade.error for grade in (grades[0], grades[2], grades[3]))


def test_works_from_a_thread_that_is_not_the_main_one(problem: Make) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with Grader(RewardConfig(kind="math", workers=1)) as grader, ThreadPoolExecutor(1) as threads:
        grade = threads.submit(grader.grade, [problem(".5")], [r"\boxed{1/2}"]).result()[0]
    assert (grade.score, grade.passed, grade.error) == (1.0, True, None)


@pytest.mark.skipif("TEPO_DATA" not in os.environ, reason="TEPO_DATA does not name the folder of shared data")
def test_agrees_with_a_public_record_of_400_graded_solutions(lenient: Grader, problem: Make) -> None:
    text = Path(os.environ["TEPO_DATA"], "grading", "qwen_math_cot_50.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.split("\n") if line]
    problems = [problem(row["gt"]) for row in rows for _ in row["code"]]
    grades = lenient.grade(problems, [response for row in rows for response in row["code"]])
    recorded = [score for row in rows for score in row["score"]]
    assert len(recorded) == 400
    assert sum(recorded) == 375
    assert [grade.passed for grade in grades] == recorded
