"""Several rewards a response, kept apart for an objective that compares each by itself."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import torch

import tepo
from tepo.tasks import Grade
from tepo.training.experience import Group, reward_rows, token_batch
from tepo.training.trainer import train

from .conftest import MakeConfig
from .test_metrics import group
from .test_trainer import metrics_of


def grade(score: float | None, **parts: float | None) -> Grade:
    named = {name.replace("__", "/"): value for name, value in parts.items()}
    return Grade(score=score, passed=False, parts=named, error=None, timed_out=False, answer=None)


def apart(*grades: Grade) -> Group:
    return dataclasses.replace(group(*grades), each_reward=True)


TWO = (grade(1.0, right=1.0, form=0.0, form__length=7.0), grade(1.0, right=0.0, form=1.0), grade(0.5, right=0.5))


def test_rewards_are_kept_apart_only_where_that_is_asked() -> None:
    assert reward_rows([group(*TWO)]) == [[1.0], [1.0], [0.5]]
    rows = reward_rows([apart(*TWO)])
    assert rows[:2] == [[1.0, 0.0], [0.0, 1.0]]
    assert rows[2][0] == 0.5
    assert math.isnan(rows[2][1])  # the second reward could not score it; what it reports beside is no reward
    assert reward_rows([apart(grade(1.0, right=1.0), grade(0.0, right=0.0))]) == [[1.0], [0.0]]


def test_batches_have_a_column_a_reward() -> None:
    device = torch.device("cpu")
    assert token_batch([group(*TWO)], device).rewards.tolist() == [1.0, 1.0, 0.5]
    rewards = token_batch([apart(*TWO), apart(*TWO)], device).rewards
    assert rewards.shape == (6, 2)
    assert torch.equal(rewards[:, 0], torch.tensor([1.0, 0.0, 0.5] * 2))


def test_equal_sums_may_hide_a_signal() -> None:
    pair = (grade(1.0, right=1.0, form=0.0), grade(1.0, right=0.0, form=1.0))
    assert not group(*pair).has_signal
    assert apart(*pair).has_signal
    assert not apart(grade(1.0, right=1.0, form=0.0), grade(1.0, right=1.0, form=0.0)).has_signal


def test_only_gdpo_asks_for_each_reward() -> None:
    asking = [entry.name for entry in tepo.objectives() if entry.needs.each_reward]
    assert asking == ["gdpo"]


def test_gdpo_trains_on_two_rewards(tiny_config: MakeConfig, tmp_path: Path) -> None:
    file = tmp_path / "two.py"
    file.write_text(
        "def sevens(problems, responses):\n    return [response.count('7') for response in responses]\n"
        "def short(problems, responses):\n    return [None if '3' in one else -len(one) for one in responses]\n"
    )
    parts = [{"kind": f"{file}:sevens"}, {"kind": f"{file}:short", "weight": 0.5}]
    config = tiny_config(
        reward={"kind": "auto", "parts": parts},
        objective={"name": "gdpo", "reward_weights": [1.0, 0.5]},
        eval={"at_start": False, "at_end": False},
    )
    lines = [line for line in metrics_of(train(config).folder) if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert any(line["grad/norm"] > 0 for line in lines)
