"""What a run saves on its way and at its end: checkpoints by their schedule, and the final models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from tepo.core.errors import WorkError
from tepo.core.files import new_directory
from tepo.policy.load import no_progress_bars
from tepo.training.checkpoint import (
    Checkpoint,
    Counters,
    non_finite,
    prune_checkpoints,
    save_checkpoint,
    what_is_safe,
)
from tepo.training.config import CheckpointConfig
from tepo.training.learner import Learner, ModelLearner
from tepo.training.rundir import RunFolder


def save_learners(
    folder: RunFolder, learners: Sequence[ModelLearner], counters: Counters, config: CheckpointConfig
) -> Path:
    """Save a checkpoint and remove those that are no longer kept; return its folder.

    Raises:
        WorkError: it could not be written, or a weight is not finite; the earlier checkpoints are as they were.
    """
    tensors: dict[str, Mapping[str, Tensor]] = {}
    for learner in learners:
        tensors[learner.name] = learner.weight_tensors()
        tensors[f"{learner.name}-optimizer"] = learner.optimizer_tensors()
    path = save_checkpoint(folder, Checkpoint(tensors, counters))
    prune_checkpoints(folder, keep_last=config.keep_last, best=config.best, mode=config.best_mode)
    return path


def save_models(folder: RunFolder, policy: Learner, partner: Learner | None) -> None:
    """Write the final policy into `model/`, and the second one, where there is one, into `partner/`.

    Raises:
        WorkError: it could not be written, or a weight is not finite.
    """
    try:
        for target, learner in ((folder.model, policy), (folder.partner, partner)):
            if learner is None:
                continue
            if bad := non_finite(learner.weight_tensors()):
                raise WorkError(f"the final {learner.name} was not saved: {bad}. {what_is_safe(folder)}")
            with new_directory(target) as aside, no_progress_bars():
                learner.policy.save(aside)
    except OSError as error:
        raise WorkError(f"saving the final model failed: {error}. {what_is_safe(folder)}") from error
