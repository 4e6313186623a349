"""The learning rate, value by value."""

from __future__ import annotations

import pytest

from tepo.training.config import OptimConfig
from tepo.training.schedule import learning_rate


def rates(steps: int, updates: int, **fields: object) -> list[float]:
    config = OptimConfig.model_validate({"lr": 1.0, **fields})
    return [
        learning_rate(config, update=update, updates_per_step=updates, steps=steps) for update in range(steps * updates)
    ]


def test_constant_after_warm_up() -> None:
    assert rates(4, 2, warmup_steps=2) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_linear_ends_where_asked() -> None:
    assert rates(5, 1, schedule="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    assert rates(3, 1, schedule="linear", final_lr=0.5) == pytest.approx([1.0, 0.75, 0.5])


def test_cosine_with_warm_up() -> None:
    found = rates(4, 2, schedule="cosine", warmup_steps=1)
    assert found[:3] == [0.5, 1.0, 1.0]
    assert found[3:] == pytest.approx([0.9045085, 0.6545085, 0.3454915, 0.0954915, 0.0])


def test_all_warm_up_and_single_update_do_not_divide_by_zero() -> None:
    assert rates(2, 1, schedule="linear", warmup_steps=2) == [0.5, 1.0]
    assert rates(1, 1, schedule="cosine", final_lr=0.1) == pytest.approx([0.1])
