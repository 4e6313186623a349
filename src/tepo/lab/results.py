"""From the runs of a study to its statistics, as one tree of plain values: results.json.

Keys: `name`, `baseline`, `seeds`, `budget`, `variants` (per variant: configuration differences, tuning and the
variant's own figures), `runs` (per run: status, error, figures), `comparisons` (per variant against the baseline),
`verdicts` (sentences), `rules`, `notes`. An effect is {value, low, high, seeds, questions}; the unknown is null.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from tepo.core.errors import InputError
from tepo.evaluation import Evaluation, QuestionResult
from tepo.evaluation.results import default_ks
from tepo.lab.config import StudyConfig
from tepo.lab.curves import AXES, Curve, area, curve
from tepo.lab.folder import DONE, FAILED, StudyFolder
from tepo.lab.intervals import (
    FEW_SEEDS,
    Values,
    accuracy,
    mean_effect,
    paired_accuracy,
    probability_of_improvement,
)
from tepo.lab.plan import PlannedRun, differing
from tepo.lab.stability import RULES, Stability, kept, stability, tenth
from tepo.lab.survival import Times, first_reached, median_time, time_ratio
from tepo.lab.verdict import accuracy_verdict, measure_verdict, time_verdict
from tepo.training.rundir import plain_config

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


def analyse(
    study: StudyConfig, folder: StudyFolder, runs: Sequence[PlannedRun], chosen: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the results of a study; unfinished and failed runs are listed and left out of the figures."""
    records = read_runs(folder, runs)
    by_variant = {
        variant.name: [record for record in records if record.variant == variant.name and record.done]
        for variant in study.variants
    }
    thresholds, remarks = _thresholds(study, by_variant[study.reference])
    comparisons = [
        compare(study.reference, by_variant[study.reference], name, found, thresholds)
        for name, found in by_variant.items()
        if name != study.reference
    ]
    configs = {run.variant: plain_config(run.config) for run in runs}
    return {
        "name": study.name,
        "baseline": study.reference,
        "seeds": list(study.seeds),
        "budget": {"steps": runs[0].config.train.steps if study.tokens is None else None, "tokens": study.tokens},
        "thresholds": thresholds,
        "variants": [
            {
                "name": name,
                "differs": _differences(configs, name),
                "tuning": chosen.get(name),
                **_own_figures(found, thresholds),
            }
            for name, found in by_variant.items()
        ],
        "runs": [_run_figures(folder, record) for record in records],
        "comparisons": comparisons,
        "verdicts": [sentence for one in comparisons for sentence in one["verdicts"]],
        "rules": {**RULES, "threshold": f"first step whose mean reward of {SMOOTHING} steps reaches it"},
        "notes": remarks + _notes(study, records, configs),
    }


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
        found = [_values(runs, measure) for runs in pairs]
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


def _values(runs: Sequence[RunRecord], measure: Callable[[RunRecord], float | None]) -> Values | None:
    found = [measure(run) for run in runs]
    return None if any(value is None for value in found) else np.asarray(found, dtype=np.float64)


def _area_of(axis: str, until: float) -> Callable[[RunRecord], float | None]:
    return lambda run: area(run.curve(REWARD), axis, until=until)


def _common_end(runs: Sequence[RunRecord], axis: str) -> float:
    """Return how far every run goes on an axis."""
    ends = [points[-1] for run in runs if (points := run.curve(REWARD).axis(axis)).size]
    return float(min(ends, default=0.0))


def _times(runs: Sequence[RunRecord], metric: str, axis: str, threshold: float) -> Times | None:
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


