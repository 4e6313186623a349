"""From the runs of a study to its statistics, as one tree of plain values: results.json.

Keys: `name`, `baseline`, `seeds`, `budget`, `variants` (per variant: configuration differences, tuning and the
variant's own figures), `runs` (per run: status, error, figures), `comparisons` (per variant against the baseline),
`verdicts` (sentences), `rules`, `notes`. An effect is {value, low, high, seeds, questions}; the unknown is null.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from tepo.core.errors import nearest
from tepo.evaluation import Evaluation, QuestionResult
from tepo.evaluation.results import default_ks
from tepo.lab.comparing import compare
from tepo.lab.config import StudyConfig
from tepo.lab.curves import AXES
from tepo.lab.folder import FAILED, StudyFolder
from tepo.lab.intervals import (
    FEW_SEEDS,
    accuracy,
    mean_effect,
)
from tepo.lab.plan import PlannedRun, differing
from tepo.lab.records import REWARD, SMOOTHING, RunRecord, reach_times, read_runs, values_of
from tepo.lab.stability import RULES, tenth
from tepo.lab.survival import median_time
from tepo.training.rundir import plain_config


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
        values = values_of(runs, measure) if runs else None
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
        if runs and (times := reach_times(runs, metric, axis, threshold)) is not None
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
    recorded = {key for record in records for line in record.lines for key in line}
    for metric in study.thresholds:
        if recorded and metric not in recorded:
            notes.append(f"no run recorded {metric!r}, so nothing is said of its threshold.{nearest(metric, recorded)}")
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
