"""The sampler's settings are checked when they are read."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tepo.rollout import SamplingConfig


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"max_tokens": 0},
        {"rows": 0},
        {"stop": ("",)},
        {"tempreature": 1.0},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SamplingConfig(**wrong)


def test_truncates_says_whether_some_tokens_are_never_drawn() -> None:
    assert not SamplingConfig(temperature=0.3).truncates
    assert SamplingConfig(top_p=0.95).truncates
    assert SamplingConfig(top_k=20).truncates
    assert SamplingConfig(temperature=0.0).truncates
    assert SamplingConfig(temperature=0.0).greedy


def test_every_setting_says_what_it_does() -> None:
    assert all(field.description for field in SamplingConfig.model_fields.values())
