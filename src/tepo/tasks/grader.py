"""Grading: every response gets a score, a verdict and an account of what went wrong."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from tepo.core.errors import InputError, WorkError, nearest
from tepo.core.text import plain
from tepo.tasks.config import RewardConfig, RewardPart, ScorerConfig
from tepo.tasks.problem import Problem
from tepo.tasks.rewards import simple, user
from tepo.tasks.rewards.extract import after
from tepo.tasks.rewards.model import RewardModel
from tepo.tasks.rewards.verdict import Verdict
from tepo.tasks.workers import Outcome, WorkerPool

KINDS = ("auto", "math", "exact", "numeric", "format", "gym", "model")
MODULES = {name: f"tepo.tasks.rewards.{name}" for name in ("math", "gym", "text", "user")}

logger = logging.getLogger("tepo.tasks")


@dataclass(frozen=True)
class Grade:
    """What one response is worth.

    `score` is None where no reward can judge the problem. `passed` is a full score of the first reward: partial
    scores, penalties and bonuses of other rewards never make a pass. `parts` has each reward's own score by name.
    `error` says what failed (the configured policy has then decided the score); `timed_out` whether that was a
    limit of time. `answer` is the answer found, in a canonical spelling, for majority votes.
    """

    score: float | None
    passed: bool
    parts: Mapping[str, float | None] = field(default_factory=dict)
    error: str | None = None
    timed_out: bool = False
    answer: str | None = None


@dataclass(frozen=True)
class _Cell:
    """One reward's view of one response."""

    name: str
    score: float | None = None
    answer: str | None = None
    error: str | None = None
    timed_out: bool = False
    components: Mapping[str, float | None] = field(default_factory=dict)
    full: float | None = None  # the value that decides a pass, where it is not the score


