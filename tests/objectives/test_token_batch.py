"""The token batch: its rules, slices and errors."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import tepo
from tepo.objectives import TokenBatch
from tepo.testing import random_batch


def small(**fields: Any) -> TokenBatch:
    return TokenBatch(**{"logp": torch.zeros(2, 3), "mask": torch.ones(2, 3, dtype=torch.bool), **fields})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mask": torch.ones(2, 3)}, r"mask has dtype torch.float32, expected torch.bool: pass mask=mask.bool()"),
        ({"mask": torch.ones(2, 3, dtype=torch.long)}, "mask has dtype torch.int64, expected torch.bool"),
        ({"mask": torch.ones(6, dtype=torch.bool)}, "mask has shape (6,), expected [B, T]"),
        ({"mask": [[True] * 3] * 2}, "mask is a list, expected a torch.Tensor: pass torch.as_tensor(mask)"),
        ({"logp": np.zeros((2, 3))}, "logp is a ndarray, expected a torch.Tensor"),
        ({"logp": torch.zeros(2, 3, dtype=torch.long)}, "logp has dtype torch.int64, expected a floating-point type"),
        ({"logp": torch.zeros(3, 2)}, "logp has shape (3, 2), expected [B, T] like mask = (2, 3)"),
        ({"old_logp": torch.zeros(2)}, "old_logp has shape (2,), expected [B, T] like mask = (2, 3)"),
        ({"entropy": torch.zeros(2, 4)}, "entropy has shape (2, 4), expected [B, T] like mask = (2, 3)"),
        ({"rewards": torch.zeros(3)}, "rewards has shape (3,), expected [B] or [B, K], B=2"),
        ({"rewards": torch.tensor(1.0)}, "rewards has shape (), expected [B] or [B, K], B=2"),
        ({"rewards": [1.0, 0.0]}, "rewards is a list, expected a torch.Tensor"),
        ({"group": torch.zeros(2, 1).long()}, "group has shape (2, 1), expected [B] = (2,)"),
        ({"group": torch.zeros(2)}, "group has dtype torch.float32, expected integers: pass group=group.long()"),
        ({"truncated": torch.zeros(3, dtype=torch.bool)}, "truncated has shape (3,), expected [B] = (2,)"),
        ({"advantage": torch.zeros(3)}, "advantage has shape (3,), expected [B] or [B, T], mask is (2, 3)"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_wrong_fields_are_errors_that_name_them(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(tepo.InputError, match=re.escape(words)):
        small(**fields)


MISSING: list[tuple[str, dict[str, Any], str, str]] = [
    ("tepo", {}, "entropy", "ask the scorer for the statistic 'entropy'"),
    ("tepo", {}, "old_entropy", "keep the scorer's 'entropy' of the rollout batch"),
    ("tepo", {"entropy_criterion": "first-order"}, "sum_p2", "ask the scorer for the statistic 'sum_p2'"),
    ("tepo", {"entropy_criterion": "first-order"}, "sum_p2_logp", "ask the scorer for the statistic 'sum_p2_logp'"),
    ("grpo", {}, "ref_logp", "score the tokens with a frozen copy of the start policy"),
    ("grpo", {"kl_estimator": "full"}, "kl_full", "ask the scorer for 'kl_full' with a reference"),
    ("rloo", {}, "ref_logp", "score the tokens with a frozen copy of the start policy"),
    ("dapo", {"truncated": "drop"}, "truncated", "true where the response hit the length limit"),
    ("dapo", {"importance_weight": "mask"}, "rollout_logp", "recorded by the sampler"),
    ("dapo", {"scope": "group"}, "group", "the prompt each response belongs to"),
    ("dapo", {}, "rewards", "or pass advantage= instead"),
    ("dapo", {"entropy_coef": 0.1}, "entropy", "ask the scorer for the statistic 'entropy'"),
]


@pytest.mark.parametrize(("name", "settings", "field", "how"), MISSING, ids=str)
def test_a_missing_field_is_an_error_that_says_how_to_get_it(
    name: str, settings: dict[str, Any], field: str, how: str
) -> None:
    objective = tepo.objective(name, **settings)
    batch = random_batch(0, fields=objective.needs.batch)
    with pytest.raises(tepo.InputError, match=rf"needs TokenBatch\.{field}: .*{re.escape(how)}"):
        objective(batch.replace(**{field: None}))


def test_advantages_may_stand_in_for_rewards_and_groups() -> None:
    batch = random_batch(0, fields=())
    prepared = tepo.objective("dapo").prepare(batch).batch.advantage
    given = batch.replace(rewards=None, group=None, advantage=prepared)
    assert torch.equal(tepo.objective("dapo")(given).loss, tepo.objective("dapo")(batch).loss)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("field", ["logp", "old_logp", "ref_logp", "rollout_logp", "entropy", "old_entropy"])
def test_a_value_that_is_not_finite_inside_the_mask_is_named(field: str, value: float) -> None:
    batch = random_batch(0)
    row, column = batch.mask.nonzero()[3].tolist()
    broken = getattr(batch, field).clone()
    broken[row, column] = value
    with pytest.raises(
        tepo.InputError, match=rf"{field}\[{row}, {column}\] is {value} inside the mask, expected a finite"
    ):
        tepo.objective("tepo")(batch.replace(**{field: broken}))


def test_a_given_advantage_that_is_not_finite_is_named() -> None:
    batch = random_batch(0).replace(advantage=torch.tensor([0.0, 1, float("nan"), 0, 0, 0, 0]))
    with pytest.raises(tepo.InputError, match=r"advantage\[2, \d\] is nan inside the mask"):
        tepo.objective("dapo")(batch)


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_an_infinite_reward_is_named(value: float) -> None:
    batch = random_batch(0, kind="reward-components")
    rewards = batch.rewards.clone()
    rewards[4, 1] = value
    with pytest.raises(tepo.InputError, match=rf"rewards\[4, 1\] is {value}, expected a finite number, or NaN"):
        tepo.objective("dapo").prepare(batch.replace(rewards=rewards))


def test_take_cuts_rows_and_columns_of_every_field() -> None:
    batch = random_batch(0, kind="reward-components").replace(advantage=torch.arange(7.0))
    rows = torch.tensor([5, 0, 5])
    taken = batch.take(rows, 4)
    assert taken.mask.shape == (3, 4)
    for name, value in batch.present():
        whole = value[rows]
        is_token_field = value.shape == batch.mask.shape and name != "rewards"
        assert torch.equal(getattr(taken, name).nan_to_num(), (whole[:, :4] if is_token_field else whole).nan_to_num())
    assert taken.rewards.shape == (3, 2)
    assert taken.advantage.shape == (3,)


def test_rewards_as_wide_as_the_tokens_keep_their_columns() -> None:
    """[B, K] with K = T must not be taken for a token field."""
    batch = small(rewards=torch.arange(6.0).view(2, 3))
    assert batch.take(torch.tensor([1]), 2).rewards.tolist() == [[3, 4, 5]]


def test_take_keeps_the_gradient() -> None:
    logp = torch.zeros(2, 3, requires_grad=True)
    small(logp=logp).take(torch.tensor([1]), 2).logp.sum().backward()
    assert logp.grad.tolist() == [[0, 0, 0], [1, 1, 0]]


def test_replace_and_to_return_new_batches() -> None:
    batch = random_batch(0)
    other = batch.replace(logp=batch.logp + 1)
    assert torch.equal(other.logp, batch.logp + 1)
    assert other.mask is batch.mask
    moved = batch.to("cpu")
    assert {name for name, _ in moved.present()} == {name for name, _ in batch.present()}
    with pytest.raises(tepo.InputError, match="logp has shape"):
        batch.replace(logp=torch.zeros(1, 1))
    with pytest.raises(AttributeError):
        batch.logp = batch.mask  # type: ignore[misc]


def test_prepare_leaves_the_batch_alone_and_adds_what_mini_batches_need() -> None:
    batch = random_batch(0)
    prepared = tepo.objective("tepo").prepare(batch).batch
    assert batch.advantage is None
    assert batch.informative is None
    assert prepared.advantage.shape == batch.mask.shape
    assert float(prepared.advantage[~batch.mask].abs().max()) == 0
    assert prepared.informative.tolist() == [True] * 7
    assert prepared.logp is batch.logp


def test_statistics_need_a_prepared_batch() -> None:
    with pytest.raises(tepo.InputError, match="call prepare first"):
        tepo.objective("dapo").statistics(random_batch(0, fields=()))
