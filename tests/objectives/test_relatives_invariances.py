"""GRPO's relatives keep the invariance matrix at other settings than their defaults, too."""

from __future__ import annotations

from typing import Any

import pytest

from tepo.testing import check_objective

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("ppo-clip", {"advantage": "batch-scaled", "reducer": "sequence-sum", "max_length": 9, "clip_dual": 1.5}),
    ("ppo-clip", {"scope": "group", "importance_weight": "truncate", "truncated": "drop"}),
    ("reinforce++", {"kl_coef": 0.5, "gamma": 0.9}),
    ("reinforce++-baseline", {"kl_coef": 0.5, "kl_estimator": "full", "zero_variance": "drop"}),
    ("gpg", {"alpha": "rewards", "divide_by_std": True, "reducer": "sequence-mean"}),
    ("opo", {"reducer": "sequence-sum"}),
    ("grpo-passk", {"divide_by_std": False}),
    ("gdpo", {"whiten": "tokens", "zero_variance": "drop"}),
    ("gdpo", {"whiten": "none"}),
    ("cispo", {"cap": "relative", "clip_low": 0.3, "clip_high": 0.3}),
    ("sapo", {"tau_positive": 4.0, "entropy_coef": 0.1}),
    ("gmpo", {"clip_low": 0.1, "clip_high": 0.2, "importance_weight": "sequence-mask"}),
    ("luspo", {"clip_low": 0.2, "clip_high": 0.3, "clip_dual": 1.5, "empty_rows": "count"}),
    ("vespo", {"k_positive": 0.5, "lam_negative": 0.1, "scope": "group"}),
    ("holder", {"p": 1.0, "clip": "token"}),
    ("holder", {"p": -2.0, "p_end": None}),
    ("holder", {"p": 1e-5, "p_end": None}),
    ("pnpo", {"gradient": "prefix"}),
    ("pnpo", {"surrogate": "clip", "gradient": "prefix"}),
    ("dppo", {"divergence": "kl", "threshold_low": 0.02, "ratio_cap": 1.5}),
    ("dro", {"beta": 0.1, "log_ratio_clamp": 0.7}),
    ("dapo", {"off_policy_mask": 0.1}),
    ("gspo-token", {"clip_low": 0.2, "clip_high": 0.2, "off_policy_mask": 0.1}),
    ("rloo", {"ratio": "sequence-sum", "off_policy_mask": 0.1}),
]


@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=str)
def test_variants_keep_the_invariance_matrix(name: str, settings: dict[str, Any]) -> None:
    check_objective(name, **settings)
