"""What a run tells whoever listens: subclass `Callback` and override what interests you."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tepo.evaluation import Evaluation
from tepo.training.config import RunConfig
from tepo.training.experience import Experience


@dataclass(frozen=True)
class RunInfo:
    """The run as it starts: its configuration, folder, first step to come and number of trained parameters."""

    config: RunConfig
    folder: Path
    first_step: int
    parameters: int


class Callback:
    """A listener; every method does nothing until overridden. A run's result never depends on its listeners."""

    def on_message(self, text: str) -> None:
        """Something a person should know: a choice made, a warning."""

    def on_start(self, info: RunInfo) -> None:
        """The run folder exists and the first step is about to begin."""

    def on_progress(self, phase: str, done: int, total: int) -> None:
        """Work inside a step went on: `sampling`, `updating`, `evaluating`."""

    def on_experience(self, step: int, experience: Experience) -> None:
        """A rollout batch was sampled and graded."""

    def on_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """The held-out questions were sampled and graded."""

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A step is done and its line is in metrics.jsonl; step 0 is the evaluation of the start policy."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """A checkpoint is whole on disk."""

    def on_end(self, folder: Path, *, interrupted: bool) -> None:
        """The run is over; also called when it was interrupted, never when it failed."""

    def close(self) -> None:
        """Let go of everything; called however the run ends."""


class Callbacks(Callback):
    """Several listeners as one."""

    def __init__(self, listeners: Sequence[Callback]) -> None:
        self._listeners = tuple(listeners)

    def on_message(self, text: str) -> None:
        """Tell every listener."""
        self._tell(lambda one: one.on_message(text))

    def on_start(self, info: RunInfo) -> None:
        """Tell every listener."""
        self._tell(lambda one: one.on_start(info))

    def on_progress(self, phase: str, done: int, total: int) -> None:
        """Tell every listener."""
        self._tell(lambda one: one.on_progress(phase, done, total))

    def on_experience(self, step: int, experience: Experience) -> None:
        """Tell every listener."""
        self._tell(lambda one: one.on_experience(step, experience))

    def on_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Tell every listener."""
        self._tell(lambda one: one.on_evaluation(step, evaluation))

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Tell every listener."""
        self._tell(lambda one: one.on_step(step, metrics))

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Tell every listener."""
        self._tell(lambda one: one.on_checkpoint(step, path))

    def on_end(self, folder: Path, *, interrupted: bool) -> None:
        """Tell every listener."""
        self._tell(lambda one: one.on_end(folder, interrupted=interrupted))

    def close(self) -> None:
        """Tell every listener."""
        self._tell(lambda one: one.close())

    def _tell(self, tell: Callable[[Callback], None]) -> None:
        for listener in self._listeners:
            tell(listener)


@contextmanager
def listening(listeners: Sequence[Callback]) -> Iterator[Callbacks]:
    """Yield the listeners as one and close them however the block ends."""
    together = Callbacks(listeners)
    try:
        yield together
    finally:
        together.close()
