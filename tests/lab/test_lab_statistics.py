"""Statistics of studies against hand cases, tables and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tepo.lab.curves import area, curve
from tepo.lab.intervals import (
    Effect,
    accuracy,
    crossed_variance,
    mean_effect,
    paired_accuracy,
    probability_of_improvement,
    t_quantile,
    two_level_means,
    unpaired_effect,
)
from tepo.lab.stability import collapse, gradient_spikes, kept, stability, worst_drop
from tepo.lab.survival import (
    Times,
    common_horizon,
    first_reached,
    kaplan_meier,
    median_time,
    restricted_mean,
    time_ratio,
    trailing_mean,
)
from tepo.lab.verdict import accuracy_verdict, judgement, measure_verdict, time_verdict


def times(*pairs: tuple[float, bool], watched: float | None = None) -> Times:
    at, reached = (np.asarray(column) for column in zip(*pairs, strict=True))
    return Times(at.astype(float), reached, np.full(len(pairs), watched) if watched else at.astype(float))


HAND = times((2, True), (4, False), (6, True), (8, False))


def test_kaplan_meier_by_hand() -> None:
    events, shares = kaplan_meier(HAND)
    assert events.tolist() == [2, 6]
    assert shares.tolist() == pytest.approx([3 / 4, 3 / 4 * 1 / 2])


def test_restricted_mean_by_hand() -> None:
    assert restricted_mean(HAND, 8) == pytest.approx(2 * 1 + 4 * 0.75 + 2 * 0.375)
    assert restricted_mean(HAND, 5) == pytest.approx(2 * 1 + 3 * 0.75)
    with pytest.raises(ValueError, match="beyond the longest run"):
        restricted_mean(HAND, 9)


def test_without_censoring_the_restricted_mean_is_the_mean() -> None:
    data = times((3, True), (5, True), (10, True))
    assert restricted_mean(data, 10) == pytest.approx(6)
    assert median_time(data) == 5
    assert median_time(times((3, True), (9, False), (9, False))) is None


def test_dropping_censored_runs_would_favour_the_worse_method() -> None:
    """Two methods; the second has one quick run and two that never arrive: the naive mean would call it faster."""
    steady = times((50, True), (60, True), (70, True), watched=100)
    lucky = times((20, True), (100, False), (100, False), watched=100)
    assert lucky.times[lucky.reached].mean() < steady.times.mean()
    assert common_horizon(steady, lucky) == 100
    ratio = time_ratio(steady, lucky)
    assert ratio is not None
    assert ratio.value == pytest.approx((20 + 80 * 2 / 3) / 60)
    assert ratio.low is not None
    assert ratio.low < 1 < ratio.value  # three runs each do not settle it


def test_time_ratio_of_runs_twice_as_slow() -> None:
    draws = np.random.default_rng(0)
    base = draws.uniform(80, 120, 8)
    other = 2 * base * draws.uniform(0.9, 1.1, 8)
    every, length = np.ones(8, dtype=bool), np.full(8, 300.0)
    ratio = time_ratio(Times(base, every, length), Times(other, every, length))
    assert ratio is not None
    assert ratio.value == pytest.approx(other.mean() / base.mean())
    assert ratio.low is not None
    assert ratio.high is not None
    assert 1.8 < ratio.low < ratio.value < ratio.high < 2.2
    never = Times(length, ~every, length)
    assert time_ratio(never, never) is None


def test_few_seeds_that_agree_to_the_step_do_not_settle_a_ratio() -> None:
    every, length = np.ones(2, dtype=bool), np.full(2, 12.0)
    ratio = time_ratio(Times(np.full(2, 10.0), every, length), Times(np.full(2, 5.0), every, length))
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high) == (0.5, None, None)


def test_first_reached_takes_a_full_window() -> None:
    x, y = np.arange(1.0, 7.0), np.asarray([9.0, 0, 0, 3, 3, 3])
    assert first_reached(x, y, 3.0, window=3) == (3.0, True)
    assert first_reached(x, y, 3.0) == (1.0, True)
    assert first_reached(x, y, 10.0) == (6.0, False)
    assert first_reached(x, np.full(6, np.nan), 0.0) == (6.0, False)
    assert trailing_mean(y, 2).tolist()[1:] == [4.5, 0, 1.5, 3, 3]


@pytest.mark.parametrize(
    ("df", "quantile"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (29, 2.0452), (1000, 1.9623)]
)
def test_students_quantiles_equal_the_tables(df: float, quantile: float) -> None:
    assert t_quantile(df) == pytest.approx(quantile, abs=2e-4)


def test_mean_effect_is_students_interval() -> None:
    effect = mean_effect(np.asarray([1.0, 2.0, 3.0]))
    assert effect.value == 2.0
    assert (effect.low, effect.high) == pytest.approx((2 - 4.3027 / math.sqrt(3), 2 + 4.3027 / math.sqrt(3)), abs=1e-3)
    assert mean_effect(np.asarray([1.0])) == Effect(1.0, None, None, 1)


def test_welch_on_equal_variances_is_students_two_sample_interval() -> None:
    effect = unpaired_effect(np.asarray([0.0, 1, 2]), np.asarray([5.0, 6, 7]))
    assert effect.value == 5
    assert effect.high == pytest.approx(5 + 2.7764 * math.sqrt(2 / 3), abs=1e-3)


def crossed(draws: np.random.Generator, seeds: int, questions: int, *, gain: float = 0.0) -> tuple[np.ndarray, ...]:
    """Return two methods' values whose difference has effects of seed, of question, and of both."""
    base = np.full((seeds, questions), 0.5)
    by_seed, by_question = draws.normal(0, 0.03, (seeds, 1)), draws.normal(0, 0.2, (1, questions))
    return base, base + gain + by_seed + by_question + draws.normal(0, 0.3, (seeds, questions))


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
def test_paired_accuracy_covers_over_seeds_and_questions(seeds: int) -> None:
    draws = np.random.default_rng(seeds)
    hits = 0
    for _ in range(120):
        effect = paired_accuracy(*crossed(draws, seeds, 60))
        assert effect.low is not None
        assert effect.high is not None
        hits += effect.low <= 0 <= effect.high
    assert hits >= 106  # 114 expected, standard deviation 2.4


