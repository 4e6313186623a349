"""Settings of the methods of single tokens pass the invariance matrix too."""

from __future__ import annotations

from typing import Any

import pytest

from tepo.testing import check_objective

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("clip-cov", {"clip_fraction": 0.2, "covariance_low": -1.0, "clip_low": 0.2, "clip_high": 0.28, "seed": 3}),
    ("clip-cov", {"clip_fraction": 1.0, "covariance_low": 0.05, "truncated": "drop", "zero_variance": "drop"}),
    ("kl-cov", {"kl_fraction": 0.3, "kl_estimator": "k2", "entropy_coef": 0.01}),
    ("steer", {"weight_map": "linear", "truncated": "drop"}),
    ("high-entropy", {"rule": "quantile", "denominator": "all", "entropy_coef": 0.01}),
    ("high-entropy", {"entropy_fraction": 0.6, "truncated": "drop", "importance_weight": "mask"}),
    ("entropy-advantage", {"entropy": "current", "kappa": 1.5}),
    ("cw-grpo", {"scope": "group", "deviation": "sample", "kl_coef": 0.04}),
    ("gtpo", {"normalize": "group", "zero_variance": "drop"}),
    ("grpo-s", {"normalize": "group", "truncated": "drop"}),
    ("erpo", {"buckets": 2, "gate": 1.0, "progress": 0.8}),
    ("lambda-grpo", {"length_preference": 1.5, "clip_dual": 1.5, "truncated": "drop"}),
    ("lambda-grpo", {"learn": False, "length_preference": -2.0}),
    ("s-grpo", {"most": 2, "always": 1, "kl_coef": 0.04, "entropy_coef": 0.01}),
    ("t-spmo", {"truncated": "drop", "zero_variance": "drop"}),
    ("max-entropy", {"tuning": "steps", "baseline": "mean"}),
    ("max-entropy", {"baseline_temperature": 0.1, "temperature": 0.5}),
    ("em-rl-token", {"ratio": "token", "zero_variance": "drop"}),
    ("em-rl-sequence", {"kl_coef": 0, "truncated": "drop"}),
    ("em-ft", {"reducer": "sequence-mean", "importance_weight": "truncate"}),
    ("dapo", {"overlong_length": 5, "overlong_cache": 3, "truncated": "drop"}),
]


@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=str)
def test_options_pass_the_matrix(name: str, settings: dict[str, Any]) -> None:
    check_objective(name, kinds=("plain", "first-update", "empty-row"), seeds=(1,), **settings)
