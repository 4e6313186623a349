"""Value and gradient of GRPO's relatives, at all their settings, equal an independent re-implementation."""

from __future__ import annotations

from typing import Any

import pytest
from reference_checks import Options, assert_every_setting_is_tried, compare_defaults, compare_options
from reference_relatives import METHODS, reference

from tepo.objectives import TokenBatch

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


def fitting(settings: dict[str, Any], batch: TokenBatch) -> dict[str, Any]:
    """Return the settings that fit the batch: two weights are wrong for one reward."""
    two = batch.rewards is not None and batch.rewards.dim() == 2
    return settings if two or "reward_weights" not in settings else settings | {"reward_weights": None}


@pytest.mark.parametrize("name", OPTIONS)
def test_defaults_equal_the_reference(name: str) -> None:
    compare_defaults(name, reference)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_equal_the_reference(name: str) -> None:
    compare_options(name, OPTIONS[name], reference, fitting=fitting)


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_is_tried(name: str) -> None:
    assert_every_setting_is_tried(name, OPTIONS)