def test_the_crossed_variance_is_that_of_the_grand_mean() -> None:
    draws = np.random.default_rng(7)
    gaps = [second - first for first, second in (crossed(draws, 6, 40) for _ in range(400))]
    estimated = np.mean([crossed_variance(one)[0] for one in gaps])
    assert estimated == pytest.approx(np.var([one.mean() for one in gaps]), rel=0.15)


def test_the_two_level_bootstrap_agrees_where_there_are_many_of_both() -> None:
    draws = np.random.default_rng(3)
    gaps = draws.normal(0, 1, (40, 1)) + draws.normal(0, 1, (1, 60))
    variance, _ = crossed_variance(gaps)
    assert two_level_means(gaps).std() == pytest.approx(math.sqrt(variance), rel=0.1)


def test_accuracy_stays_between_0_and_1_and_is_never_of_width_zero() -> None:
    draws = np.random.default_rng(0)
    effect = accuracy((draws.random((3, 20)) < 0.97).astype(float))
    assert effect.low is not None
    assert effect.high is not None
    assert 0 <= effect.low < effect.value < effect.high <= 1
    perfect = accuracy(np.ones((3, 20)))
    assert perfect.low is not None
    assert perfect.low < 1 == perfect.value


def test_probability_of_improvement() -> None:
    three, better = np.asarray([1.0, 2, 3]), np.asarray([4.0, 5, 6])
    sure = probability_of_improvement(three, better)
    assert sure.value == 1
    assert sure.low is not None
    assert 0.3 < sure.low < 0.9  # three against three prove little
    many = probability_of_improvement(np.arange(20.0), np.arange(20.0) + 100)
    assert many.low is not None
    assert many.low > 0.8
    assert probability_of_improvement(three, three).value == 0.5
    assert probability_of_improvement(three, np.asarray([2.0])).low is None


def lines(values: list[float], **more: list[float]) -> list[dict[str, float]]:
    return [
        {"step": place, "reward/mean": value, "tokens": 10 * place, "time/step": 2.0}
        | {key.replace("_", "/"): column[place] for key, column in more.items()}
        for place, value in enumerate(values)
    ]


