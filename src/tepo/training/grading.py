"""Grading groups of responses while others are still being sampled."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from tepo.rollout import Response
from tepo.tasks import Grade, Grader, Problem


class GroupGrading:
    """Hands every group of responses to the grader as soon as its last one has ended; a context manager.

    One background thread waits for the grader's worker processes, so grades come in the order of hand-in and sampling
    goes on meanwhile. A grader that computes in this process, on the policy's device, gets its groups at the end.
    What a response is worth never depends on when it is graded.
    """

    def __init__(self, grader: Grader, problems: Sequence[Problem], size: int) -> None:
        self._grader = grader
        self._problems = problems
        self._size = size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grading") if grader.in_processes else None
        self._groups: list[dict[int, Response]] = [{} for _ in problems]
        self._graded: dict[int, Future[list[Grade]]] = {}

    def __enter__(self) -> GroupGrading:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def add(self, group: int, response: Response) -> None:
        """Take a response that has ended.

        A second attempt at sampling, after the device ran out of memory, brings each again: it counts only where its
        text has come out otherwise.
        """
        responses = self._groups[group]
        before = responses.get(response.sample)
        if before is not None and before.text == response.text:
            return
        responses[response.sample] = response
        if len(responses) == self._size and self._thread is not None:
            self._graded[group] = self._thread.submit(self._grade, group)

    def grades(self) -> list[list[Grade]]:
        """Return the grades of each group, once all responses have been added; errors of the grader are raised here."""
        if self._thread is None:
            texts = [group[sample].text for group in self._groups for sample in range(self._size)]
            grades = self._grader.grade([problem for problem in self._problems for _ in range(self._size)], texts)
            return [grades[start : start + self._size] for start in range(0, len(grades), self._size)]
        return [self._graded[group].result() for group in range(len(self._groups))]

    def _grade(self, group: int) -> list[Grade]:
        texts = [self._groups[group][sample].text for sample in range(self._size)]
        return self._grader.grade([self._problems[group]] * self._size, texts)
