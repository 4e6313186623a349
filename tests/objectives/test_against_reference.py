"""Value and gradient of every method and option equal an independent re-implementation, on random batches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from objectives_reference import METHODS, reference
from reference_checks import BATCHES, SHARED, assert_equal, batch_for, drawn

import tepo
from tepo.core.seeds import stream
from tepo.testing import evaluate

ESTIMATORS = ("k1", "abs", "k2", "k3", "k3-old", "full")
CLIPS = {"clip_low": (0.2, 3e-4, 1.0), "clip_high": (0.28, 4e-4, 1.0), "clip_dual": (None, 1.2, 3.0)}
OVERLONG = {"overlong_length": (None, 4), "overlong_cache": (3, 1), "overlong_penalty": (1.0, 0.3)}

# Every setting of every method with the values to try, beside the shared ones.
OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "tepo-markov": {"ratio": ("sequence", "sequence-token"), **CLIPS},
    "tepo": {
        "ratio": ("sequence", "sequence-token"),
        **CLIPS,
        "kl_coef": (1.0, 0.3, 0),
        "kl_estimator": ESTIMATORS,
        "kl_target": ("old", "reference"),
        "kl_norm": ("all", "masked"),
        "entropy_criterion": ("realised", "first-order", "sign"),
        "entropy_margin": (1e-3, 0.1),
    },
    "grpo": {
        **CLIPS,
        "kl_coef": (0.04, 1.0, 0),
        "kl_estimator": ESTIMATORS,
        "kl_adapt_to": (None, 0.1),
        "advantage_eps": (1e-6, 1e-4),
        "empty_rows": ("skip", "count"),
    },
    "dapo": {**CLIPS, **OVERLONG, "scope": ("mini", "group"), "advantage_eps": (1e-6, 1e-4)},
    "dapo-overlong": {
        **CLIPS,
        **OVERLONG,
        "overlong_length": (20480, 5),
        "scope": ("mini", "group"),
        "advantage_eps": (1e-6, 1e-4),
    },
    "dr-grpo": {**CLIPS, "max_length": (3000, 8)},
    "gspo": {**CLIPS, "advantage_eps": (1e-6, 1e-4), "empty_rows": ("skip", "count")},
    "gspo-token": {**CLIPS, "advantage_eps": (1e-6, 1e-4), "empty_rows": ("skip", "count")},
    "reinforce": {"reducer": ("token-mean", "sequence-mean", "sequence-sum")},
    "rloo": {
        "ratio": ("none", "sequence-sum"),
        "clip_low": (0.2, 0.5),
        "clip_high": (0.2, 0.5),
        "kl_coef": (0.03, 0.5, 0),
        "empty_rows": ("skip", "count"),
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_defaults_equal_the_reference(name: str) -> None:
    for seed in range(BATCHES):
        batch = batch_for(name, {}, seed)
        outcome = evaluate(tepo.objective(name), batch)
        assert_equal(outcome, reference(name, {}, batch), f"{name}, batch {seed}")


@pytest.mark.parametrize("name", OPTIONS)
def test_options_equal_the_reference(name: str) -> None:
    draw = stream(0, "tests/options", sum(map(ord, name)))
    seen: Counter[tuple[str, Any]] = Counter()
    for seed in range(BATCHES * (2 if name == "tepo" else 1)):
        settings = drawn(OPTIONS[name], draw)
        seen.update(settings.items())
        batch = batch_for(name, settings, 1000 + seed)
        outcome = evaluate(tepo.objective(name, **settings), batch)
        assert_equal(outcome, reference(name, settings, batch), f"{name} {settings}, batch {1000 + seed}")
    for key, values in {**OPTIONS[name], **SHARED}.items():
        assert all(seen[key, value] >= 15 for value in values), f"{name}: {key} was not tried enough: {seen}"


def test_every_setting_of_every_method_is_tried() -> None:
    for entry in tepo.objectives():
        if entry.name in OPTIONS:
            assert {setting.name for setting in entry.settings} == set(OPTIONS[entry.name]) | set(SHARED), entry.name
    assert set(OPTIONS) == set(METHODS)


def test_the_batches_make_every_part_bite() -> None:
    """The comparison would be empty if nothing were clipped, masked or clamped."""
    totals: Counter[str] = Counter()
    settings = {"clip_dual": 1.2, "log_ratio_clamp": 0.5}
    for seed in range(40):
        out = tepo.objective("tepo", **settings)(batch_for("tepo", settings, seed))
        totals.update({name: value for name, value in out.metrics.items() if name.startswith(("clip/", "mask/"))})
        dapo = tepo.objective("dapo", **settings)(batch_for("dapo", settings, seed))
        totals.update({f"dapo {name}": dapo.metrics[name] for name in ("clip/low", "clip/high", "clip/dual")})
    assert all(total / 40 > 0.01 for total in totals.values()), totals