def test_curves_and_areas_on_three_axes() -> None:
    found = curve(
        [{"step": 0, "eval/avg": 0.2}, *lines([0.0, 1.0, 1.0])[1:], {"step": 3, "time/step": 1}], "reward/mean"
    )
    assert found.steps.tolist() == [1, 2]
    assert found.tokens.tolist() == [10, 20]
    assert found.seconds.tolist() == [2, 4]
    ramp = curve(lines([0.0, 1.0, 2.0, 1.0]), "reward/mean")
    assert area(ramp) == pytest.approx((0.5 + 1.5 + 1.5) / 3)
    assert area(ramp, until=1.5) == pytest.approx((0.5 + 0.5 * (1 + 1.5) / 2) / 1.5)
    assert area(ramp, "tokens", until=10) == pytest.approx(0.5)
    assert area(curve(lines([1.0]), "reward/mean")) is None


def test_worst_drop_and_kept() -> None:
    reward = np.asarray([0.0, 0.5, 1.0, 0.4, 0.9])
    assert worst_drop(reward, window=1) == pytest.approx(0.6)
    assert worst_drop(np.linspace(0, 1, 50)) == 0
    assert kept(np.linspace(4, 2, 21)) == pytest.approx((2.05) / 3.95, rel=0.01)
    assert kept(np.zeros(5)) is None


def test_gradient_spikes_are_counted_against_what_came_before() -> None:
    norms = np.ones(40)
    assert gradient_spikes(norms) == 0
    norms[[2, 20, 30]] = [100, 5.5, 4.5]  # too early to judge; a spike; not quite one
    assert gradient_spikes(norms) == 1
    norms[35] = np.nan
    assert gradient_spikes(norms) == 2


def test_collapse_names_its_reason_and_noise_is_none() -> None:
    draws = np.random.default_rng(0)
    rising = np.linspace(0.2, 0.8, 100) + draws.normal(0, 0.05, 100)
    entropy = np.linspace(1.0, 0.5, 100)
    assert collapse(rising, entropy) == ""
    assert collapse(0.5 + draws.normal(0, 0.05, 100), entropy) == ""
    fallen = np.concatenate([np.linspace(0.2, 0.8, 50), np.linspace(0.8, 0.1, 50)])
    assert "the reward fell" in collapse(fallen, entropy)
    sunk = np.concatenate([np.linspace(0.2, 0.8, 90), np.full(10, 0.6)])
    assert "entropy fell" in collapse(sunk, np.geomspace(1.0, 0.01, 100))
    assert "not finite" in collapse(np.append(rising[:-1], np.nan), entropy)
    assert stability(fallen, np.ones(100), entropy).collapsed


def test_verdicts_are_sentences_with_effect_interval_and_what_they_rest_on() -> None:
    said = accuracy_verdict("TEPO", "DAPO", Effect(0.018, -0.004, 0.041, 5, 300))
    assert said == (
        "TEPO minus DAPO: +1.8 points of accuracy, 95 % [-0.4, +4.1], 5 seeds, paired over 300 questions: "
        "not distinguishable"
    )
    assert accuracy_verdict("a", "b", Effect(0.1, 0.05, 0.15, 3, 99)).endswith(
        "better (3 seeds: their variance is barely estimated)"
    )
    assert "seeds may differ by more" in accuracy_verdict("a", "b", Effect(0.1, 0.05, 0.15, 1, 99))
    assert measure_verdict("a", "b", "entropy", Effect(-0.2, -0.3, -0.1, 5)).endswith("5 seeds: lower")
    assert measure_verdict("a", "b", "entropy", Effect(-0.2, None, None, 1)).endswith("about other seeds")
    found = {"metric": "reward/mean", "threshold": 0.5, "axis": "tokens", "reached": [3, 5], "runs": [5, 5]}
    ratio = Effect(0.5, 0.4, 0.7, 5).to_json()
    assert time_verdict("a", "b", found | {"ratio": ratio}) == (
        "a needs 0.50 times the tokens of b to reward/mean 0.5 (reached by 5 of 5 runs against 3 of 5), "
        "95 % [0.40, 0.70], 5 seeds: faster"
    )
    assert time_verdict("a", "b", found | {"ratio": None}).endswith("no ratio of tokens can be given")
    assert judgement(Effect(1.0, 0.5, 1.5, 5)) == "better"
