"""Methods that choose, weigh or reward single tokens equal an independent re-implementation, at all their settings."""

from __future__ import annotations

import pytest
from reference_checks import Options, assert_equal, assert_every_setting_is_tried, compare_defaults, compare_options
from reference_tokens import METHODS, Learned, reference

from tepo.testing import Outcome

CLIPS: Options = {"clip_low": (0.2, 3e-4, 1.0), "clip_high": (0.28, 4e-4, 1.0)}
DUAL: Options = {"clip_dual": (None, 1.2, 10.0)}
EPS: Options = {"advantage_eps": (1e-6, 1e-4)}
SHARING: Options = {"reward_base": (1.0, 0.0), "reward_bonus": (0.1, 2.0), "normalize": ("class", "group")}
EM_RL: Options = {"ratio": ("none", "token"), "kl_coef": (1e-3, 0.5, 0), **CLIPS}

# Every setting of every method with the values to try, beside the shared ones.
OPTIONS: dict[str, Options] = {
    "clip-cov": {
        **CLIPS,
        **EPS,
        "clip_fraction": (2e-4, 0.1, 1.0),
        "covariance_low": (1.0, 0.01, -1.0),
        "covariance_high": (5.0, 1.5),
        "seed": (0, 1, -7),
    },
    "kl-cov": {
        **EPS,
        "kl_coef": (1.0, 0.3, 0),
        "kl_fraction": (2e-3, 0.2, 1.0),
        "kl_estimator": ("abs", "k1", "k2", "k3", "k3-old"),
    },
    "steer": {
        **CLIPS,
        **DUAL,
        **EPS,
        "weight_map": ("exponential", "linear"),
        "weight_low": (0.8, 0.3, 1.0),
        "weight_high": (1.2, 2.0, 1.0),
    },
    "high-entropy": {
        **CLIPS,
        **DUAL,
        **EPS,
        "entropy_fraction": (0.2, 0.5, 0.01, 1.0),
        "rule": ("top-k", "quantile"),
        "denominator": ("selected", "all"),
    },
    "entropy-advantage": {
        **CLIPS,
        **DUAL,
        **EPS,
        "alpha": (0.4, 0.1, 0.0, 5.0),
        "kappa": (2.0, 1.1),
        "entropy": ("old", "current"),
    },
    "cw-grpo": {
        **CLIPS,
        **EPS,
        "scope": ("mini", "group"),
        "deviation": ("population", "sample"),
        "bandwidth": (1.0, 0.3, 100.0),
        "kl_coef": (0.0, 0.04),
    },
    "gtpo": {**CLIPS, **DUAL, **SHARING},
    "grpo-s": {**CLIPS, **DUAL, **SHARING},
    "erpo": {**CLIPS, **DUAL, **EPS, "gate": (5.0, 0.0, -1.0), "progress": (0.2, 2.0, 0.0), "buckets": (10, 1, 3)},
    "lambda-grpo": {
        **CLIPS,
        **DUAL,
        **EPS,
        "length_preference": (0.0, 1.0, -2.5),
        "learn": (True, False),
        "length_scale": (1 / 9, 0.3, 0.0),
    },
    "s-grpo": {
        **CLIPS,
        **EPS,
        "probability": (0.4, 0.0, 1.0, 0.8),
        "always": (0, 1, 3),
        "most": (None, 1, 2),
        "seed": (0, 3),
        "kl_coef": (0.0, 0.04),
    },
    "t-spmo": {},
    "max-entropy": {
        **CLIPS,
        "temperature": (1e-3, 0.05),
        "target_entropy": (0.3, 2.0),
        "tuning": ("dual", "steps", "fixed"),
        "temperature_rate": (0.1, 0.005),
        "temperature_max": (0.1, 1.0),
        "baseline": ("soft", "mean"),
        "baseline_temperature": (1.0, 0.2, 10.0),
    },
    "em-rl-sequence": EM_RL,
    "em-rl-token": EM_RL,
    "em-ft": {"reducer": ("token-mean", "sequence-mean", "sequence-sum")},
}


def compare(got: Outcome, wanted: Learned, label: str) -> None:
    by_lambda = got.gradients.pop("state lambda", None)
    assert_equal(got, wanted, label)
    if by_lambda is not None:
        assert float(by_lambda) == pytest.approx(wanted.by_lambda, rel=1e-11, abs=1e-13), label


@pytest.mark.parametrize("name", OPTIONS)
def test_defaults_equal_the_reference(name: str) -> None:
    compare_defaults(name, reference, compare)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_equal_the_reference(name: str) -> None:
    compare_options(name, OPTIONS[name], reference, compare)


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_is_tried(name: str) -> None:
    assert_every_setting_is_tried(name, OPTIONS)
