"""The course of a run as arrays, over steps, response tokens and seconds of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tepo.lab.intervals import Values

AXES = ("steps", "tokens", "seconds")


@dataclass(frozen=True)
class Curve:
    """One metric of one run where it was measured and finite, `[T]` each.

    `seconds` are of training alone: evaluation, checkpoints and what another session waited are left out.
    """

    steps: Values
    tokens: Values
    seconds: Values
    values: Values

    def axis(self, name: str) -> Values:
        """Return the axis `steps`, `tokens` or `seconds`."""
        result: Values = getattr(self, name)
        return result


def curve(lines: Sequence[Mapping[str, Any]], metric: str) -> Curve:
    """Return a metric's curve from the lines of metrics.jsonl; lines without it still count for the seconds."""
    seconds = 0.0
    rows = []
    for line in lines:
        seconds += float(line.get("time/step") or 0.0)
        value = line.get(metric)
        if isinstance(value, int | float):
            rows.append((line["step"], line.get("tokens") or 0, seconds, value))
    table = np.asarray(rows, dtype=np.float64).reshape(-1, 4)
    return Curve(*table.T)


def area(one: Curve, axis: str = "steps", *, until: float | None = None) -> float | None:
    """Return the mean height of the curve between its first point and `until` (its last): area over width.

    Trapezoids, the value at `until` interpolated. None where there are fewer than two points in the stretch.
    """
    x, y = one.axis(axis), one.values
    if x.size < 2:
        return None
    end = float(x[-1]) if until is None else min(until, float(x[-1]))
    inside = x < end
    if not inside.any():
        return None
    places = np.append(x[inside], end)
    heights = np.append(y[inside], np.interp(end, x, y))
    return float(((heights[1:] + heights[:-1]) / 2 * np.diff(places)).sum() / (places[-1] - places[0]))
