from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tepo.core.errors import InputError
from tepo.evaluation import Estimate, difference, estimates, majority_at_k, pass_at_k
from tepo.evaluation.statistics import _majority_exact, _majority_sampled, wilson


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [(4, 1, 2, 0.5), (4, 1, 4, 1.0), (16, 3, 8, 0.9), (4, 1, 1, 0.25), (8, 0, 8, 0.0), (8, 8, 1, 1.0), (5, 4, 2, 1.0)],
)
def test_pass_at_k_is_the_unbiased_estimator(n: int, c: int, k: int, value: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(value, abs=1e-15)


@given(n=st.integers(1, 9), data=st.data())
def test_pass_at_k_is_the_mean_over_all_subsets(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 2), (4, -1, 2)])
def test_impossible_counts_are_errors(n: int, c: int, k: int) -> None:
    with pytest.raises(InputError, match=f"pass@{k}"):
        pass_at_k(n, c, k)
    with pytest.raises(InputError, match=f"maj@{k}"):
        majority_at_k(n, c, (), k)


def by_enumeration(n: int, c: int, wrong: Sequence[int], k: int) -> float:
    samples: list[int | None] = [0] * c
    for number, count in enumerate(wrong, start=1):
        samples += [number] * count
    samples += [None] * (n - len(samples))
    total = 0.0
    subsets = list(combinations(samples, k))
    for subset in subsets:
        votes = Counter(answer for answer in subset if answer is not None)
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        total += (0 in winners) / len(winners) if winners else 0.0
    return total / len(subsets)


@settings(max_examples=80, deadline=None)
@given(
    c=st.integers(0, 4),
    wrong=st.lists(st.integers(1, 3), max_size=3),
    silent=st.integers(0, 2),
    data=st.data(),
)
def test_majority_is_the_mean_over_all_subsets(c: int, wrong: list[int], silent: int, data: st.DataObject) -> None:
    n = c + sum(wrong) + silent
    if n == 0:
        return
    k = data.draw(st.integers(1, n))
    assert majority_at_k(n, c, wrong, k) == pytest.approx(by_enumeration(n, c, wrong, k), abs=1e-12)


@pytest.mark.parametrize(
    ("n", "c", "wrong", "k", "value"),
    [
        (4, 2, (2,), 4, 0.5),  # a tie of two is decided by lot
        (6, 2, (2, 2), 6, 1 / 3),
        (4, 2, (1, 1), 4, 1.0),
        (4, 1, (3,), 4, 0.0),
        (4, 1, (), 4, 1.0),  # samples without an answer do not vote
        (4, 0, (), 4, 0.0),  # nobody voted
        (4, 3, (1,), 1, 0.75),
    ],
)
def test_majority_ties_and_silence(n: int, c: int, wrong: tuple[int, ...], k: int, value: float) -> None:
    assert majority_at_k(n, c, wrong, k) == pytest.approx(value, abs=1e-12)


def test_majority_of_many_samples_is_estimated_without_replacement() -> None:
    exact = _majority_exact(128, 20, (4,) * 20, 16)
    assert _majority_sampled(128, 20, (4,) * 20, 16, 0) == pytest.approx(exact, abs=0.03)
    assert _majority_sampled(128, 20, (), 16, 0) == pytest.approx(1 - math.comb(108, 16) / math.comb(128, 16), abs=0.03)
    first, again = (majority_at_k(400, 90, (80, 70), 64, seed=1) for _ in range(2))
    assert first == again
    assert majority_at_k(400, 90, (80, 70), 400) == 1.0


def test_intervals_are_percentiles_over_questions_and_repeat() -> None:
    values = [1.0] * 30 + [0.0] * 70
    estimate, again = estimates([values])[0], estimates([values])[0]
    assert estimate == again
    assert (estimate.value, estimate.n) == (0.3, 100)
    half = 1.96 * math.sqrt(0.3 * 0.7 / 100)
    assert estimate.low == pytest.approx(0.3 - half, abs=0.02)
    assert estimate.high == pytest.approx(0.3 + half, abs=0.02)
    other = estimates([values], seed=1)[0]
    assert other.value == estimate.value
    assert other.low == pytest.approx(estimate.low, abs=0.011)


def test_intervals_cover_what_they_should() -> None:
    generator = np.random.default_rng(0)
    rows = (generator.random((200, 100)) < 0.4).astype(float)
    covered = sum(estimate.low <= 0.4 <= estimate.high for estimate in estimates(rows.tolist()))
    assert 180 <= covered <= 198


@pytest.mark.parametrize(("value", "low", "high"), [(1.0, 0.886, 1.0), (0.0, 0.0, 0.114), (0.5, 0.332, 0.668)])
def test_where_all_questions_agree_the_interval_is_not_a_point(value: float, low: float, high: float) -> None:
    estimate = estimates([[value] * 30])[0]
    assert (round(estimate.low, 3), round(estimate.high, 3)) == (low, high)
    assert estimate.low <= estimate.value <= estimate.high
    assert estimates([[value]])[0].high - estimates([[value]])[0].low > 0.5


def test_wilson_is_the_score_interval() -> None:
    low, high = wilson(0.1, 50)
    assert (round(low, 4), round(high, 4)) == (0.0435, 0.2136)
    for bound in (low, high):  # where the score test is on the edge
        assert abs(0.1 - bound) / math.sqrt(bound * (1 - bound) / 50) == pytest.approx(1.959964, abs=1e-5)


def test_many_rows_share_their_resamples() -> None:
    values = np.random.default_rng(1).random(40)
    one, double = estimates([values.tolist(), (2 * values).tolist()])
    assert double.low == pytest.approx(2 * one.low, rel=1e-12)
    assert double.high == pytest.approx(2 * one.high, rel=1e-12)


def test_a_paired_difference_sees_what_unpaired_intervals_do_not() -> None:
    generator = np.random.default_rng(2)
    before = (generator.random(200) < 0.5).astype(float)
    after = before.copy()
    after[np.flatnonzero(before == 0)[:12]] = 1.0  # twelve questions more, none lost
    estimate = difference(before.tolist(), after.tolist())
    assert estimate.value == pytest.approx(0.06)
    assert 0.02 < estimate.low < estimate.high < 0.1
    first, second = estimates([before.tolist(), after.tolist()])
    assert first.high > second.low


def test_a_difference_never_seen_is_not_certain() -> None:
    same = difference([1.0, 0.0] * 50, [1.0, 0.0] * 50)
    assert same.value == 0.0
    assert same.low == pytest.approx(-wilson(0.0, 100)[1])
    assert same.high == pytest.approx(wilson(0.0, 100)[1])
    with pytest.raises(InputError, match="not 2 and 1"):
        difference([1.0, 0.0], [1.0])


def test_no_question_is_an_error() -> None:
    with pytest.raises(InputError, match="at least one question"):
        estimates([[]])


def test_an_estimate_reads_as_text_and_json() -> None:
    assert str(Estimate(0.5, 0.25, 0.75, 8)) == "0.500 [0.250, 0.750]"
    assert Estimate(0.5, 0.25, 0.75, 8).to_json() == {"value": 0.5, "low": 0.25, "high": 0.75, "n": 8}