class Grader:
    """Rewards ready to grade, with their worker processes; close it, or use it as a context manager.

    Faults of the configuration (unknown kind, bad pattern, function that cannot be loaded) raise InputError here,
    before any work.
    """

    def __init__(self, config: RewardConfig | None = None, *, device: str | None = None) -> None:
        """Load what the rewards need; reward models go to `device` (by default cuda where there is one)."""
        self.config = config or RewardConfig()
        self._parts = self.config.parts or (
            RewardPart(**{name: getattr(self.config, name) for name in ScorerConfig.model_fields}),
        )
        self._pools: dict[str, WorkerPool] = {}
        self._models: dict[str, RewardModel] = {}
        for part in self._parts:
            _check(part)
        for part in self._parts:
            if part.path is not None and part.path not in self._models:
                self._models[part.path] = RewardModel(part.path, device=device)
        try:
            for part in self._parts:
                if user.is_path(part.kind):
                    self._pool(part.kind).start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes."""
        while self._pools:
            self._pools.popitem()[1].close()

    @property
    def in_processes(self) -> bool:
        """Whether all rewards are computed in worker processes, none by a model in this one."""
        return not self._models

    def grade(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Grade]:
        """Grade `responses[i]` as an answer to `problems[i]`.

        Raise WorkError when a function of the user's returns something that is not one score a response, and for
        any failing reward under `on_error = "raise"`.
        """
        if len(problems) != len(responses):
            raise ValueError(f"{len(problems)} problems for {len(responses)} responses")
        columns = [self._column(part, problems, responses) for part in self._parts]
        rows = list(zip(*columns, strict=True)) if problems else []
        grades = []
        for problem, response, row in zip(problems, responses, rows, strict=True):
            self._refuse_errors(problem, response, row)
            grades.append(self._combined(row))
        return grades

    def _refuse_errors(self, problem: Problem, response: str, row: Sequence[_Cell]) -> None:
        failed = [cell for cell in row if cell.error is not None]
        if failed and self.config.on_error == "raise":
            raise WorkError(
                f"reward {failed[0].name} failed on a response to {problem.id}: {failed[0].error}\n"
                f"response: {response[:500]!r}\nSet reward.on_error='zero' to score such responses 0 and go on."
            )

    def _combined(self, row: Sequence[_Cell]) -> Grade:
        scores = [(cell, part) for cell, part in zip(row, self._parts, strict=True) if cell.score is not None]
        total = sum(float(cell.score or 0.0) * part.weight for cell, part in scores) if scores else None
        primary = row[0]
        full = primary.full if primary.full is not None else primary.score
        parts: dict[str, float | None] = {}
        for cell in row:
            prefix = f"{cell.name}/" if len(row) > 1 else ""
            parts.update({f"{prefix}{name}": value for name, value in cell.components.items()})
            if not cell.components or len(row) > 1:
                parts[cell.name] = cell.score
        errors = [cell.error if len(row) == 1 else f"{cell.name}: {cell.error}" for cell in row if cell.error]
        return Grade(
            score=total,
            passed=primary.error is None and full is not None and full >= self.config.full_score - 1e-9,
            parts=parts,
            error="; ".join(errors) or None,
            timed_out=any(cell.timed_out for cell in row),
            answer=primary.answer,
        )

    def _column(self, part: RewardPart, problems: Sequence[Problem], responses: Sequence[str]) -> list[_Cell]:
        texts = [after(response, part.answer_after) for response in responses]
        if user.is_path(part.kind):
            name = part.name or part.kind.rpartition(":")[2]
            return [_sane(cell) for cell in self._by_function(part.kind, name, problems, texts)]
        if part.path is not None:
            return [_sane(cell) for cell in self._by_model(part.name or "model", part.path, problems, texts)]
        cells: list[_Cell | None] = [None] * len(problems)
        jobs: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        for place, (problem, text) in enumerate(zip(problems, texts, strict=True)):
            kind = _resolved(part.kind, problem)
            job = _job(part, kind, problem, text)
            if isinstance(job, _Cell):
                cells[place] = job
            else:
                jobs.setdefault(job[0], []).append((place, job[1]))
        for pool, items in jobs.items():
            outcomes = self._pool(pool).run([payload for _, payload in items])
            for (place, _), outcome in zip(items, outcomes, strict=True):
                name = part.name or _resolved(part.kind, problems[place])
                cells[place] = _cell(name, outcome)
        return [_sane(cell) for cell in cells if cell is not None]

    def _by_model(self, name: str, path: str, problems: Sequence[Problem], texts: Sequence[str]) -> list[_Cell]:
        return [
            _Cell(name, 0.0, error="longer than the reward model's positions") if score is None else _Cell(name, score)
            for score in self._models[path].scores(problems, texts)
        ]

    def _by_function(self, kind: str, name: str, problems: Sequence[Problem], texts: Sequence[str]) -> list[_Cell]:
        if not texts:
            return []
        whole = self._pool(kind).run([{"problems": list(problems), "responses": list(texts)}])[0]
        if whole.error is None:
            return [_scored(name, value) for value in _values(whole)]
        if len(texts) == 1:
            return [_Cell(name, 0.0, error=whole.error, timed_out=whole.timed_out)]
        failure = plain(whole.error)  # a message of foreign code must not steer a terminal
        logger.warning("reward %s: a call with %d responses failed (%s); one by one now", kind, len(texts), failure)
        singles = self._pool(kind).run(
            [{"problems": [problem], "responses": [text]} for problem, text in zip(problems, texts, strict=True)]
        )
        return [
            _Cell(name, 0.0, error=single.error, timed_out=single.timed_out)
            if single.error is not None
            else _scored(name, _values(single)[0])
            for single in singles
        ]

    def _pool(self, kind: str) -> WorkerPool:
        if kind not in self._pools:
            foreign = user.is_path(kind)
            load = (MODULES["user"], kind) if foreign else (MODULES[kind],)
            workers = 1 if foreign else self.config.workers or min(4, _cores())
            self._pools[kind] = WorkerPool(
                load, workers=workers, timeout_s=self.config.timeout_s, memory_mb=self.config.memory_mb
            )
        return self._pools[kind]


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check(part: ScorerConfig) -> None:
    if user.is_path(part.kind):
        user.check_path(part.kind)
    elif part.kind not in KINDS:
        raise InputError(
            f"reward.kind: there is no reward {part.kind!r}.{nearest(part.kind, KINDS)} "
            "A function of yours is module:function or file.py:function."
        )
    if (part.kind == "model") != (part.path is not None):
        raise InputError(
            "reward.path: the reward 'model' needs the folder of a sequence-classification model"
            if part.path is None
            else f"reward.path is read by reward.kind='model' only, not by {part.kind!r}"
        )
    if part.kind == "format" and part.pattern is None:
        raise InputError("reward.pattern: the format reward needs the regular expression a response must match")
    if part.pattern is not None:
        try:
            re.compile(part.pattern)
        except re.error as error:
            raise InputError(f"reward.pattern: {part.pattern!r} is not a regular expression: {error}") from None


def _resolved(kind: str, problem: Problem) -> str:
    return str(problem.metadata.get("scorer", "math")) if kind == "auto" else kind


def _job(part: RewardPart, kind: str, problem: Problem, text: str) -> _Cell | tuple[str, dict[str, Any]]:
    """Return the cell where it can be told at once, else the pool that judges and what it is sent."""
    name = part.name or kind
    payload: dict[str, Any] = {"response": text}
    if kind == "format":
        return "text", payload | {"kind": "format", "pattern": part.pattern}
    if kind == "gym" and problem.metadata.get("scorer") == "gym":
        known = problem.metadata
        options = json.dumps(known["options"])
        return "gym", payload | {"family": known["family"], "options": options, "entry": known["entry"]}
    if problem.answer is None or kind == "gym":
        return _Cell(name)  # nothing here that this reward could judge by
    payload["answer"] = problem.answer
    if kind == "math":
        return "math", payload | {"strict": part.mode == "strict"}
    if kind == "exact" and part.pattern is not None:
        return "text", payload | {"kind": "exact", "pattern": part.pattern, "ignore_case": part.ignore_case}
    verdict = _told_at_once(part, kind, problem, text)
    return _Cell(name, verdict.score, verdict.answer)


def _told_at_once(part: RewardPart, kind: str, problem: Problem, text: str) -> Verdict:
    answer = str(problem.answer)
    if kind == "exact":
        return simple.exact(text, answer, ignore_case=part.ignore_case)
    which: Any = problem.metadata.get("number", "last") if part.number == "auto" else part.number
    return simple.numeric(text, answer, number=which, tolerance=part.tolerance)


def _cell(name: str, outcome: Outcome) -> _Cell:
    if outcome.error is not None:
        return _Cell(name, 0.0, error=outcome.error, timed_out=outcome.timed_out)
    value = outcome.value
    if not isinstance(value, dict) or not isinstance(value.get("score"), float | int | None):
        return _Cell(name, 0.0, error="the worker's reply is not a score")
    answer = value.get("answer")
    score = value["score"]
    return _Cell(name, None if score is None else float(score), None if answer is None else str(answer))


def _values(outcome: Outcome) -> list[Any]:
    if "wrong" in outcome.value:
        raise WorkError(f"reward.kind: {outcome.value['wrong']}")
    scores: list[Any] = outcome.value["scores"]
    return scores


def _scored(name: str, value: float | Mapping[str, float | None] | None) -> _Cell:
    """Return the cell of a user function's value; a dict's total is its `score`, else the sum of its entries."""
    if not isinstance(value, Mapping):
        return _Cell(name, value)
    given = [item for item in value.values() if item is not None]
    total = value["score"] if "score" in value else sum(given) if given else None
    first = value["score"] if "score" in value else next(iter(value.values()))
    return _Cell(name, total, components=value, full=first)


def _sane(cell: _Cell) -> _Cell:
    values = [cell.score, *cell.components.values()]
    bad = [value for value in values if value is not None and not math.isfinite(value)]
    if not bad:
        return cell
    kept = {name: value if value is None or math.isfinite(value) else 0.0 for name, value in cell.components.items()}
    return replace(cell, score=0.0, full=0.0, components=kept, error=cell.error or f"the score is {bad[0]}")
