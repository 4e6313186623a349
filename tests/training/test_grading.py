"""Groups are graded as they end, with the grades they would get all at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from tepo.core.errors import WorkError
from tepo.rollout import Response
from tepo.tasks import Grade, Problem
from tepo.training.grading import GroupGrading

PROBLEMS = [Problem(id=f"p{index}", question="?", messages=(), answer=str(index)) for index in range(3)]


class Lengths:
    """A grader whose score is the length of the response."""

    def __init__(self, in_processes: bool = True) -> None:
        self.in_processes = in_processes
        self.calls: list[tuple[list[str], list[str], bool]] = []
        self.graded = threading.Event()

    def grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Grade]:
        here = threading.current_thread() is threading.main_thread()
        self.calls.append(([problem.id for problem in problems], list(responses), here))
        self.graded.set()
        if "fail" in responses:
            raise WorkError("the reward failed")
        return [Grade(float(len(text)), passed=False) for text in responses]


def response(sample: int, text: str) -> Response:
    return Response((1,), (2,), text, (0.0,), (0.0,), "eos", draw=0, sample=sample)


def grading(grader: Any) -> GroupGrading:
    return GroupGrading(grader, PROBLEMS, 2)


def test_a_group_is_graded_before_the_others_have_ended() -> None:
    grader = Lengths()
    with grading(grader) as groups:
        groups.add(1, response(1, "bb"))
        groups.add(2, response(0, "c"))
        assert not grader.graded.is_set()
        groups.add(1, response(0, "b"))
        assert grader.graded.wait(10)
        for group, sample, text in ((0, 1, "aaaa"), (0, 0, "aaa"), (2, 1, "cc")):
            groups.add(group, response(sample, text))
        scores = [[grade.score for grade in grades] for grades in groups.grades()]
    assert scores == [[3.0, 4.0], [1.0, 2.0], [1.0, 2.0]]
    assert grader.calls == [
        (["p1", "p1"], ["b", "bb"], False),
        (["p0", "p0"], ["aaa", "aaaa"], False),
        (["p2", "p2"], ["c", "cc"], False),
    ]


def test_a_second_attempt_counts_where_it_differs() -> None:
    grader = Lengths()
    with grading(grader) as groups:
        for text in ("a", "a", "aaa"):
            for group in range(3):
                groups.add(group, response(0, "b"))
                groups.add(group, response(1, text if group == 1 else "a"))
        scores = [[grade.score for grade in grades] for grades in groups.grades()]
    assert scores == [[1.0, 1.0], [1.0, 3.0], [1.0, 1.0]]
    assert len(grader.calls) == 4


def test_a_model_in_this_process_grades_at_the_end() -> None:
    grader = Lengths(in_processes=False)
    with grading(grader) as groups:
        for group in range(3):
            for sample in (1, 0):
                groups.add(group, response(sample, "x" * (2 * group + sample)))
        assert not grader.calls
        scores = [[grade.score for grade in grades] for grades in groups.grades()]
    assert scores == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert len(grader.calls) == 1
    assert grader.calls[0][2]


def test_a_failing_reward_is_raised_where_its_grades_are_asked_for() -> None:
    with grading(Lengths()) as groups:
        for group in range(3):
            for sample in range(2):
                groups.add(group, response(sample, "fail" if group == 1 else "fine"))
        with pytest.raises(WorkError, match="the reward failed"):
            groups.grades()
