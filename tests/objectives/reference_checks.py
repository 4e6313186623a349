"""What the comparisons of methods with their independent re-implementations share."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from objectives_reference import Result

import tepo
from tepo.objectives import TokenBatch
from tepo.testing import KINDS, Outcome, random_batch

Options = dict[str, tuple[Any, ...]]

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


def batch_for(name: str, settings: dict[str, Any], seed: int) -> TokenBatch:
    """Return a random batch with the fields that the method needs; the kinds take turns."""
    needs = tepo.objective(name, **settings).needs
    return random_batch(seed, fields=needs.batch, kind=KINDS[seed % len(KINDS)], groups=(4, 3, 2), width=5)


def assert_equal(got: Outcome, wanted: Result, label: str) -> None:
    """Fail unless loss and every gradient are the re-implementation's."""
    assert float(got.loss) == pytest.approx(wanted.loss, rel=1e-11, abs=1e-12), label
    derivatives = {"logp": wanted.by_logp, "entropy": wanted.by_entropy, "kl_full": wanted.by_kl}
    for field, gradient in got.gradients.items():
        expected = torch.tensor(derivatives.get(field, torch.zeros_like(gradient).tolist()), dtype=torch.float64)
        gap = float((gradient - expected).abs().max())
        assert gap <= 1e-12 + 1e-11 * float(expected.abs().max()), f"{label}: gradient of {field} off by {gap}"
