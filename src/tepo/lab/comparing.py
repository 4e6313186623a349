"""One variant against the baseline: every figure paired by seed, and the sentences that follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tepo.core.errors import InputError
from tepo.lab.curves import AXES, area
from tepo.lab.intervals import Values, mean_effect, paired_accuracy, probability_of_improvement
from tepo.lab.records import REWARD, RunRecord, reach_times, values_of
from tepo.lab.survival import median_time, time_ratio
from tepo.lab.verdict import accuracy_verdict, measure_verdict, time_verdict


def compare(
    base_name: str, base: Sequence[RunRecord], name: str, other: Sequence[RunRecord], thresholds: Mapping[str, float]
) -> dict[str, Any]:
    """Return every figure of one variant against the baseline, with its sentences; fields are null without runs."""
    shared = sorted({run.seed for run in base} & {run.seed for run in other})
    pairs = (_of_seeds(base, shared), _of_seeds(other, shared))
    result: dict[str, Any] = {"variant": name, "baseline": base_name, "seeds": shared, "verdicts": []}
    if not shared:
        missing = [label for label, runs in ((base_name, base), (name, other)) if not runs]
        why = f"no finished run of {' or '.join(missing)}" if missing else "no seed that both finished"
        return result | {"verdicts": [f"{name} against {base_name}: {why}, nothing to compare"]}
    tables = _accuracies(*pairs)
    if tables is not None:
        effect = paired_accuracy(*tables)
        result["accuracy"] = effect.to_json() | _flips(*tables)
        result["verdicts"].append(accuracy_verdict(name, base_name, effect))
    primary = [table.mean(axis=1) for table in tables] if tables is not None else None
    measures: dict[str, tuple[str, Callable[[RunRecord], float | None]]] = {
        "final_reward": ("reward at the end", lambda run: run.final_reward),
        "entropy_kept": ("share of entropy kept", lambda run: run.entropy_kept),
        "worst_drop": ("worst drop of reward", lambda run: run.stability.worst_drop),
    }
    for axis in AXES:
        until = _common_end([*base, *other], axis)
        measures[f"area_{axis}"] = (f"mean reward over {axis}", _area_of(axis, until))
    for key, (words, measure) in measures.items():
        found = [values_of(runs, measure) for runs in pairs]
        if any(values is None for values in found):
            continue
        first, second = (values for values in found if values is not None)
        effect = mean_effect(second - first)
        result[key] = effect.to_json()
        if key in ("final_reward", "entropy_kept", "area_tokens"):
            result["verdicts"].append(measure_verdict(name, base_name, words, effect))
        if key == "final_reward" and primary is None:
            primary = [first, second]
    if primary is not None:
        result["improvement"] = probability_of_improvement(*primary).to_json()
    result["times"] = _time_ratios(pairs, thresholds)
    result["verdicts"] += [time_verdict(name, base_name, one) for one in result["times"] if one["axis"] == "tokens"]
    return result


def _of_seeds(runs: Sequence[RunRecord], seeds: Sequence[int]) -> list[RunRecord]:
    by_seed = {run.seed: run for run in runs}
    return [by_seed[seed] for seed in seeds]


def _accuracies(base: Sequence[RunRecord], other: Sequence[RunRecord]) -> tuple[Values, Values] | None:
    """Return the share of right samples `[seeds, questions]` of both; None where runs were not evaluated alike."""
    every = [run.final for run in (*base, *other)]
    evaluations = [one for one in every if one is not None]
    if len(evaluations) < len(every) or not evaluations:
        return None
    asked = [[(question.id, question.question) for question in one.questions] for one in evaluations]
    if any(one != asked[0] for one in asked):
        raise InputError("the runs of the study were evaluated on different questions; make them anew")
    table = np.asarray([[q.passed / len(q.samples) for q in one.questions] for one in evaluations])
    return table[: len(base)], table[len(base) :]


def _flips(first: Values, second: Values) -> dict[str, int]:
    """Return on how many questions the second is better, and worse, in the mean over seeds."""
    gaps = second.mean(axis=0) - first.mean(axis=0)
    return {"questions_better": int((gaps > 0).sum()), "questions_worse": int((gaps < 0).sum())}


def _area_of(axis: str, until: float) -> Callable[[RunRecord], float | None]:
    return lambda run: area(run.curve(REWARD), axis, until=until)


def _common_end(runs: Sequence[RunRecord], axis: str) -> float:
    """Return how far every run goes on an axis."""
    ends = [points[-1] for run in runs if (points := run.curve(REWARD).axis(axis)).size]
    return float(min(ends, default=0.0))


def _time_ratios(
    pairs: tuple[Sequence[RunRecord], Sequence[RunRecord]], thresholds: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Return, for every threshold and axis, how many runs of each reached it and the ratio of restricted means."""
    result = []
    for metric, threshold in thresholds.items():
        for axis in AXES:
            base, other = (reach_times(runs, metric, axis, threshold) for runs in pairs)
            if base is None or other is None:
                continue
            ratio = time_ratio(base, other)
            result.append(
                {
                    "metric": metric,
                    "threshold": threshold,
                    "axis": axis,
                    "ratio": ratio.to_json() if ratio is not None else None,
                    "reached": [int(base.reached.sum()), int(other.reached.sum())],
                    "runs": [int(base.reached.size), int(other.reached.size)],
                    "median": [median_time(base), median_time(other)],
                }
            )
    return result
