"""Drawing problems, padding rows, and where old values come from."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tepo.objectives import Needs
from tepo.rollout import Response
from tepo.tasks import Grade, Problem
from tepo.training.experience import Group, further_draws, old_values_from_scorer, row_id, token_batch
from tepo.training.loading import check_config

NOTHING = Needs(
    batch=frozenset(),
    scores=frozenset(),
    reference=False,
    old_logp=False,
    old_entropy=False,
    critic=False,
    fine_clip=False,
    mini_statistics=False,
)


class Computes:
    """A policy as far as its precision matters."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.compute_dtype = dtype


@pytest.mark.parametrize(
    ("drawn", "kept", "prompts", "most", "expected"),
    [
        (8, 8, 8, 32, 0),
        (8, 4, 8, 32, 8),  # half kept: four missing take eight draws
        (8, 6, 8, 32, 3),  # two missing at a rate of 3/4 take three
        (8, 0, 8, 32, 8),
        (30, 2, 8, 32, 2),  # never beyond the most
        (32, 2, 8, 32, 0),
        (8, 1, 8, 32, 8),  # never more than a whole batch at once
    ],
)
def test_further_draws(drawn: int, kept: int, prompts: int, most: int, expected: int) -> None:
    assert further_draws(drawn, kept, prompts, most) == expected


@pytest.mark.parametrize(
    ("needs", "train", "dtype", "expected"),
    [
        ({}, {}, torch.float32, False),
        ({"old_entropy": True}, {}, torch.float32, False),  # one update: old values are the current ones
        ({"mini_statistics": True}, {}, torch.float32, True),
        ({"old_logp": True}, {}, torch.float32, True),
        ({}, {"mini_batches": 4}, torch.float32, False),
        ({}, {"mini_batches": 4}, torch.bfloat16, True),
        ({}, {"epochs": 2, "old_logp": "scorer"}, torch.float32, True),
        ({}, {"mini_batches": 4, "old_logp": "sampler"}, torch.bfloat16, False),
        ({"old_entropy": True}, {"mini_batches": 4}, torch.float32, True),
        ({"old_entropy": True}, {"mini_batches": 4, "old_logp": "sampler"}, torch.float32, True),
        ({"fine_clip": True}, {"epochs": 2}, torch.float32, True),
    ],
)
def test_where_old_values_come_from(
    needs: dict[str, Any], train: dict[str, Any], dtype: torch.dtype, expected: bool
) -> None:
    asked = dataclasses.replace(NOTHING, **needs)
    assert old_values_from_scorer(asked, Computes(dtype), check_config({"train": train})) is expected  # type: ignore[arg-type]


def test_rows_are_padded_and_named() -> None:
    problem = Problem("p", ({"role": "user", "content": "q"},), "q", "a")
    responses = (
        Response((1, 2), (5, 6, 2), "ab", (-1.0, -2.0, -3.0), (0.1, 0.2, 0.3), "eos", 7, 0),
        Response((1, 2), (9,), "c", (-4.0,), (0.4,), "length", 7, 1),
    )
    grades = (Grade(score=1.0, passed=True), Grade(score=None, passed=False))
    batch = token_batch([Group(problem, 7, responses, grades)], torch.device("cpu"))
    assert batch.mask.tolist() == [[True, True, True], [True, False, False]]
    assert batch.rollout_logp is not None
    assert batch.rollout_logp.tolist() == [[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0]]
    assert batch.rewards is not None
    assert batch.rewards[0] == 1.0
    assert torch.isnan(batch.rewards[1])
    assert batch.truncated is not None
    assert batch.truncated.tolist() == [False, True]
    assert batch.row_id is not None
    assert batch.row_id.tolist() == [row_id(response) for response in responses] == [7 * 2**20, 7 * 2**20 + 1]
    assert batch.old_logp is None
