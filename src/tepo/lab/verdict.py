"""What the figures say, in words: an effect, its interval, what it rests on, and only then a judgement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tepo.lab.intervals import FEW_SEEDS, Effect

BETTER, WORSE, SAME, UNKNOWN = "better", "worse", "not distinguishable", "no interval"


def judgement(effect: Effect, *, neutral: float = 0.0) -> str:
    """Return `better`, `worse` (the interval lies above, below `neutral`), `not distinguishable` or `no interval`."""
    if effect.low is None or effect.high is None:
        return UNKNOWN
    if not effect.excludes(neutral):
        return SAME
    return BETTER if effect.low > neutral else WORSE


def accuracy_verdict(name: str, base: str, effect: Effect) -> str:
    """Return the sentence on final accuracy, in points of per cent."""
    interval = f"95 % [{100 * _or_nan(effect.low):+.1f}, {100 * _or_nan(effect.high):+.1f}], "
    paired = f"{_seeds(effect)}, paired over {effect.questions} questions"
    covers = "; the interval covers questions alone, seeds may differ by more" if effect.seeds == 1 else ""
    return (
        f"{name} minus {base}: {100 * effect.value:+.1f} points of accuracy, {interval}{paired}: "
        f"{judgement(effect)}{covers}{_few(effect)}"
    )


def measure_verdict(name: str, base: str, words: str, effect: Effect) -> str:
    """Return the sentence on a measure of which there is one value a seed, the difference paired by seed."""
    head = f"{name} minus {base}: {effect.value:+.3g} in {words}, "
    if effect.low is None or effect.high is None:
        return f"{head}{_seeds(effect)}: nothing can be said about other seeds"
    told = {BETTER: "higher", WORSE: "lower"}.get(judgement(effect), judgement(effect))
    return f"{head}95 % [{effect.low:+.3g}, {effect.high:+.3g}], {_seeds(effect)}: {told}{_few(effect)}"


def time_verdict(name: str, base: str, found: Mapping[str, Any]) -> str:
    """Return the sentence on the time to a threshold; `found` is an entry of `times` in the results."""
    goal = f"{found['metric']} {found['threshold']:g}"
    counts = f"reached by {found['reached'][1]} of {found['runs'][1]} runs against {found['reached'][0]} of " + str(
        found["runs"][0]
    )
    ratio = found["ratio"]
    if ratio is None:
        return f"{name} against {base}: {goal} {counts}; no ratio of {found['axis']} can be given"
    effect = Effect(**ratio)
    head = f"{name} needs {effect.value:.2f} times the {found['axis']} of {base} to {goal} ({counts})"
    if effect.low is None or effect.high is None:
        return f"{head}; {_seeds(effect)}: nothing can be said about other seeds"
    told = {BETTER: "slower", WORSE: "faster"}.get(judgement(effect, neutral=1.0), SAME)
    return f"{head}, 95 % [{effect.low:.2f}, {effect.high:.2f}], {_seeds(effect)}: {told}{_few(effect)}"


def _seeds(effect: Effect) -> str:
    return f"{effect.seeds} seed" + "s" * (effect.seeds != 1)


def _few(effect: Effect) -> str:
    return f" ({effect.seeds} seeds: their variance is barely estimated)" if 1 < effect.seeds < FEW_SEEDS else ""


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value
