"""Splitting rows into micro- and mini-batches, and halving the budget when memory runs out."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo.core.errors import WorkError
from tepo.core.seeds import stream
from tepo.policy import TokenSequence
from tepo.training.micro import Budget, micro_batches, mini_batches, padded_tokens


def sequences(*lengths: int) -> list[TokenSequence]:
    return [TokenSequence((1,), (2,) * (length - 1)) for length in lengths]


def test_longest_first_within_the_budget() -> None:
    rows = sequences(3, 9, 4, 8, 2)
    assert micro_batches(rows, range(5), 18) == [[1, 3], [2, 0, 4]]
    assert micro_batches(rows, range(5), 1) == [[1], [3], [2], [0], [4]]
    assert micro_batches(rows, range(5), 0) == [[1, 3, 2, 0, 4]]


@settings(deadline=None)
@given(st.lists(st.integers(2, 50), min_size=1, max_size=40), st.integers(0, 200))
def test_every_row_once_and_budget_kept(lengths: list[int], budget: int) -> None:
    rows = sequences(*lengths)
    parts = micro_batches(rows, range(len(rows)), budget)
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    if budget:
        computed = [len(part) * (max(lengths[row] for row in part) - 1) for part in parts]  # but the last tokens
        assert all(len(part) == 1 or tokens <= budget for part, tokens in zip(parts, computed, strict=True))
        assert all(padded_tokens(rows, part) >= tokens for part, tokens in zip(parts, computed, strict=True))


def test_whole_groups_stay_together() -> None:
    groups = [group for group in range(6) for _ in range(4)]
    parts = mini_batches(groups, 3, random.Random(0).shuffle)
    assert [len(part) for part in parts] == [8, 8, 8]
    for part in parts:
        assert all(sum(groups[row] == group for row in part) == 4 for group in {groups[row] for row in part})
    assert sorted(row for part in parts for row in part) == list(range(24))


def test_fewer_groups_than_parts_splits_rows() -> None:
    parts = mini_batches([0] * 5 + [1] * 5, 4, random.Random(0).shuffle)
    assert sorted(len(part) for part in parts) == [2, 2, 3, 3]
    assert mini_batches([0, 1], 8, random.Random(0).shuffle) != []
    assert len(mini_batches([0, 1], 8, random.Random(0).shuffle)) == 2


def test_split_is_addressed_by_seed_and_step() -> None:
    groups = list(range(16))
    first = mini_batches(groups, 4, stream(0, "mini-batches", 3, 0).shuffle)
    assert first == mini_batches(groups, 4, stream(0, "mini-batches", 3, 0).shuffle)
    assert first != mini_batches(groups, 4, stream(0, "mini-batches", 4, 0).shuffle)


def test_out_of_memory_halves_and_says_so() -> None:
    said: list[str] = []
    budget = Budget(100, "train.micro_tokens", said.append)
    tried: list[int] = []

    def work(amount: int) -> str:
        tried.append(amount)
        if amount > 30:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")
        return "done"

    assert budget.run(work, largest=1000) == "done"
    assert tried == [100, 50, 25]
    assert budget.amount == 25
    assert "train.micro_tokens = 25" in said[-1]
    assert budget.run(work, largest=1000) == "done"
    assert tried[-1] == 25


def test_no_limit_halves_from_the_largest() -> None:
    budget = Budget(0, "x", lambda text: None)
    tried: list[int] = []

    def work(amount: int) -> None:
        tried.append(amount)
        if amount == 0 or amount > 40:
            raise torch.OutOfMemoryError("no")

    budget.run(work, largest=160)
    assert tried == [0, 80, 40]


def test_too_much_even_for_one_is_an_error() -> None:
    def work(amount: int) -> None:
        raise torch.OutOfMemoryError("no")

    with pytest.raises(WorkError, match="out of memory"):
        Budget(4, "x", lambda text: None).run(work, largest=4)
