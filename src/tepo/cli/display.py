"""A run as it happens, on stderr: one line a step, its course, a bar for the phase at work, now and then a response."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from tepo.cli.sparklines import Course, LivePanel
from tepo.cli.terminal import console, plain
from tepo.core.text import quoted
from tepo.evaluation import Evaluation
from tepo.training.callbacks import Callback, RunInfo
from tepo.training.experience import Experience

SHOWN_CHARACTERS = 600
"""Longest part of a question or response that is shown."""

_COLUMNS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("pass", "reward/pass_rate", "{:.0%}"),
    ("signal", "group/signal", "{:.0%}"),
    ("entropy", "entropy/rollout", "{:.3f}"),
    ("mask", "mask/kl", "{:.1%}"),
    ("kl", "kl/old", "{:.4f}"),
    ("len", "length/mean", "{:.0f}"),
    ("tok/s", "speed", "{:.0f}"),
    ("s", "time/step", "{:.1f}"),
)


class Display(Callback):
    """Shows a run on a console; off a terminal the bar is left out and every step is one plain line."""

    def __init__(self, out: Console | None = None) -> None:
        self.folder: Path | None = None
        """The run's folder, once it exists."""
        self._out = out or console(stderr=True)
        self._course = Course()
        self._bar = LivePanel(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._out,
            transient=True,
            disable=not self._out.is_terminal,
        )
        self._bar.course = self._course
        self._phase = self._bar.add_task("starting", total=None)
        self._bar.start()
        self._steps = 0
        self._group_size = 0
        self._sample_every = 0
        self._seconds: list[float] = []

    def on_message(self, text: str) -> None:
        """Print it."""
        self._print(plain(text), style="dim")

    def on_start(self, info: RunInfo) -> None:
        """Say what is trained and where it is written."""
        self.folder = info.folder
        self._steps = info.config.train.steps
        self._group_size = info.config.train.group_size
        self._sample_every = info.config.log.sample_every
        self._print(
            f"run {info.folder}: {info.config.objective.name}, {info.parameters / 1e6:.1f} M trained parameters"
        )

    def on_progress(self, phase: str, done: int, total: int) -> None:
        """Move the bar."""
        self._bar.update(self._phase, description=phase, completed=done, total=total)

    def on_experience(self, step: int, experience: Experience) -> None:
        """Show one response now and then: the question, what was answered and what it was worth."""
        if not self._sample_every or step % self._sample_every or not experience.drawn:
            return
        group = experience.drawn[0]
        grade = group.grades[0]
        reward = "none" if grade.score is None else f"{grade.score:g}"
        for head, text in (
            ("question", group.problem.question),
            ("response", group.responses[0].text),
            ("reward", f"{reward} (reference: {group.problem.answer})"),
        ):
            self._print(Text.assemble((f"  {head:9}", "dim"), shortened(text)))

    def on_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Print the accuracy with its interval."""
        summary = evaluation.summary(ks=(1,))
        mean = summary.average
        self._print(
            f"step {step}: accuracy {mean.value:.1%} ({mean.low:.1%} to {mean.high:.1%}) "
            f"on {summary.distinct} held-out questions",
            style="bold",
        )

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Print one line, and go on with the panel's."""
        self._course.add(metrics)
        if "time/step" in metrics and step > 0:
            self._seconds.append(float(metrics["time/step"]))
            sampled = self._group_size * metrics.get("group/drawn", 0) * metrics.get("length/mean", 0.0)
            shown = {**metrics, "speed": sampled / max(self._seconds[-1], 1e-9)}
            self._print(step_line(step, self._steps, shown, self._eta(step)))

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Say where it is."""
        self._print(f"step {step}: checkpoint {path}", style="dim")

    def on_end(self, folder: Path, *, interrupted: bool) -> None:
        """Say how to go on after an interruption."""
        if interrupted:
            self._print(f"interrupted; continue with: tepo train --resume {quoted(folder)}")

    def close(self) -> None:
        """Give the terminal back."""
        self._bar.stop()

    def _eta(self, step: int) -> float:
        """Return the seconds left, as the last ten steps suggest."""
        recent = self._seconds[-10:]
        return max(0, self._steps - step) * sum(recent) / len(recent)

    def _print(self, text: str | Text, style: str | None = None) -> None:
        self._out.print(text, style=style, soft_wrap=True)


def step_line(step: int, steps: int, metrics: Mapping[str, Any], left: float) -> str:
    """Return one step's line: the numbers one watches, and the time left."""
    cells = [
        f"{name} {form.format(value)}"
        for name, key, form in _COLUMNS
        if isinstance(value := metrics.get(key), int | float) and math.isfinite(value)
    ]
    if metrics.get("reward/unscored"):
        cells.insert(0, f"no reward {metrics['reward/unscored']}")
    hours, seconds = divmod(int(left), 3600)
    clock = (f"{hours:02}:" if hours else "") + f"{seconds // 60:02}:{seconds % 60:02}"
    return f"step {step:>{len(str(steps))}}/{steps}  " + "  ".join(cells) + f"  left {clock}"


def shortened(text: str) -> str:
    """Return text that is safe and fits on a screen: one line, cut in the middle where it is long."""
    line = plain(text).replace("\n", "⏎ ")
    if len(line) <= SHOWN_CHARACTERS:
        return line
    half = SHOWN_CHARACTERS // 2
    return f"{line[:half]} … {line[-half:]}"
