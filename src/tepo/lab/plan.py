"""From a study to the runs it is made of, each with its whole configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tepo.core.errors import InputError
from tepo.lab.config import StudyConfig, Variant, refuse_unfair, variant_tree
from tepo.lab.folder import StudyFolder
from tepo.training.config import RunConfig
from tepo.training.loading import assign, check_config
from tepo.training.rundir import plain_config, read_config

MANY_STEPS = 1_000_000
"""Steps of a run whose budget is tokens: never reached."""
_FREE = ("name", "runs", "model.threads", "train.preflight")
"""Keys that may differ from an earlier session: they change no result, or only where the run lies."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study; `kind` is `runs` or `tuning`, `value` what a tuning run tries."""

    name: str
    kind: str
    variant: str
    seed: int
    config: RunConfig
    value: float | None = None


def plan_runs(study: StudyConfig, folder: StudyFolder, chosen: Mapping[str, float]) -> list[PlannedRun]:
    """Return the runs that are compared, all variants of a seed before the next seed.

    So a study that is stopped early has whole pairs. `chosen` holds each variant's tuned value, where there is one.
    """
    refuse_unfair(study)
    return [
        _planned(
            study,
            folder,
            variant,
            seed,
            "runs",
            f"{variant.name}-seed{seed}",
            {study.tuning.key: chosen[variant.name]} if study.tuning is not None and variant.name in chosen else {},
        )
        for seed in study.seeds
        for variant in study.variants
    ]


def plan_tuning(study: StudyConfig, folder: StudyFolder) -> list[PlannedRun]:
    """Return the tuning runs; none without a `tuning` section."""
    tuning = study.tuning
    if tuning is None:
        return []
    steps = {"train.steps": tuning.steps} if tuning.steps is not None else {}
    return [
        replace(
            _planned(
                study,
                folder,
                variant,
                seed,
                "tuning",
                f"{variant.name}-{tuning.key.rpartition('.')[2]}{value:g}-seed{seed}",
                {**steps, tuning.key: value},
            ),
            value=value,
        )
        for seed in tuning.seeds
        for variant in study.variants
        for value in tuning.grid
    ]


def threads_each(study: StudyConfig) -> int:
    """Return how many threads each run computes with: the cores shared out evenly."""
    cores = study.cores or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return max(1, cores // study.at_once)


def _planned(
    study: StudyConfig,
    folder: StudyFolder,
    variant: Variant,
    seed: int,
    kind: str,
    name: str,
    settings: Mapping[str, Any],
) -> PlannedRun:
    """Return a run with its configuration checked; a fault names the variant."""
    tree = variant_tree(study, variant)
    train = tree.setdefault("train", {})
    if study.tokens is not None:
        if tree.get("optim", {}).get("schedule", "constant") != "constant":
            raise InputError("tokens: a budget in tokens needs optim.schedule = 'constant'; its length is not known")
        train["tokens"], train["steps"] = study.tokens, train.get("steps", MANY_STEPS)
    elif study.steps is not None:
        train["steps"] = study.steps
    train.setdefault("preflight", 0)
    tree.setdefault("model", {}).setdefault("threads", threads_each(study))
    for key, value in settings.items():
        assign(tree, key, value)
    train["seed"] = seed
    tree |= {"name": name, "runs": str(folder.path / kind)}
    return PlannedRun(name, kind, variant.name, seed, check_config(tree, source=f"variant {variant.name!r}"))


def refuse_changed(folder: StudyFolder, runs: Sequence[PlannedRun]) -> None:
    """Raise `InputError` where a run that was begun has other settings than the study now asks for."""
    for run in runs:
        begun = folder.run(run.name, run.kind)
        if not begun.config.exists():
            continue
        keys = differing(plain_config(read_config(begun)[0]), plain_config(run.config))
        keys = [key for key in keys if key not in _FREE]
        if keys:
            raise InputError(
                f"{begun.path} was begun with other settings than the study asks for now: {', '.join(keys)}. "
                "Give the study another name, or remove that run to make it anew."
            )


def differing(*trees: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys whose values are not the same in all trees, sorted."""
    flat = [dict(_leaves(tree)) for tree in trees]
    keys = {key for one in flat for key in one}
    absent = object()
    return sorted(key for key in keys if any(one.get(key, absent) != flat[0].get(key, absent) for one in flat))


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", list(value) if isinstance(value, tuple) else value
