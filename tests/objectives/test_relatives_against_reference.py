"""Value and gradient of GRPO's relatives, at all their settings, equal an independent re-implementation."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from reference_checks import BATCHES, SHARED, Options, assert_equal, batch_for, drawn
from reference_relatives import METHODS, reference

import tepo
from tepo.core.seeds import stream
from tepo.objectives import TokenBatch
from tepo.testing import evaluate

REDUCERS = ("token-mean", "sequence-mean", "sequence-sum")
CLIPS: Options = {"clip_low": (0.2, 3e-4, 1.0), "clip_high": (0.28, 4e-4, 1.0), "clip_dual": (None, 1.2, 3.0)}
EPS: Options = {"advantage_eps": (1e-6, 1e-4)}
ROWS: Options = {"empty_rows": ("skip", "count")}

# Every setting of every method with the values to try, beside the shared ones.
OPTIONS: dict[str, Options] = {
    "ppo-clip": {
        **CLIPS,
        **EPS,
        **ROWS,
        "advantage": ("normalized", "batch-scaled", "centred", "leave-one-out"),
        "reducer": REDUCERS,
        "scope": ("mini", "group"),
        "max_length": (1, 8),
    },
    "reinforce++": {**CLIPS, "kl_coef": (0.01, 0.5, 0), "gamma": (1.0, 0.9, 0.0)},
    "reinforce++-baseline": {**CLIPS, "kl_coef": (1e-5, 0.5, 0), "kl_estimator": ("k1", "k2", "k3", "full")},
    "gpg": {**EPS, "alpha": ("groups", "rewards", "none"), "divide_by_std": (True, False), "reducer": REDUCERS},
    "opo": {"reducer": REDUCERS},
    "grpo-passk": {**CLIPS, **EPS, "divide_by_std": (True, False), "reducer": REDUCERS},
    "gdpo": {
        **CLIPS,
        **EPS,
        **ROWS,
        "reward_weights": (None, (0.5, 2.0)),
        "whiten": ("responses", "tokens", "none"),
        "reducer": REDUCERS,
    },
    "cispo": {
        **EPS,
        "cap": ("absolute", "relative"),
        "clip_high": (5.0, 1.1, 0.95),
        "clip_low": (None, 0.8, 0.1),
        "scope": ("mini", "group"),
    },
    "sapo": {**EPS, **ROWS, "tau_positive": (1.0, 3.0), "tau_negative": (1.05, 0.5)},
    "gmpo": {**EPS, **ROWS, "clip_low": (0.4, 0.01), "clip_high": (0.4, 0.0)},
    "luspo": {**EPS, **ROWS, **CLIPS},
    "vespo": {
        **EPS,
        **{"k_positive": (2.0, 0.5), "lam_positive": (3.0, 0.2), "k_negative": (3.0, 0.0), "lam_negative": (2.0, 0.0)},
        "scope": ("mini", "group"),
    },
    "holder": {
        **EPS,
        **ROWS,
        "p": (2.0, 1.0, 0.0, -1.5, 1e-4),
        "p_end": (None, -2.0),
        "p_updates": (4000, 1),
        "clip": ("sequence", "token"),
        "clip_low": (0.2, 0.01),
        "clip_high": (0.2, 0.01),
    },
    "pnpo": {
        **EPS,
        "surrogate": ("rejection", "clip"),
        "gradient": ("token", "prefix"),
        **{"accept_low": (0.5, 0.8), "accept_high": (5.0, 1.1), "clip_low": (0.2, 0.05), "clip_high": (0.28, 0.05)},
        "reducer": REDUCERS,
    },
    "dppo": {
        **EPS,
        "divergence": ("tv", "kl"),
        "threshold_low": (None, 0.01, 0.05),
        "threshold_high": (None, 0.01, 0.05),
        "ratio_cap": (20.0, 1.1),
        "reducer": REDUCERS,
    },
    "dro": {**EPS, "beta": (1.0, 0.1), "reducer": REDUCERS},
}


def fitting(name: str, settings: dict[str, Any], batch: TokenBatch) -> dict[str, Any]:
    """Return the settings that fit the batch: two weights are wrong for one reward."""
    two = batch.rewards is not None and batch.rewards.dim() == 2
    return settings if two or "reward_weights" not in settings else settings | {"reward_weights": None}


@pytest.mark.parametrize("name", OPTIONS)
def test_defaults_equal_the_reference(name: str) -> None:
    for seed in range(BATCHES):
        batch = batch_for(name, {}, seed)
        outcome = evaluate(tepo.objective(name), batch)
        assert_equal(outcome, reference(name, {}, batch), f"{name}, batch {seed}")


@pytest.mark.parametrize("name", OPTIONS)
def test_options_equal_the_reference(name: str) -> None:
    draw = stream(0, "tests/relatives", sum(map(ord, name)))
    seen: Counter[tuple[str, Any]] = Counter()
    for seed in range(BATCHES):
        settings = drawn(OPTIONS[name], draw)
        seen.update(settings.items())
        batch = batch_for(name, settings, 1000 + seed)
        settings = fitting(name, settings, batch)
        outcome = evaluate(tepo.objective(name, **settings), batch)
        assert_equal(outcome, reference(name, settings, batch), f"{name} {settings}, batch {1000 + seed}")
    for key, values in {**OPTIONS[name], **SHARED}.items():
        assert all(seen[key, value] >= 15 for value in values), f"{name}: {key} was not tried enough: {seen}"


@pytest.mark.parametrize("name", OPTIONS)
def test_every_setting_is_tried(name: str) -> None:
    names = {setting.name for setting in tepo.objectives.entry(name).settings}
    assert names == set(OPTIONS[name]) | set(SHARED)
    assert set(OPTIONS) == set(METHODS)
