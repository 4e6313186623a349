"""The course of a run in four short lines: reward, accuracy, entropy and the share of tokens under the mask."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.progress import Progress
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 40
"""Characters of a sparkline; longer courses are averaged into as many."""
SHOWN = (
    ("reward", "reward/mean", "{:.3f}"),
    ("accuracy", "eval/avg", "{:.1%}"),
    ("entropy", "entropy/rollout", "{:.3f}"),
    ("mask", "mask/kl", "{:.1%}"),
)
"""Name, metric and format of each line."""


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Return values as bars between their smallest and largest; equal values are a line of middle height."""
    points = bucketed([value for value in values if math.isfinite(value)], width)
    if not points:
        return ""
    low, high = min(points), max(points)
    if high == low:
        return BARS[len(BARS) // 2] * len(points)
    return "".join(BARS[min(len(BARS) - 1, int((value - low) / (high - low) * len(BARS)))] for value in points)


def bucketed(values: Sequence[float], width: int) -> list[float]:
    """Return at most `width` values: means of neighbours where there are more."""
    if len(values) <= width:
        return list(values)
    edges = [round(place * len(values) / width) for place in range(width + 1)]
    return [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]


class Course:
    """What a run's lines have been so far."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {metric: [] for _, metric, _ in SHOWN}

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Take in a step's metrics."""
        for metric, values in self._values.items():
            value = metrics.get(metric)
            if isinstance(value, int | float) and math.isfinite(value):
                values.append(float(value))

    def lines(self) -> list[tuple[str, str, str]]:
        """Return (name, sparkline, "first → last") of what has at least two values."""
        found = []
        for name, metric, form in SHOWN:
            values = self._values[metric]
            if len(values) > 1:
                found.append((name, sparkline(values), f"{form.format(values[0])} → {form.format(values[-1])}"))
        return found


class LivePanel(Progress):
    """The bar of the phase at work, with the course of the run above it."""

    course: Course | None = None
    """What is drawn; nothing until it is set."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return the sparklines, then the bar."""
        lines = self.course.lines() if self.course is not None else []
        if lines:
            panel = Table.grid(padding=(0, 2))
            for name, bars, ends in lines:
                panel.add_row(Text(name), Text(bars, style="cyan"), Text(ends))
            yield panel
        yield from super().get_renderables()
