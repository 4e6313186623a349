"""What the comparisons of methods with their independent re-implementations share."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from objectives_reference import Result
from reference_critic import CriticResult

import tepo
from tepo.core.seeds import stream
from tepo.objectives import TokenBatch
from tepo.testing import KINDS, Outcome, evaluate, random_batch

Options = dict[str, tuple[Any, ...]]
Reference = Callable[[str, dict[str, Any], TokenBatch], Any]
Compare = Callable[[Outcome, Any, str], None]
Fitting = Callable[[dict[str, Any], TokenBatch], dict[str, Any]]
More = frozenset[str]

BATCHES = 200

# The settings that every method has, with the values to try; a clamp of 0.3 binds on many tokens.
SHARED: Options = {
    "truncated": ("keep", "drop"),
    "zero_variance": ("keep", "drop"),
    "entropy_coef": (0.0, 0.05),
    "importance_weight": ("none", "truncate", "mask", "sequence-mask"),
    "importance_cap": (2.0, 1.3),
    "off_policy_mask": (None, 0.05),
    "log_ratio_clamp": (20.0, 0.3),
}


def drawn(options: Options, draw: random.Random) -> dict[str, Any]:
    """Draw a value for every setting of a method; half of the shared ones stay at their default."""
    settings = {key: draw.choice(values) for key, values in options.items()}
    settings |= {key: draw.choice(values) for key, values in SHARED.items() if draw.random() < 0.5}
    if settings.get("kl_estimator") == "full" and settings.get("kl_target") == "old":
        settings["kl_target"] = "reference"
    return settings


def batch_for(name: str, settings: dict[str, Any], seed: int, more: More = frozenset()) -> TokenBatch:
    """Return a random batch with the fields that the method needs, and `more`; the kinds take turns."""
    needs = tepo.objective(name, **settings).needs
    return random_batch(seed, fields=needs.batch | more, kind=KINDS[seed % len(KINDS)], groups=(4, 3, 2), width=5)


def assert_equal(got: Outcome, wanted: Result, label: str) -> None:
    """Fail unless loss and every gradient are the re-implementation's."""
    assert float(got.loss) == pytest.approx(wanted.loss, rel=1e-11, abs=1e-12), label
    derivatives = {"logp": wanted.by_logp, "entropy": wanted.by_entropy, "kl_full": wanted.by_kl}
    if isinstance(wanted, CriticResult):
        derivatives["values"] = wanted.by_values
    for field, gradient in got.gradients.items():
        expected = torch.tensor(derivatives.get(field, torch.zeros_like(gradient).tolist()), dtype=torch.float64)
        gap = float((gradient - expected).abs().max())
        assert gap <= 1e-12 + 1e-11 * float(expected.abs().max()), f"{label}: gradient of {field} off by {gap}"


def compare_defaults(
    name: str, reference: Reference, compare: Compare = assert_equal, more: More = frozenset()
) -> None:
    """Compare a method at its defaults on random batches of every kind."""
    for seed in range(BATCHES):
        batch = batch_for(name, {}, seed, more)
        compare(evaluate(tepo.objective(name), batch), reference(name, {}, batch), f"{name}, batch {seed}")


def compare_options(
    name: str,
    options: Options,
    reference: Reference,
    compare: Compare = assert_equal,
    *,
    more: More = frozenset(),
    fitting: Fitting = lambda settings, batch: settings,
) -> None:
    """Compare a method at random settings, and fail where a value was hardly tried."""
    draw = stream(0, "tests/options", sum(map(ord, name)))
    seen: Counter[tuple[str, Any]] = Counter()
    for seed in range(1000, 1000 + BATCHES * (2 if len(options) > 9 else 1)):
        settings = drawn(options, draw)
        seen.update(settings.items())
        batch = batch_for(name, settings, seed, more)
        settings = fitting(settings, batch)
        outcome = evaluate(tepo.objective(name, **settings), batch)
        compare(outcome, reference(name, settings, batch), f"{name} {settings}, batch {seed}")
    for key, values in {**options, **SHARED}.items():
        assert all(seen[key, value] >= 15 for value in values), f"{name}: {key} was not tried enough: {seen}"


def assert_every_setting_is_tried(name: str, options: dict[str, Options]) -> None:
    """Fail where a method has a setting that its options leave out, or the other way round."""
    names = {setting.name for setting in tepo.objectives.entry(name).settings}
    assert names == set(options[name]) | set(SHARED)
