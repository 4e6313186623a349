"""The public generator of random batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tepo
from tepo.testing import KINDS, Kind, evaluate, random_batch
from tepo.testing.invariances import EXACT
from tepo.testing.outcomes import differences


def test_the_same_arguments_give_the_same_batch_and_another_seed_another() -> None:
    first, again, other = random_batch(3), random_batch(3), random_batch(4)
    for name, value in first.present():
        assert torch.equal(value, getattr(again, name))
    assert not torch.equal(first.logp, other.logp)


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    batch = random_batch(0)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(random_batch(0).logp, batch.logp)


def test_values_of_a_position_belong_to_one_distribution() -> None:
    batch = random_batch(0, vocabulary=9)
    p = batch.logp.exp()
    assert bool((p > 0).all() and (p < 1).all())
    assert bool((batch.entropy > 0).all() and (batch.entropy < torch.tensor(9.0).log()).all())
    assert bool((batch.sum_p2 >= p**2).all() and (batch.sum_p2 < 1).all())
    assert bool((batch.sum_p2_logp < 0).all() and (batch.kl_full > 0).all())


def test_masks_have_padding_on_both_sides_and_holes() -> None:
    left = right = holes = 0
    for seed in range(20):
        for row in random_batch(seed).mask.tolist():
            start, end = row.index(True), len(row) - row[::-1].index(True)
            left, right, holes = left + start, right + len(row) - end, holes + row[start:end].count(False)
    assert min(left, right, holes) > 30


def test_groups_are_arbitrary_integers_in_any_order() -> None:
    groups = [random_batch(seed).group.tolist() for seed in range(20)]
    assert any(min(group) < 0 for group in groups)
    assert any(group != sorted(group) for group in groups)
    assert all(sorted(group.count(name) for name in set(group)) == [3, 4] for group in groups)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: Kind) -> None:
    batch = random_batch(5, kind=kind)
    lengths = batch.lengths()
    assert (batch.old_logp is None) == (kind == "first-update")
    assert (batch.advantage is not None) == (kind == "token-advantages")
    assert bool((lengths == 0).any()) == (kind == "empty-row")
    assert bool((lengths == 1).all()) == (kind == "length-one")
    assert (batch.rewards.dim() == 2) == (kind == "reward-components")
    sizes = batch.group.unique(return_counts=True)[1]
    assert bool((sizes == 1).any()) == (kind == "group-of-one")
    if kind == "reward-components":
        assert int(batch.rewards.isnan().all(dim=1).sum()) == 1
    if kind == "zero-variance":
        spans = [float(batch.rewards[batch.group == name].std()) for name in batch.group.unique()]
        assert min(spans) < 1e-15 < max(spans)


def test_only_declared_fields_are_set() -> None:
    batch = random_batch(0, fields={"entropy"})
    assert {name for name, _ in batch.present()} == {"logp", "mask", "old_logp", "rewards", "group", "entropy"}


def test_rounded_values_are_exact_in_the_narrow_type() -> None:
    batch = random_batch(0, rounded=torch.bfloat16)
    for name, value in batch.present():
        if value.is_floating_point():
            assert value.dtype == torch.float64
            assert torch.equal(value.to(torch.bfloat16).double(), value), name


def test_unknown_field_and_kind_are_errors() -> None:
    with pytest.raises(tepo.InputError, match=r"'entropi'.* Did you mean 'entropy'"):
        random_batch(0, fields={"entropi"})
    with pytest.raises(tepo.InputError, match=r"kind='first'"):
        random_batch(0, kind="first")  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_any_shape_and_any_split_gives_the_same_outcome(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["tepo", "grpo", "dapo", "gspo-token", "rloo"]))
    objective = tepo.objective(name, **({"kl_norm": "masked"} if name == "tepo" else {}))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    width = data.draw(st.integers(1, 9))
    batch = random_batch(data.draw(st.integers(0, 10**6)), fields=objective.needs.batch, groups=sizes, width=width)
    micro = [data.draw(st.integers(0, 3)) for _ in range(sum(sizes))]
    split = [[row for row, place in enumerate(micro) if place == number] for number in sorted(set(micro))]
    assert list(differences(evaluate(objective, batch), evaluate(objective, batch, split), EXACT)) == []
