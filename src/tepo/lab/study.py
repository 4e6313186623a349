"""Running a study: tune, train every variant on every seed, analyse, write the page."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tepo.core.errors import InputError, WorkError
from tepo.core.files import write_json, write_text
from tepo.core.text import quoted
from tepo.lab.config import StudyConfig, Tuning
from tepo.lab.curves import curve
from tepo.lab.folder import DONE, FAILED, HALF, REFUSED, StudyFolder
from tepo.lab.plan import PlannedRun, plan_runs, plan_tuning, refuse_changed, threads_each
from tepo.lab.processes import Job, last_words, run_jobs
from tepo.lab.report import write_report
from tepo.lab.results import analyse
from tepo.training.rundir import plain_config
from tepo.training.toml import dump_toml

Say = Callable[[str], None]


def run_study(study: StudyConfig, *, say: Say, retry: bool = False) -> dict[str, Any]:
    """Make what is missing of a study and return its results (see `results`), also written to results.json.

    Finished runs are kept, half runs go on from their checkpoint, failed runs are kept with their error and made
    anew only with `retry`. Raise `WorkError` when Ctrl-C stopped it, or when no run of a variant's grid succeeded, and
    `InputError` when a run is refused before it begins: its data, model or reward is at fault, not the method.
    """
    folder = StudyFolder(Path(study.studies) / study.name)
    tuning = plan_tuning(study, folder)
    refuse_changed(folder, tuning or plan_runs(study, folder, {}))
    with folder.locked():
        write_text(folder.study, dump_toml(study.model_dump(mode="json")))
        _make(study, folder, tuning, say=say, retry=retry)
        chosen = choose(study, folder, tuning)
        for variant, record in chosen.items():
            say(f"{variant}: {record['key']} = {record['value']:g} is best of the grid{record['remark']}")
        runs = plan_runs(study, folder, {variant: record["value"] for variant, record in chosen.items()})
        refuse_changed(folder, runs)
        _make(study, folder, runs, say=say, retry=retry)
        return write_results(study, folder, say=say)


def write_results(study: StudyConfig, folder: StudyFolder, *, say: Say) -> dict[str, Any]:
    """Analyse what there is, finished or not, and write results.json and the page."""
    if not folder.path.is_dir():
        raise InputError(f"{folder.path} is not there: run the study first, without --report-only")
    chosen = choose(study, folder, plan_tuning(study, folder), partial=True)
    runs = plan_runs(study, folder, {variant: record["value"] for variant, record in chosen.items()})
    results = analyse(study, folder, runs, chosen)
    write_json(folder.results, results)
    write_report(folder.path)
    say(f"report: {folder.report}")
    return results


def choose(
    study: StudyConfig, folder: StudyFolder, runs: Sequence[PlannedRun], *, partial: bool = False
) -> dict[str, dict[str, Any]]:
    """Return each variant's best grid value: the largest mean, over tuning seeds, of the metric's last quarter.

    A failed run counts as the worst. With `partial`, a variant whose grid is not complete is left out.
    """
    tuning = study.tuning
    if tuning is None:
        return {}
    result = {}
    for variant in study.variants:
        scores = {
            value: _score(tuning, folder, [run for run in runs if (run.variant, run.value) == (variant.name, value)])
            for value in tuning.grid
        }
        if any(score is None for score in scores.values()) and partial:
            continue
        known = {value: score for value, score in scores.items() if score is not None and np.isfinite(score)}
        if not known:
            raise WorkError(f"{variant.name}: no tuning run has {tuning.metric}; see {folder.path / 'logs'}")
        best = max(known, key=lambda value: known[value])
        edge = len(tuning.grid) > 1 and best in (min(tuning.grid), max(tuning.grid))
        result[variant.name] = {
            "key": tuning.key,
            "value": best,
            "metric": tuning.metric,
            "seeds": list(tuning.seeds),
            "scores": [
                {"value": value, "score": score if score is not None and np.isfinite(score) else None}
                for value, score in scores.items()
            ],
            "edge": edge,
            "remark": "; it lies at the grid's edge, a wider grid may do better" if edge else "",
        }
    return result


def _score(tuning: Tuning, folder: StudyFolder, runs: Sequence[PlannedRun]) -> float | None:
    """Return the mean score of one grid value's runs: -inf where one failed, None where one is not finished."""
    scores = []
    for run in runs:
        status = folder.read_state(run.name, run.kind)["status"]
        if status not in (DONE, FAILED):
            return None
        values = curve(folder.run(run.name, run.kind).read_metrics(), tuning.metric).values
        part = values[-max(1, len(values) // 4) :]
        scores.append(float(part.mean()) if status == DONE and part.size else -np.inf)
    return float(np.mean(scores))


def _make(study: StudyConfig, folder: StudyFolder, runs: Sequence[PlannedRun], *, say: Say, retry: bool) -> None:
    """Run what is not finished of `runs`; raise `WorkError` when that was stopped, `InputError` when one is refused."""
    by_name = {run.name: run for run in runs}
    jobs = [job for run in runs if (job := _job(study, folder, run, retry=retry)) is not None]
    if not jobs:
        return
    kept = len(runs) - len(jobs)
    say(f"{len(jobs)} runs to make" + (f", {kept} finished earlier" if kept else ""))
    done = 0

    def started(name: str) -> None:
        half = folder.read_state(name, by_name[name].kind)["status"] == HALF
        say(f"{name}: {'continued' if half else 'started'}")

    def ended(name: str, code: int, seconds: float) -> None:
        nonlocal done
        done += 1
        run = by_name[name]
        state = folder.read_state(name, run.kind)
        if state["status"] == REFUSED:
            raise InputError(f"{name}: {state['error']}")
        if state["status"] not in (DONE, FAILED):
            how = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            folder.write_state(name, FAILED, f"{how}\n{last_words(folder.log(name))}".strip())
            state = folder.read_state(name, run.kind)
        if state["status"] == DONE:
            _tidy(study, folder, run)
        error = f": {state['error'].splitlines()[0]}" if state["error"] else ""
        say(f"{name}: {state['status']} after {seconds:.0f} s ({done} of {len(jobs)}){error}")

    def stopping() -> None:
        say("stopping: every run at work finishes its step and saves; Ctrl-C again stops at once")

    threads = threads_each(study)
    if not run_jobs(jobs, at_once=study.at_once, threads=threads, started=started, ended=ended, stopping=stopping):
        raise WorkError(
            f"stopped; finished runs are safe in {folder.path}, half ones go on from their checkpoint. "
            f"Continue with: tepo compare {quoted(folder.path)}"
        )


def _job(study: StudyConfig, folder: StudyFolder, run: PlannedRun, *, retry: bool) -> Job | None:
    """Return what is to be done for a run; None where it is finished, or failed and not to be retried."""
    status = folder.read_state(run.name, run.kind)["status"]
    if status == HALF and (folder.run(run.name, run.kind).model / "config.json").exists():
        # Its process was killed between the last file of the run and the record of its end.
        folder.write_state(run.name, DONE)
        _tidy(study, folder, run)
        return None
    if status == DONE:
        _tidy(study, folder, run)  # it may have ended while the study was stopping
        return None
    if status == FAILED and not retry:
        return None
    folder.state(run.name).unlink(missing_ok=True)
    write_text(folder.config(run.name), dump_toml(plain_config(run.config)))
    command = (sys.executable, "-m", "tepo.lab.child", str(folder.path), run.kind, run.name)
    return Job(run.name, command, folder.log(run.name))


def _tidy(study: StudyConfig, folder: StudyFolder, run: PlannedRun) -> None:
    """Remove what the study does not keep of a finished run."""
    place = folder.run(run.name, run.kind)
    if study.keep != "all":
        shutil.rmtree(place.checkpoints, ignore_errors=True)
    if study.keep == "nothing" or run.kind == "tuning":
        shutil.rmtree(place.model, ignore_errors=True)


def failures(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the runs that failed."""
    return [run for run in results["runs"] if run["status"] == FAILED]
