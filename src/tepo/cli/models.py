"""What a MODEL on the command line stands for: a model, a run, or one checkpoint of a run."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tepo.core.errors import InputError
from tepo.core.text import quoted

if TYPE_CHECKING:
    from tepo.policy import Policy
    from tepo.training.config import RunConfig

MODEL_HELP = "A run, RUN@STEP, a model folder, a hub id, or builtin:smollm2-135m."


@dataclass(frozen=True)
class NamedModel:
    """A name resolved: the model to load, and the run and checkpoint it comes from, where it does."""

    path: str
    """What `PolicyConfig.path` takes."""
    run: RunConfig | None = None
    """Configuration of the run it belongs to."""
    checkpoint: Path | None = None
    """Folder whose weights replace those of `path`."""


def resolve(name: str, say: Callable[[str], None]) -> NamedModel:
    """Return what a name stands for; a run without weights on disk is an `InputError`."""
    folder, at, step = name.rpartition("@")
    if at and step.isdigit() and (Path(folder) / "config.toml").is_file():
        return _checkpoint(Path(folder), int(step))
    path = Path(name)
    match = re.fullmatch(r"step-(\d+)", path.name)
    if match and path.parent.name == "checkpoints" and (path.parent.parent / "config.toml").is_file():
        return _checkpoint(path.parent.parent, int(match[1]))
    if (path / "config.toml").is_file():
        return _run(path, say)
    return NamedModel(str(name))


def _run(path: Path, say: Callable[[str], None]) -> NamedModel:
    """Return a run's final model, or its newest checkpoint while there is none."""
    from tepo.training.checkpoint import checkpoint_steps
    from tepo.training.rundir import RunFolder, read_config

    folder = RunFolder(path)
    if (folder.model / "config.json").is_file():
        return NamedModel(str(folder.model), read_config(folder)[0])
    steps = checkpoint_steps(folder)
    if not steps:
        raise InputError(
            f"{path} is a run without a model or a checkpoint yet; "
            f"continue it with `tepo train --resume {quoted(path)}`"
        )
    say(f"{path} is not finished; taking its newest checkpoint, step {steps[-1]}")
    return _checkpoint(path, steps[-1])


def _checkpoint(path: Path, step: int) -> NamedModel:
    """Return one checkpoint of a run; one that is not there is an `InputError` naming those that are."""
    from tepo.training.checkpoint import checkpoint_steps
    from tepo.training.rundir import RunFolder, read_config, step_name

    folder = RunFolder(path)
    steps = checkpoint_steps(folder)
    if step not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise InputError(f"{path} has no checkpoint of step {step}. It has: {known}.")
    run = read_config(folder)[0]
    return NamedModel(run.model.path, run, folder.checkpoints / step_name(step))


def load(named: NamedModel, overrides: dict[str, Any], say: Callable[[str], None]) -> Policy:
    """Load the model a name stands for; `overrides` are fields of the `model` section."""
    from tepo.policy import PolicyConfig, load_policy
    from tepo.tasks.config import checked

    base = named.run.model.model_dump() if named.run is not None else {}
    if named.checkpoint is None:
        base["lora"] = None  # a saved model is merged
    config = checked(PolicyConfig, {**base, **overrides, "path": named.path}, "model")
    policy = load_policy(config, seed=named.run.train.seed if named.run is not None else 0, say=say)
    if named.checkpoint is not None:
        from tepo.training.checkpoint import load_checkpoint

        policy.load_state_tensors(load_checkpoint(named.checkpoint).tensors["policy"])
        say(f"weights of {named.checkpoint}")
    return policy
