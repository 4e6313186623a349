"""Traffic lights over a run's metrics, each with its rule in words. They say where to look, not what is proven.

A rule looks at the last fifth of the steps (at least three), and compares with the first fifth where it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tepo.lab.evidence import Evidence
from tepo.lab.intervals import Values

GOOD, FAIR, BAD, UNKNOWN = "good", "fair", "bad", "not recorded"
_ORDER = (UNKNOWN, GOOD, FAIR, BAD)


@dataclass(frozen=True)
class Light:
    """What a rule says of a run: `value` is the number it judged, as text."""

    status: str
    value: str


@dataclass(frozen=True)
class Rule:
    """A signal, its rule in words, and the judgement."""

    name: str
    words: str
    judge: Callable[[Evidence], Light]


def lights(runs: Sequence[Evidence]) -> list[tuple[Rule, Light]]:
    """Return the worst light of the runs under every rule, with the number that made it so."""
    found = []
    for rule in RULES:
        each = [rule.judge(run) for run in runs]
        found.append((rule, max(each, key=lambda light: _ORDER.index(light.status))))
    return found


def tail(values: Values) -> Values:
    """Return the last fifth, at least three values."""
    return values[-max(3, round(values.size / 5)) :]


def head(values: Values) -> Values:
    """Return the first fifth, at least three values."""
    return values[: max(3, round(values.size / 5))]


def _band(value: float, good: float, fair: float, form: str) -> Light:
    status = GOOD if value <= good else FAIR if value <= fair else BAD
    return Light(status, form.format(value))


def _below(metric: str, good: float, fair: float, form: str = "{:.3g}") -> Callable[[Evidence], Light]:
    """Return the rule that a metric's mean stay below two bounds."""

    def judge(run: Evidence) -> Light:
        values = run.series(metric)
        return _band(float(tail(values).mean()), good, fair, form) if values.size else Light(UNKNOWN, "")

    return judge


def _entropy(run: Evidence) -> Light:
    values = run.series("entropy/rollout")
    if not values.size:
        return Light(UNKNOWN, "")
    start, end = float(head(values).mean()), float(tail(values).mean())
    kept = end / start if start > 0 else 1.0
    status = GOOD if 0.5 <= kept <= 2.0 else FAIR if 0.2 <= kept <= 4.0 else BAD
    return Light(status, f"{start:.3g} → {end:.3g} nats ({kept:.0%})")


def _under_mask(run: Evidence) -> Light:
    masked, change = run.series("mask/kl"), run.series("entropy/change")
    if not masked.size:
        return Light(UNKNOWN, "")
    part = float(tail(masked).mean())
    status = GOOD if 0.01 <= part <= 0.6 else FAIR if 0.001 <= part <= 0.85 else BAD
    moved = f", entropy change {float(tail(change).mean()):+.2g} nats a step" if change.size else ""
    return Light(status, f"{part:.1%} of tokens{moved}")


def _tails(run: Evidence) -> Light:
    high, low = run.series("ratio/max"), run.series("ratio/min")
    if not high.size:
        return Light(UNKNOWN, "")
    largest = float(tail(high).max())
    smallest = float(tail(low).min()) if low.size else 1.0
    status = GOOD if largest <= 5 and smallest >= 0.05 else FAIR if largest <= 20 and smallest >= 0.005 else BAD
    return Light(status, f"{smallest:.2g} to {largest:.3g}")


def _clipped(run: Evidence) -> Light:
    parts = [values for name in ("clip/low", "clip/high", "clip/dual") if (values := run.series(name)).size]
    if not parts:
        return Light(UNKNOWN, "")
    return _band(sum(float(tail(values).mean()) for values in parts), 0.2, 0.4, "{:.1%} of tokens")


def _signal(run: Evidence) -> Light:
    values = run.series("group/signal")
    if not values.size:
        return Light(UNKNOWN, "")
    part = float(tail(values).mean())
    return Light(GOOD if part >= 0.3 else FAIR if part >= 0.1 else BAD, f"{part:.0%} of groups")


def _gradient(run: Evidence) -> Light:
    values, skipped = run.series("grad/norm"), run.series("update/skipped")
    if not values.size:
        return Light(UNKNOWN, "")
    median = float(np.median(values))
    factor = float(values.max()) / median if median > 0 else 1.0
    lost = int((skipped > 0).sum())
    status = BAD if lost or factor > 20 else FAIR if factor > 5 else GOOD
    return Light(status, f"median {median:.3g}, largest {factor:.1f} × that" + f", {lost} steps skipped" * bool(lost))


def _reward_failures(run: Evidence) -> Light:
    parts = [values for name in ("reward/errors", "reward/timeouts") if (values := run.series(name)).size]
    if not parts:
        return Light(UNKNOWN, "")
    count = sum(float(values.sum()) for values in parts)
    return Light(GOOD if count == 0 else FAIR if count < run.steps else BAD, f"{count:.0f} in the whole run")


RULES = (
    Rule(
        "entropy",
        "Mean entropy while sampling, first to last fifth of the run. Good: 50 to 200 % of the start is left; fair: "
        "20 to 400 %; beyond: collapsed, or grown into noise.",
        _entropy,
    ),
    Rule(
        "entropy under the mask",
        "Share of tokens TEPO's KL mask holds back, and how entropy moves in a step. Good: 1 to 60 %; fair: 0.1 to "
        "85 %; beyond: the mask does nothing, or holds nearly everything.",
        _under_mask,
    ),
    Rule(
        "KL to the sampling policy",
        "Mean k3 estimate over tokens. Good: up to 0.02 nats; fair: up to 0.1; above: one step moves the policy far.",
        _below("kl/old", 0.02, 0.1, "{:.3g} nats"),
    ),
    Rule(
        "ratio tails",
        "Smallest and largest importance ratio. Good: 0.05 to 5; fair: 0.005 to 20; beyond: single tokens rule.",
        _tails,
    ),
    Rule(
        "clipped",
        "Tokens whose gradient the clip cut. Good: up to 20 %; fair: up to 40 %; above: most of the batch is unused. "
        "Clips of whole responses cut more at a time.",
        _clipped,
    ),
    Rule(
        "truncated",
        "Responses cut at the length limit. Good: up to 5 %; fair: up to 20 %; above: raise sampling.max_tokens.",
        _below("length/truncated", 0.05, 0.2, "{:.1%} of responses"),
    ),
    Rule(
        "groups with signal",
        "Groups whose rewards differ; the others teach nothing. Good: from 30 %; fair: from 10 %; below: too easy, "
        "too hard, or groups too small.",
        _signal,
    ),
    Rule(
        "sampler against scorer",
        "Mean absolute difference of their log-probs of the same tokens. Good: up to 0.02 nats; fair: up to 0.05; "
        "above: the ratio corrects for the sampler's arithmetic rather than for training.",
        _below("mismatch/logp", 0.02, 0.05, "{:.3g} nats"),
    ),
    Rule(
        "gradient norm",
        "Largest norm against the median, before clipping. Good: up to 5 times; fair: up to 20; above, or an update "
        "left out for not being finite: look at that step's responses.",
        _gradient,
    ),
    Rule(
        "reward failures",
        "Responses on which the reward raised an error or ran out of time. Good: none; fair: fewer than one a step.",
        _reward_failures,
    ),
)
