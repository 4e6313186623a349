"""Continuing a run where it stopped, or starting a new one from another's checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tepo.core.errors import InputError
from tepo.training.checkpoint import Checkpoint, checkpoint_steps, damage, load_checkpoint
from tepo.training.config import RunConfig
from tepo.training.rundir import RunFolder, plain_config, step_name

_PLACE = ("name", "runs")
"""Keys that say where a run lies; a folder may be moved and continued."""
_ABSENT = "(absent)"


def check_same_settings(saved: RunConfig, given: RunConfig, folder: RunFolder) -> None:
    """Raise `InputError` showing every key that differs; more steps are allowed, fewer are not."""
    old, new = dict(_leaves(plain_config(saved))), dict(_leaves(plain_config(given)))
    lines = [
        f"  {key}: {old.get(key, _ABSENT)!r} in the run, {new.get(key, _ABSENT)!r} given"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, _ABSENT) != new.get(key, _ABSENT) and key not in _PLACE and key != "train.steps"
    ]
    if given.train.steps < saved.train.steps:
        lines.append(f"  train.steps: {saved.train.steps} in the run, {given.train.steps} given (more is allowed)")
    if lines:
        raise InputError(
            f"--resume {folder.path}: settings differ from the run's config.toml:\n"
            + "\n".join(lines)
            + "\nContinue with the run's own settings, or start a new run from its checkpoint with --fork."
        )


def latest_checkpoint(folder: RunFolder, say: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest undamaged checkpoint, saying which ones were passed over; None where there is none."""
    for step in reversed(checkpoint_steps(folder)):
        path = folder.checkpoints / step_name(step)
        problem = damage(path)
        if problem is None:
            return load_checkpoint(path)
        say(f"checkpoint {path.name} is damaged ({problem}); trying the one before")
    return None


def parse_fork(text: str) -> tuple[RunFolder, int]:
    """Return (run, step) of `RUN@STEP`; a run without that checkpoint is an `InputError` listing those it has."""
    path, sign, step = text.rpartition("@")
    if not sign or not step.isdigit():
        raise InputError(f"--fork {text!r}: expected RUN@STEP, for example runs/first@50")
    folder = RunFolder(Path(path))
    if not folder.path.is_dir():
        raise InputError(f"--fork {text!r}: no run folder {path}")
    steps = checkpoint_steps(folder)
    if int(step) not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise InputError(f"--fork {text!r}: {path} has no checkpoint of step {step}. It has: {known}.")
    return folder, int(step)


def fork_checkpoint(text: str) -> Checkpoint:
    """Load the checkpoint named `RUN@STEP`."""
    folder, step = parse_fork(text)
    return load_checkpoint(folder.checkpoints / step_name(step))


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
