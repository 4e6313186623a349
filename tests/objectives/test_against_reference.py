"""Value and gradient of every method and option equal an independent re-implementation, on random batches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import reference_critic
import reference_relatives
import reference_tokens
from objectives_reference import METHODS, reference
from reference_checks import assert_every_setting_is_tried, batch_for, compare_defaults, compare_options

import tepo
from tepo.objectives import Entry

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
    compare_defaults(name, reference)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_equal_the_reference(name: str) -> None:
    compare_options(name, OPTIONS[name], reference)


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_is_tried(name: str) -> None:
    assert_every_setting_is_tried(name, OPTIONS)


@pytest.mark.parametrize("entry", tepo.objectives(), ids=lambda entry: entry.name)
def test_every_method_has_a_reference(entry: Entry) -> None:
    """CoDistill-GRPO's two objectives are put together from the reference of GRPO (test_codistill.py)."""
    covered = METHODS | reference_relatives.METHODS | reference_tokens.METHODS | reference_critic.METHODS
    assert entry.name in covered or entry.name == "codistill-grpo"


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
