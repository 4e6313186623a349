"""Uniforms depend on their address alone; the inverse CDF follows the weights and never draws what has none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo.rollout.draws import _block_width, choose, truncate, uniforms

LAST = 1 - 2**-53
GOLDEN = [0.9327054857314108, 0.4924806077964685, 0.7986517676132924]


def test_uniforms_are_a_function_of_their_address() -> None:
    first = uniforms(3, "rollout", 5, 1, 8)
    assert np.array_equal(first, uniforms(3, "rollout", 5, 1, 8))
    others = [(4, "rollout", 5, 1), (3, "eval", 5, 1), (3, "rollout", 6, 1), (3, "rollout", 5, 2), (3, "rollout", 1, 5)]
    for address in others:
        assert not np.isin(uniforms(*address, 8), first).any()


def test_a_longer_series_continues_the_shorter() -> None:
    assert np.array_equal(uniforms(0, "rollout", 0, 0, 100)[:7], uniforms(0, "rollout", 0, 0, 7))


def test_uniforms_stay_the_same_between_releases() -> None:
    assert uniforms(0, "rollout", 0, 0, 3).tolist() == GOLDEN
    assert uniforms(0, "rollout", 0, 0, 100).min() >= 0.0


@pytest.mark.parametrize("size", [2, 97, 1024, 1025, 1031, 5000])
def test_choices_follow_the_weights(size: int) -> None:
    """Evenly spaced uniforms give each index its share of them, to the one at each of its borders."""
    generator = torch.Generator().manual_seed(size)
    weights = torch.rand(size, generator=generator) ** 4
    points = 2000
    drawn = choose(weights.expand(points, -1).contiguous(), (torch.arange(points, dtype=torch.float64) + 0.5) / points)
    counts = torch.bincount(drawn, minlength=size).double()
    expected = weights.double() / weights.double().sum() * points
    assert (counts - expected).abs().max() <= 1.01
    assert (drawn.diff() >= 0).all()


@pytest.mark.parametrize("size", [97, 5000])
@pytest.mark.parametrize("uniform", [0.0, 1e-300, 0.5, LAST])
def test_a_weight_of_zero_is_never_drawn(size: int, uniform: float) -> None:
    for allowed in (0, 1, size // 2, size - 1):
        weights = torch.zeros(1, size)
        weights[0, allowed] = 1e-30
        assert choose(weights, torch.tensor([uniform], dtype=torch.float64)).item() == allowed


def test_the_ends_of_the_unit_interval_reach_the_first_and_last_positive_weight() -> None:
    weights = torch.zeros(2, 3000)
    weights[:, 10], weights[:, 2000], weights[:, 2500] = 0.3, 0.3, 1e-9
    drawn = choose(weights, torch.tensor([0.0, LAST], dtype=torch.float64))
    assert drawn.tolist() == [10, 2500]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([0.0, 1e-38, 1e-7, 0.1, 3.0]), min_size=1, max_size=40), st.floats(0, LAST))
def test_any_weights_and_uniform(values: list[float], uniform: float) -> None:
    if not any(values):
        values[0] = 1.0
    weights = torch.tensor([values])
    drawn = int(choose(weights, torch.tensor([uniform], dtype=torch.float64)))
    assert weights[0, drawn] > 0
    below, exact = weights[0, :drawn].double().sum(), weights.double().sum()
    assert below <= uniform * exact * (1 + 1e-12)


def test_block_widths_divide_the_vocabulary() -> None:
    for size in (1, 97, 49152, 50257, 128256, 151936):
        assert size % _block_width(size) == 0
    assert _block_width(49152) == 256


def probabilities(*values: float) -> torch.Tensor:
    return torch.tensor([values])


def kept(found: torch.Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in found]


def test_top_k_keeps_the_most_probable() -> None:
    found = truncate(probabilities(0.1, 0.4, 0.2, 0.3), top_k=2, top_p=1.0)
    assert torch.equal(found, probabilities(0.0, 0.4, 0.0, 0.3))


def test_of_equals_the_lower_ids_are_kept() -> None:
    assert kept(truncate(probabilities(0.1, 0.3, 0.3, 0.3), top_k=2, top_p=1.0)) == [[1, 2]]
    assert kept(truncate(probabilities(0.25, 0.25, 0.25, 0.25), top_k=0, top_p=0.6)) == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [(1e-9, [1]), (0.5, [1]), (0.51, [1, 2]), (0.75, [1, 2]), (0.76, [0, 1, 2]), (0.9999, [0, 1, 2, 3])],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, expected: list[int]) -> None:
    assert kept(truncate(probabilities(0.125, 0.5, 0.25, 0.125), top_k=0, top_p=top_p)) == [expected]


def test_top_p_is_of_what_top_k_has_left() -> None:
    row = probabilities(0.4, 0.3, 0.2, 0.1)
    assert kept(truncate(row, top_k=2, top_p=0.5)) == [[0]]  # 0.4 of 0.7 is more than half
    assert kept(truncate(row, top_k=0, top_p=0.5)) == [[0, 1]]


def test_off_means_untouched() -> None:
    row = probabilities(0.4, 0.6)
    assert truncate(row, top_k=0, top_p=1.0) is row
    assert truncate(row, top_k=5, top_p=1.0) is row


def test_a_flat_distribution_over_many_tokens() -> None:
    flat = torch.full((1, 5000), 1 / 5000)
    peaked = torch.zeros(1, 5000)
    peaked[0, 4999] = 1.0
    found = truncate(torch.cat([flat, peaked]), top_k=0, top_p=0.5)
    assert abs(len(kept(found)[0]) - 2500) <= 1
    assert kept(found)[1] == [4999]
