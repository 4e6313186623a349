"""Two sides on the same questions: how much better, which questions flipped, and what was answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tepo.core.text import plain
from tepo.evaluation import Evaluation, QuestionResult
from tepo.evaluation.results import default_ks
from tepo.lab.evidence import Evidence, rates
from tepo.lab.folder import DONE
from tepo.lab.intervals import Effect, accuracy, paired_accuracy

MOST_FLIPS = 100
"""Flipped questions shown each way, those that moved most first."""
MOST_TEXT = 4_000
"""Characters of a response that are shown."""


@dataclass(frozen=True)
class Side:
    """One column of the benchmark table: evaluations of one thing, one a seed."""

    name: str
    evaluations: tuple[Evaluation, ...]
    seeds: tuple[int, ...]

    @property
    def accuracy(self) -> Effect | None:
        """Mean share of right samples with its interval."""
        table = rates(self.evaluations)
        return accuracy(table) if table is not None else None


@dataclass(frozen=True)
class Contrast:
    """`second` minus `first`, paired over questions and seeds."""

    first: Side
    second: Side
    effect: Effect
    better: int
    worse: int


def sides_of_run(run: Evidence) -> list[Side]:
    """Return a run before and after its training; fewer sides where it was evaluated less often."""
    steps = sorted(run.evaluations)
    names = ["before"] * bool(steps) + ["after"] * (len(steps) > 1)
    return [
        Side(f"{name} (step {step})", (run.evaluations[step],), (run.seed,))
        for name, step in zip(names, [*steps[:1], *steps[1:][-1:]], strict=True)
    ]


def sides_of_study(runs: Sequence[Evidence], variants: Sequence[str]) -> list[Side]:
    """Return each variant's final evaluations over its finished runs; variants without any are left out."""
    found = []
    for name in variants:
        own = [run for run in runs if run.variant == name and run.status == DONE and run.last is not None]
        if own:
            evaluations = tuple(run.last for run in own if run.last is not None)
            found.append(Side(name, evaluations, tuple(run.seed for run in own)))
    return found


def contrast(first: Side, second: Side) -> Contrast | None:
    """Return the paired difference over the seeds both have; None where nothing can be paired."""
    shared = [seed for seed in first.seeds if seed in second.seeds]
    pair = [
        rates([side.evaluations[side.seeds.index(seed)] for seed in shared]) if shared else None
        for side in (first, second)
    ]
    before, after = pair
    if before is None or after is None or before.shape != after.shape or _asked(first) != _asked(second):
        return None
    gaps = after.mean(axis=0) - before.mean(axis=0)
    better, worse = int((gaps > 0).sum()), int((gaps < 0).sum())
    return Contrast(first, second, paired_accuracy(before, after), better, worse)


def flips(found: Contrast) -> dict[str, Any]:
    """Return the questions that one side answers better than the other, with responses of both, as plain values."""
    changed = []
    for index, question in enumerate(found.first.evaluations[0].questions):
        rows = [[one.questions[index] for one in side.evaluations] for side in (found.first, found.second)]
        before, after = (sum(q.passed for q in row) / sum(len(q.samples) for q in row) for row in rows)
        if before != after:
            changed.append((after - before, question, before, after, rows))
    changed.sort(key=lambda one: -abs(one[0]))
    shown = [one for one in changed if one[0] > 0][:MOST_FLIPS] + [one for one in changed if one[0] < 0][:MOST_FLIPS]
    return {
        "first": found.first.name,
        "second": found.second.name,
        "left": len(changed) - len(shown),
        "questions": [
            {
                "id": plain(question.id),
                "question": plain(question.question),
                "answer": None if question.answer is None else plain(question.answer),
                "rates": [before, after],
                "responses": [
                    _telling(rows[0], found.first.seeds, prefer=gap < 0),
                    _telling(rows[1], found.second.seeds, prefer=gap > 0),
                ],
            }
            for gap, question, before, after, rows in shown
        ],
    }


def at_k(side: Side) -> dict[str, Any] | None:
    """Return pass@k and maj@k with intervals, as lists of [k, value, low, high]; None where nothing was asked alike."""
    if rates(side.evaluations) is None:
        return None
    import numpy as np

    ks = default_ks(min(one.samples for one in side.evaluations))
    found: dict[str, Any] = {"name": side.name}
    kinds: Mapping[str, Any] = {"pass": QuestionResult.pass_at, "maj": QuestionResult.majority_at}
    for key, value in kinds.items():
        rows = []
        for k in ks:
            table = np.asarray([[value(question, k) for question in one.questions] for one in side.evaluations])
            effect = accuracy(table)
            rows.append([k, effect.value, effect.low, effect.high])
        found[key] = rows
    return found


def _telling(questions: Sequence[QuestionResult], seeds: Sequence[int], *, prefer: bool) -> list[dict[str, Any]]:
    """Return one response a seed, at most three: one that passed where `prefer`, else one that failed, if any."""
    shown = []
    for question, seed in list(zip(questions, seeds, strict=True))[:3]:
        sample = next((one for one in question.samples if one.passed == prefer), question.samples[0])
        text = plain(sample.text)
        cut = f"{text[:MOST_TEXT]} … ({len(text) - MOST_TEXT} more characters)" if len(text) > MOST_TEXT else text
        answer = None if sample.answer is None else plain(sample.answer)
        shown.append({"seed": seed, "text": cut, "passed": sample.passed, "answer": answer})
    return shown


def _asked(side: Side) -> list[tuple[str, str]]:
    return [(question.id, question.question) for question in side.evaluations[0].questions]
