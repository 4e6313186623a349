"""The learning rate as a pure function of the update's index."""

from __future__ import annotations

import math

from tepo.training.config import OptimConfig


def learning_rate(config: OptimConfig, *, update: int, updates_per_step: int, steps: int) -> float:
    """Return the learning rate of optimizer update `update` (0-based) of a run of `steps` steps.

    During warm-up update u takes (u + 1) / W of the peak, W = warmup_steps x updates_per_step, so no update is made
    with a rate of zero. After it `linear` and `cosine` fall from the peak, held by the first update after warm-up,
    to `final_lr` of the peak, which the last update of the run takes.
    """
    warmup = config.warmup_steps * updates_per_step
    if update < warmup:
        return config.lr * (update + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    span = steps * updates_per_step - 1 - warmup
    progress = min(1.0, (update - warmup) / span) if span > 0 else 1.0
    fall = progress if config.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * progress))
    return config.lr * (1 - (1 - config.final_lr) * fall)