def _time_ratios(
    pairs: tuple[Sequence[RunRecord], Sequence[RunRecord]], thresholds: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Return, for every threshold and axis, how many runs of each reached it and the ratio of restricted means."""
    result = []
    for metric, threshold in thresholds.items():
        for axis in AXES:
            base, other = (_times(runs, metric, axis, threshold) for runs in pairs)
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


def _thresholds(study: StudyConfig, base: Sequence[RunRecord]) -> tuple[dict[str, float], list[str]]:
    """Return the thresholds asked for, or one found in the baseline's rewards, and what is to be said of it."""
    if study.thresholds:
        return dict(study.thresholds), []
    curves = [values for run in base if (values := run.curve(REWARD).values).size]
    if not curves:
        return {}, []
    start = float(np.mean([values[: tenth(values.size)].mean() for values in curves]))
    end = float(np.mean([values[-tenth(values.size) :].mean() for values in curves]))
    if end <= start:
        return {}, ["the baseline's reward does not rise, so no threshold was taken from it"]
    threshold = round(start + 0.8 * (end - start), 4)
    note = (
        f"threshold {REWARD} {threshold:g} is four fifths of the baseline's own rise, chosen after seeing it; set "
        "[thresholds] beforehand for a confirmatory study"
    )
    return {REWARD: threshold}, [note]


def _own_figures(runs: Sequence[RunRecord], thresholds: Mapping[str, float]) -> dict[str, Any]:
    """Return a variant's own figures over its finished runs."""
    result: dict[str, Any] = {"finished": len(runs)}
    measures: dict[str, Callable[[RunRecord], float | None]] = {
        "final_reward": lambda run: run.final_reward,
        "entropy_kept": lambda run: run.entropy_kept,
        "worst_drop": lambda run: run.stability.worst_drop,
    }
    for key, measure in measures.items():
        values = _values(runs, measure) if runs else None
        result[key] = mean_effect(values).to_json() if values is not None else None
    result["spikes"] = sum(run.stability.spikes for run in runs)
    result["collapsed"] = sum(run.stability.collapsed for run in runs)
    evaluations = [run.final for run in runs if run.final is not None]
    if evaluations and len(evaluations) == len(runs):
        result |= _benchmark(evaluations)
    result["times"] = [
        {"metric": metric, "threshold": threshold, "axis": axis, "median": median_time(times)}
        for metric, threshold in thresholds.items()
        for axis in AXES
        if runs and (times := _times(runs, metric, axis, threshold)) is not None
    ]
    return result


def _benchmark(evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """Return accuracy, pass@k and maj@k over seeds and questions."""
    ks = default_ks(min(one.samples for one in evaluations))

    def over(value: Callable[[QuestionResult], float]) -> dict[str, Any]:
        table = np.asarray([[value(question) for question in one.questions] for one in evaluations])
        return accuracy(table).to_json()

    return {
        "accuracy": over(lambda question: question.passed / len(question.samples)),
        "pass_at": {str(k): over(partial(QuestionResult.pass_at, k=k)) for k in ks},
        "majority_at": {str(k): over(partial(QuestionResult.majority_at, k=k)) for k in ks},
    }


def _run_figures(folder: StudyFolder, record: RunRecord) -> dict[str, Any]:
    last = record.lines[-1] if record.lines else {}
    lines = [line for line in record.lines if line["step"] > 0]
    final = record.final.summary(ks=(1,)).average.to_json() if record.final is not None else None
    return {
        "name": record.name,
        "variant": record.variant,
        "seed": record.seed,
        "folder": str(folder.run(record.name).path.relative_to(folder.path)),
        "status": record.state["status"],
        "error": record.state["error"],
        "steps": last.get("step", 0),
        "tokens": last.get("tokens", 0),
        "seconds": sum(float(line.get("time/step") or 0.0) for line in lines),
        "final_reward": record.final_reward,
        "accuracy": final,
        "entropy_kept": record.entropy_kept,
        "stability": record.stability.to_json() if lines else None,
    }


def _differences(configs: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return the settings of a variant that are not the same in all variants."""
    keys = [key for key in differing(*configs.values()) if key not in ("name", "runs", "train.seed")]
    return {key: value for key in keys if (value := _at(configs[name], key)) is not None}


def _at(tree: Mapping[str, Any], key: str) -> Any:
    node: Any = tree
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _notes(study: StudyConfig, records: Sequence[RunRecord], configs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what a reader must know to judge the figures."""
    notes = []
    failed = [record.name for record in records if record.state["status"] == FAILED]
    missing = [record.name for record in records if not record.done and record.name not in failed]
    if failed:
        notes.append(f"failed, and left out of every figure: {', '.join(failed)}; a method that fails is not better")
    if missing:
        notes.append(f"not finished, and left out of every figure: {', '.join(missing)}")
    if len(study.seeds) < FEW_SEEDS:
        notes.append(
            f"{len(study.seeds)} seed{'s' * (len(study.seeds) > 1)}: the variance between seeds is "
            + ("unknown" if len(study.seeds) == 1 else "barely estimated, and intervals are wide for that")
        )
    if len(study.variants) > 2:
        notes.append(
            f"{len(study.variants) - 1} variants are compared with {study.reference}; each interval is for one "
            "comparison alone and is not widened for their number"
        )
    own = ("objective", "optim")
    others = [
        key
        for key in differing(*configs.values())
        if key.split(".")[0] not in own and key not in ("name", "runs", "train.seed")
    ]
    if others:
        notes.append(f"variants differ in more than objective and optimiser: {', '.join(others)}")
    spent = {record.variant: record.lines[-1].get("tokens", 0) for record in records if record.done and record.lines}
    if study.tokens is None and spent and max(spent.values()) > 1.1 * min(spent.values()):
        notes.append("the budget is in steps; response tokens differ by over a tenth: read the token axis too")
    return notes


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")
