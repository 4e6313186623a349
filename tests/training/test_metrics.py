"""Rewards, lengths and signal of a rollout batch."""

from __future__ import annotations

import math

import pytest
import torch

from tepo.objectives import TokenBatch, objective
from tepo.rollout import Response
from tepo.tasks import Grade, Problem
from tepo.training.experience import Experience, Group
from tepo.training.metrics import length_metrics, mismatch_metrics, reward_metrics, rollout_metrics


def grade(score: float | None, **fields: object) -> Grade:
    defaults = {"passed": score == 1.0, "parts": {}, "error": None, "timed_out": False, "answer": None}
    return Grade(score=score, **{**defaults, **fields})  # type: ignore[arg-type]


def group(*grades: Grade, draw: int = 0, lengths: tuple[int, ...] | None = None, stop: str = "eos") -> Group:
    problem = Problem("p", ({"role": "user", "content": "q"},), "q", "a")
    sizes = lengths or (2,) * len(grades)
    responses = tuple(
        Response((1,), (5,) * size, "x", (-0.5,) * size, (0.25,) * size, stop, draw, index)  # type: ignore[arg-type]
        for index, size in enumerate(sizes)
    )
    return Group(problem, draw, responses, grades)


def test_truncated_lengths() -> None:
    """One response of 3 tokens that ended, one of 5 cut at the limit."""
    found = length_metrics(torch.tensor([3, 5]), torch.tensor([False, True]))
    assert found == {"length/mean": 4.0, "length/max": 5.0, "length/truncated": 0.5, "length/terminated": 3.0}


def test_truncated_tokens_leave_the_denominator() -> None:
    """With the truncated row dropped, 3 tokens count: the loss is their mean."""
    logp = torch.tensor([[-0.5] * 3 + [0.0] * 2, [-0.5] * 5], requires_grad=True)
    mask = torch.tensor([[True] * 3 + [False] * 2, [True] * 5])
    batch = TokenBatch(
        logp=logp,
        mask=mask,
        advantage=torch.tensor([1.0, 1.0]),
        truncated=torch.tensor([False, True]),
        entropy=torch.ones(2, 5),
    )
    objective("dapo", truncated="drop")(batch).loss.backward()
    assert logp.grad is not None
    assert logp.grad.flatten().tolist() == pytest.approx([-1 / 3] * 3 + [0.0] * 7)


def test_all_truncated_has_no_terminated_mean() -> None:
    found = length_metrics(torch.tensor([5, 5]), torch.tensor([True, True]))
    assert math.isnan(found["length/terminated"])


def test_reward_statistics_and_failures() -> None:
    groups = [
        group(grade(1.0), grade(0.0), draw=3),
        group(grade(None, error="no"), grade(0.0, error="slow", timed_out=True), draw=4),
    ]
    found = reward_metrics(groups)
    assert found["reward/mean"] == pytest.approx(1 / 3)
    assert found["reward/pass_rate"] == 0.25
    assert (found["reward/errors"], found["reward/timeouts"], found["reward/unscored"]) == (2, 1, 1)
    assert found["reward/timed_out"] == [[4, 1]]


def test_signal_is_over_everything_drawn() -> None:
    mixed, equal = group(grade(1.0), grade(0.0)), group(grade(1.0), grade(1.0), draw=1)
    found = rollout_metrics(Experience((mixed, equal), (mixed,), 2))
    assert found["group/signal"] == 0.5
    assert (found["group/drawn"], found["group/kept"]) == (2, 1)
    assert found["entropy/rollout"] == pytest.approx(0.25)


def test_signal_of_odd_groups() -> None:
    assert not group(grade(1.0)).has_signal
    assert not group(grade(None), grade(1.0)).has_signal
    assert not group(grade(0.1), grade(0.1 + 1e-12)).has_signal
    assert group(grade(None), grade(1.0), grade(0.0)).has_signal


def test_mismatch_ignores_padding() -> None:
    mask = torch.tensor([[True, True, False]])
    batch = TokenBatch(
        logp=torch.zeros(1, 3),
        mask=mask,
        rollout_logp=torch.tensor([[-1.1, -1.8, -50.0]]),
    )
    found = mismatch_metrics(batch, torch.tensor([[-1.0, -2.0, 9.0]]))
    assert found["mismatch/logp"] == pytest.approx(0.15)
    assert found["mismatch/max"] == pytest.approx(0.2)
    assert found["mismatch/kl"] == pytest.approx(0.05)
