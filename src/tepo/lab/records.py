"""One run of a study as the statistics see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tepo.evaluation import Evaluation
from tepo.lab.curves import Curve, curve
from tepo.lab.folder import DONE, StudyFolder
from tepo.lab.intervals import Values
from tepo.lab.plan import PlannedRun
from tepo.lab.stability import Stability, kept, stability, tenth
from tepo.lab.survival import Times, first_reached

REWARD = "reward/mean"
ENTROPY = "entropy/rollout"
SMOOTHING = 5
"""Steps whose mean reward must reach a threshold."""


@dataclass(frozen=True)
class RunRecord:
    """One run as the statistics see it."""

    name: str
    variant: str
    seed: int
    state: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]
    final: Evaluation | None

    @property
    def done(self) -> bool:
        """Whether it went to its end."""
        return bool(self.state["status"] == DONE)

    def curve(self, metric: str) -> Curve:
        """Return the course of a metric."""
        return curve(self.lines, metric)

    @cached_property
    def final_reward(self) -> float | None:
        """Mean training reward of the last tenth of the steps."""
        values = self.curve(REWARD).values
        return float(values[-tenth(values.size) :].mean()) if values.size else None

    @cached_property
    def entropy_kept(self) -> float | None:
        """Mean entropy of the last tenth of the steps over that of the first."""
        return kept(self.curve(ENTROPY).values)

    @cached_property
    def stability(self) -> Stability:
        """How it held."""
        return stability(
            *(
                np.asarray([_number(line.get(metric)) for line in self.lines if line["step"] > 0])
                for metric in (REWARD, "grad/norm", ENTROPY)
            )
        )


def read_runs(folder: StudyFolder, runs: Sequence[PlannedRun]) -> list[RunRecord]:
    """Read what each run has left, finished or not."""
    records = []
    for run in runs:
        place = folder.run(run.name, run.kind)
        state = folder.read_state(run.name, run.kind)
        evaluations = sorted(place.eval.glob("step-*.jsonl"))
        final = Evaluation.read(evaluations[-1]) if evaluations and state["status"] == DONE else None
        records.append(RunRecord(run.name, run.variant, run.seed, state, place.read_metrics(), final))
    return records


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def values_of(runs: Sequence[RunRecord], measure: Callable[[RunRecord], float | None]) -> Values | None:
    """Return a measure of every run, `[runs]`; None where one run does not have it."""
    found = [measure(run) for run in runs]
    return None if any(value is None for value in found) else np.asarray(found, dtype=np.float64)


def reach_times(runs: Sequence[RunRecord], metric: str, axis: str, threshold: float) -> Times | None:
    """Return when each run reached a threshold; None where one was never measured."""
    found = []
    for run in runs:
        one = run.curve(metric)
        if not one.values.size:
            return None
        window = min(SMOOTHING, one.values.size) if metric == REWARD else 1
        x = one.axis(axis)
        found.append((*first_reached(x, one.values, threshold, window=window), float(x[-1])))
    return Times(*(np.asarray(column) for column in zip(*found, strict=True)))
