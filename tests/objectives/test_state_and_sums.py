"""What a method tunes on the way, and how micro-batches' numbers merge."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives_reference import METHODS

import tepo
from tepo.objectives import AdaptiveCoefficient, Parts, Sums
from tepo.objectives.sums import extremes, over
from tepo.testing import random_batch

# --- state -----------------------------------------------------------------------------------------------------------


def test_methods_without_state_have_an_empty_one() -> None:
    for name in METHODS:
        objective = tepo.objective(name)
        assert objective.init_state() == {}
        assert objective.update({}, {"kl/ref": 1.0, "kl/old": 1.0}) == {}
        assert objective.learnable == ()


@pytest.mark.parametrize(
    ("measured", "factor"),
    [
        (0.05, 1.0),  # on target
        (0.055, 1.01),  # 10 % over: gain 0.1 of it
        (0.06, 1.02),  # 20 % over
        (5.0, 1.02),  # far over: the error is clipped at 0.2
        (0.045, 0.99),
        (0.0, 0.98),
    ],
)
def test_adaptive_kl_moves_the_coefficient_by_the_clipped_error(measured: float, factor: float) -> None:
    objective = tepo.objective("grpo", kl_coef=0.04, kl_adapt_to=0.05)
    state = objective.init_state()
    assert state["kl_coef"].dim() == 0
    assert float(state["kl_coef"]) == pytest.approx(0.04)
    updated = objective.update(state, {"kl/ref": measured, "kl/old": 77.0})
    assert float(updated["kl_coef"]) == pytest.approx(0.04 * factor)
    assert float(state["kl_coef"]) == pytest.approx(0.04)  # the old state is not changed


def test_adaptive_kl_keeps_its_coefficient_without_a_measurement() -> None:
    objective = tepo.objective("grpo", kl_adapt_to=0.05)
    state = objective.init_state()
    assert float(objective.update(state, {})["kl_coef"]) == float(state["kl_coef"])


def test_gain_scales_the_step() -> None:
    assert float(AdaptiveCoefficient(1.0, gain=0.5)(torch.tensor(2.0), 1.1)) == pytest.approx(2.0 * 1.05)


def test_the_state_is_what_multiplies_the_kl() -> None:
    objective = tepo.objective("grpo", kl_adapt_to=0.05)
    batch = random_batch(0, fields={"ref_logp"})
    one, two = (objective(batch, {"kl_coef": torch.tensor(value)}).metrics for value in (0.1, 0.2))
    assert two["loss/kl"] == pytest.approx(2 * one["loss/kl"], rel=1e-6)
    assert two["loss/policy"] == one["loss/policy"]
    assert objective(batch).metrics["loss/kl"] == pytest.approx(0.4 * one["loss/kl"], rel=1e-6)


def test_state_survives_a_round_trip_through_tensors() -> None:
    objective = tepo.objective("grpo", kl_adapt_to=0.05)
    state = objective.update(objective.init_state(), {"kl/ref": 1.0})
    copied = {name: torch.from_numpy(value.numpy().copy()) for name, value in state.items()}
    batch = random_batch(0, fields={"ref_logp"})
    assert torch.equal(objective(batch, state).loss, objective(batch, copied).loss)


# --- sums ------------------------------------------------------------------------------------------------------------


def sums(total: float, pair: tuple[float, float], high: float, low: float) -> Sums:
    tensors = [torch.tensor(value) for value in (total, *pair, high, low)]
    return Sums({"t": tensors[0]}, {"m": (tensors[1], tensors[2])}, {"h": tensors[3]}, {"l": tensors[4]})


def test_totals_add_means_divide_once_and_extremes_compare() -> None:
    both = sums(1.0, (4.0, 4.0), 3.0, -1.0) + sums(2.0, (4.0, 1.0), 2.0, -5.0)
    assert both.values() == pytest.approx({"t": 3.0, "m": 1.6, "h": 3.0, "l": -5.0})


def test_names_of_one_side_are_kept() -> None:
    one = Sums(totals={"a": torch.tensor(1.0)}, means={"m": (torch.tensor(6.0), torch.tensor(3))})
    two = Sums(totals={"b": torch.tensor(2.0)}, maxima={"h": torch.tensor(7.0)}, minima={"l": torch.tensor(-7.0)})
    expected = {"a": 1.0, "b": 2.0, "m": 2.0, "h": 7.0, "l": -7.0}
    assert (one + two).values() == (two + one).values() == expected
    assert (one + Sums()).values() == one.values()


def test_a_mean_over_nothing_and_an_extreme_of_nothing_are_left_out() -> None:
    empty = torch.zeros(2, 2, dtype=torch.bool)
    high, low = extremes(torch.ones(2, 2), empty)
    nothing = Sums(means={"m": over(torch.ones(2, 2), empty)}, maxima={"h": high}, minima={"l": low})
    assert nothing.values() == {}
    some = sums(1.0, (4.0, 2.0), 3.0, -1.0)
    assert (nothing + some).values() == some.values() == (some + nothing).values()


def test_values_outside_are_neither_summed_nor_compared() -> None:
    values = torch.tensor([[1.0, math.nan], [math.inf, -2.0]])
    where = torch.tensor([[True, False], [False, True]])
    total, count = over(values, where)
    assert (float(total), int(count)) == (-1.0, 2)
    assert [float(value) for value in extremes(values, where)] == [1.0, -2.0]


def test_parts_add_losses_with_their_gradients() -> None:
    leaf = torch.tensor(2.0, requires_grad=True)
    both = Parts(leaf * 3, Sums()) + Parts(leaf**2, sums(1.0, (1.0, 1.0), 0.0, 0.0))
    both.loss.backward()
    assert float(both.loss.detach()) == 10
    assert float(leaf.grad) == 7
    assert both.metrics()["t"] == 1


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(0, 5)), min_size=1, max_size=20), st.integers(1, 5))
def test_any_grouping_merges_to_the_same_metrics(items: list[tuple[float, int]], chunk: int) -> None:
    single = [sums(value, (value * count, float(count)), value, value) for value, count in items]

    def merged(parts: list[Sums]) -> Sums:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    chunks = [merged(single[start : start + chunk]) for start in range(0, len(single), chunk)]
    one, other = merged(single).values(), merged(chunks[::-1]).values()
    assert one.keys() == other.keys()
    assert one == pytest.approx(other, rel=1e-4, abs=1e-2)


def test_the_metrics_of_a_step_are_those_of_its_micro_batches() -> None:
    objective = tepo.objective("tepo", kl_norm="masked")
    batch = random_batch(2, fields=objective.needs.batch)
    prepared = objective.prepare(batch)
    statistics = objective.statistics(prepared.batch)
    total = None
    for row in range(7):
        index = torch.tensor([row])
        parts = objective.partial(prepared.batch.take(index), statistics.take(index))
        total = parts if total is None else total + parts
    whole = objective(batch)
    assert (prepared.metrics + total.sums).values() == pytest.approx(whole.metrics, rel=1e-12, abs=1e-15)
    assert {"loss", "loss/policy", "loss/kl", "ratio/mean", "mask/kl", "entropy/change"} <= whole.metrics.keys()
