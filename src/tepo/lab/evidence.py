"""What the runs of a report have left on disk, finished or not, as one value a run."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tepo.core.errors import InputError
from tepo.evaluation import Evaluation, QuestionResult
from tepo.lab.folder import DONE, FAILED, StudyFolder
from tepo.lab.intervals import Values
from tepo.training.loading import PROVENANCE, read_toml
from tepo.training.rundir import RunFolder

UNFINISHED = "unfinished"


@dataclass(frozen=True)
class Evidence:
    """One run: `status` is done, failed or unfinished, `said` what is to be told of that."""

    name: str
    variant: str
    seed: int
    folder: RunFolder
    config: Mapping[str, Any]
    provenance: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]
    evaluations: Mapping[int, Evaluation] = field(repr=False)
    status: str
    said: str

    @property
    def steps(self) -> int:
        """The last step on record."""
        return int(self.lines[-1]["step"]) if self.lines else 0

    @property
    def last(self) -> Evaluation | None:
        """The last evaluation."""
        return self.evaluations[max(self.evaluations)] if self.evaluations else None

    def series(self, metric: str) -> Values:
        """Return the finite values of a metric over the training steps."""
        values = [line.get(metric) for line in self.lines if line["step"] > 0]
        found = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        return np.asarray(found, dtype=np.float64)


def read_run(path: Path) -> Evidence:
    """Read a run that stands alone; a folder that is no run is an `InputError`."""
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise InputError(f"{path} is not a run: it has no config.toml")
    config, provenance = _settings(folder)
    lines = folder.read_metrics()
    planned, reached = int(config.get("train", {}).get("steps", 0)), int(lines[-1]["step"]) if lines else 0
    if (folder.model / "config.json").exists():
        status, said = DONE, f"finished: {reached} steps"
    else:
        status = UNFINISHED
        said = f"not finished: step {reached} of {planned}{_last_sign(folder)}; still running, stopped or crashed"
    name = path.resolve().name
    variant = str(config.get("objective", {}).get("name", name))
    return Evidence(name, variant, _seed(config), folder, config, provenance, lines, _evaluations(folder), status, said)


def read_study(path: Path, results: Mapping[str, Any]) -> list[Evidence]:
    """Read every run that the results of a study name, in their order."""
    study = StudyFolder(path)
    found = []
    for entry in results["runs"]:
        state = study.read_state(entry["name"])
        folder = study.run(entry["name"])
        config, provenance = _settings(folder) if folder.config.is_file() else ({}, {})
        lines = folder.read_metrics()
        status = state["status"] if state["status"] in (DONE, FAILED) else UNFINISHED
        reached = lines[-1]["step"] if lines else 0
        words = {DONE: f"finished: {reached} steps", FAILED: f"failed after step {reached}"}
        said = words.get(status, f"not finished: step {reached}{_last_sign(folder)}")
        if state.get("error"):
            said += f"\n{state['error']}"
        found.append(
            Evidence(
                *(entry["name"], entry["variant"], int(entry["seed"]), folder, config, provenance, lines),
                *(_evaluations(folder), status, said),
            )
        )
    return found


def rates(evaluations: Sequence[Evaluation]) -> Values | None:
    """Return the share of right samples `[evaluations, questions]`; None where they did not ask the same."""
    asked = [[(question.id, question.question) for question in one.questions] for one in evaluations]
    if not asked or any(one != asked[0] for one in asked):
        return None
    return np.asarray([[share(question) for question in one.questions] for one in evaluations], dtype=np.float64)


def share(question: QuestionResult) -> float:
    """Return the share of a question's samples that are right."""
    return question.passed / len(question.samples)


def _settings(folder: RunFolder) -> tuple[dict[str, Any], dict[str, Any]]:
    config = read_toml(folder.config)
    provenance = config.pop(PROVENANCE, {})
    return config, provenance


def _seed(config: Mapping[str, Any]) -> int:
    return int(config.get("train", {}).get("seed", 0))


def _evaluations(folder: RunFolder) -> dict[int, Evaluation]:
    """Read the first and the last evaluation that can be read; one that a crash cut short is left out."""
    paths = sorted(path for path in folder.eval.glob("step-*.jsonl"))
    found: dict[int, Evaluation] = {}
    for order in (paths, reversed(paths)):
        for path in order:
            step = int(path.stem.partition("-")[2])
            if step in found:
                break
            try:
                found[step] = Evaluation.read(path)
                break
            except (OSError, ValueError, KeyError, TypeError, json.JSONDecodeError):
                continue
    return dict(sorted(found.items()))


def _last_sign(folder: RunFolder) -> str:
    """Return, in words, how long ago the run wrote its last line."""
    if not folder.metrics.is_file():
        return ", no step is on record"
    minutes = max(0.0, time.time() - folder.metrics.stat().st_mtime) / 60
    ago = f"{minutes:.0f} minutes" if minutes < 120 else f"{minutes / 60:.0f} hours"
    return f", last line written {ago} ago"
