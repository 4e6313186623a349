"""What a run looks out for by itself, and says: rewards that fail or are missing, a metric that does not exist."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tepo.core.errors import nearest
from tepo.training.callbacks import Callback
from tepo.training.config import RunConfig
from tepo.training.experience import Experience

_SHOWN = 200
"""Characters of a response that a message repeats."""

Say = Callable[[str], None]


def watches(config: RunConfig, say: Say) -> list[Callback]:
    """Return the listeners that every run brings along."""
    best = config.checkpoint.best
    return [RewardWatch(say), *([BestMetricWatch(best, say)] if best is not None else [])]


class RewardWatch(Callback):
    """Shows one response a step on which a reward failed, and says the first time that no response has a reward.

    All of them are counted, in `reward/errors` and `reward/unscored`.
    """

    def __init__(self, say: Say) -> None:
        self._say = say
        self._said = False

    def on_experience(self, step: int, experience: Experience) -> None:
        """Look at the grades."""
        graded = [pair for group in experience.drawn for pair in zip(group.responses, group.grades, strict=True)]
        failed = [(response, grade) for response, grade in graded if grade.error is not None]
        if failed:
            response, grade = failed[0]
            self._say(f"step {step}: a reward failed ({grade.error}) on {response.text[:_SHOWN]!r}")
        if not self._said and all(grade.score is None for _, grade in graded):
            self._said = True
            self._say(
                f"step {step}: no reward: {len(graded)} of {len(graded)} responses could not be scored (None), "
                "so that there are no advantages to learn from. Does the reward know these problems?"
            )


class BestMetricWatch(Callback):
    """Says once where `checkpoint.best` names a metric that the run does not have.

    Which metrics there are depends on the objective and the reward, so the first line that could have it decides: that
    of an evaluation for `eval/*`, that of a step with updates for the others.
    """

    def __init__(self, name: str, say: Say) -> None:
        self._name = name
        self._say = say
        self._decided = False

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Look for the metric."""
        evaluated = self._name.startswith("eval/")
        could = any(name.startswith("eval/") for name in metrics) if evaluated else metrics.get("updates", 0) > 0
        if self._decided or not could:
            return
        self._decided = True
        if self._name not in metrics:
            self._say(
                f"warning: checkpoint.best = {self._name!r} is no metric of this run, so no best checkpoint is kept."
                f"{nearest(self._name, metrics)}"
            )
