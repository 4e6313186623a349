"""Effects with 95 % intervals over few seeds.

With three or five seeds the plain bootstrap over seeds is far too narrow: it misses a factor (n - 1) / n of the
variance and the heavy tails that come from estimating it. Widths here come from Student's t, whose quantile for two
seeds is 12.7 and for five 2.8: an interval over two seeds is wide because little is known, and is shown so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tepo.core.seeds import address
from tepo.evaluation import difference, estimates

Values = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]

LEVEL = 0.95
Z = 1.959963984540054
RESAMPLES = 4_000
FEW_SEEDS = 4
"""Below this many seeds, a text says that their variance is barely estimated."""


@dataclass(frozen=True)
class Effect:
    """A number and its 95 % interval; `low` and `high` are None where nothing can be said (one seed).

    `seeds` is how many seeds it rests on, `questions` how many questions (0: none are involved).
    """

    value: float
    low: float | None
    high: float | None
    seeds: int
    questions: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return asdict(self)

    def excludes(self, value: float) -> bool:
        """Return whether the interval is there and lies to one side of `value`."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high


@lru_cache(maxsize=4096)
def t_quantile(df: float, level: float = LEVEL) -> float:
    """Return t such that a Student's t variable of `df` >= 1 degrees lies within +-t with probability `level`.

    With t = sqrt(df) tan(a) the density becomes cos(a)^(df - 1), smooth on [0, pi/2], and is summed on a grid.
    """
    if df < 1 or not 0 < level < 1:
        raise ValueError(f"df must be at least 1 and level in (0, 1), not {df} and {level}")
    if df > 5_000:
        return Z if level == LEVEL else _normal(level)
    angles = np.linspace(0.0, math.pi / 2, 40_001)
    density = np.cos(angles) ** (df - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(df) * math.tan(float(np.interp(level * mass[-1], mass, angles)))


def _normal(level: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf((1 + level) / 2)


def mean_effect(values: Values) -> Effect:
    """Return the mean of one value a seed, `[S]`, with Student's interval; paired differences are such values."""
    count = values.size
    mean = float(values.mean())
    if count < 2:
        return Effect(mean, None, None, count)
    half = t_quantile(count - 1) * float(values.std(ddof=1)) / math.sqrt(count)
    return Effect(mean, mean - half, mean + half, count)


def unpaired_effect(first: Values, second: Values) -> Effect:
    """Return mean(second) - mean(first) with Welch's interval, for runs whose seeds are not the same."""
    value = float(second.mean() - first.mean())
    seeds = min(first.size, second.size)
    if seeds < 2:
        return Effect(value, None, None, seeds)
    parts = [float(values.var(ddof=1)) / values.size for values in (first, second)]
    variance = sum(parts)
    if variance == 0:
        return Effect(value, value, value, seeds)
    df = variance**2 / sum(part**2 / (values.size - 1) for part, values in zip(parts, (first, second), strict=True))
    half = t_quantile(max(1.0, df)) * math.sqrt(variance)
    return Effect(value, value - half, value + half, seeds)


def paired_accuracy(first: Values, second: Values, *, seed: int = 0) -> Effect:
    """Return mean(second - first) over seeds and questions, `[S, Q]` each, values in [0, 1], with its interval.

    Seeds and questions are both samples, of what training may do and of what may be asked, and every seed answers
    the same questions: a crossed design. The width of the interval is that of the crossed random-effects model,
    with Satterthwaite's degrees of freedom; its skew is that of the two-level bootstrap. With one seed the interval
    covers questions alone.
    """
    if first.shape != second.shape or first.ndim != 2 or first.size == 0:
        raise ValueError(f"the same seeds and questions on both sides, not {first.shape} and {second.shape}")
    gaps = second - first
    seeds, questions = gaps.shape
    if seeds == 1 or questions == 1 or np.ptp(gaps) == 0:
        plain = difference(first.mean(axis=0).tolist(), second.mean(axis=0).tolist(), seed=seed)
        return Effect(plain.value, plain.low, plain.high, seeds, questions)
    return _crossed(gaps, -1.0, seed)


def accuracy(values: Values, *, seed: int = 0) -> Effect:
    """Return the mean of `[S, Q]`, values in [0, 1], over seeds and questions, with an interval as above."""
    if values.ndim != 2 or values.size == 0:
        raise ValueError(f"values are [seeds, questions], not {values.shape}")
    seeds, questions = values.shape
    if seeds == 1 or questions == 1 or np.ptp(values) == 0:
        (plain,) = estimates([values.mean(axis=0).tolist()], seed=seed)
        return Effect(plain.value, plain.low, plain.high, seeds, questions)
    return _crossed(values, 0.0, seed)


def _crossed(values: Values, least: float, seed: int) -> Effect:
    """Return the mean of `[S, Q]` with its interval, cut to [least, 1]."""
    variance, df = crossed_variance(values)
    half = t_quantile(df) * math.sqrt(variance)
    mean = float(values.mean())
    low, high = np.quantile(two_level_means(values, seed=seed), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    stretch = 2 * half / float(high - low) if high > low else 0.0
    below, above = (float(mean - low) * stretch, float(high - mean) * stretch) if stretch else (half, half)
    return Effect(mean, max(least, mean - below), min(1.0, mean + above), *values.shape)


def crossed_variance(gaps: Values) -> tuple[float, float]:
    """Return the variance of the grand mean of `[S, Q]` when both are random, and its degrees of freedom (>= 1).

    Var = MS_seeds / SQ + MS_questions / SQ - MS_rest / SQ (each mean square already holds the rest once).
    """
    seeds, questions = gaps.shape
    rows, columns = gaps.mean(axis=1), gaps.mean(axis=0)
    rest = gaps - rows[:, None] - columns[None, :] + gaps.mean()
    by_seed = float(rows.var(ddof=1)) / seeds
    by_question = float(columns.var(ddof=1)) / questions
    within = float((rest**2).sum()) / ((seeds - 1) * (questions - 1)) / (seeds * questions)
    variance = max(by_seed + by_question - within, by_seed, by_question)
    if variance == 0:
        return 0.0, float(seeds - 1)
    spread = by_seed**2 / (seeds - 1) + by_question**2 / (questions - 1)
    return variance, max(1.0, variance**2 / spread) if spread > 0 else float(seeds - 1)


def two_level_means(values: Values, *, resamples: int = RESAMPLES, seed: int = 0) -> Values:
    """Return the means `[resamples]` of `[S, Q]` with seeds and questions each drawn with replacement."""
    seeds, questions = values.shape
    generator = np.random.default_rng(address(seed, "lab/two-level", seeds, questions))
    by_seed = generator.multinomial(seeds, np.full(seeds, 1 / seeds), size=resamples)
    by_question = generator.multinomial(questions, np.full(questions, 1 / questions), size=resamples)
    means: Values = ((by_seed @ values) * by_question).sum(axis=1) / (seeds * questions)
    return means


def seed_ratio(
    first: Callable[[Rows], float],
    second: Callable[[Rows], float],
    first_seeds: int,
    second_seeds: int,
    *,
    resamples: int = 2_000,
    seed: int = 0,
) -> Effect | None:
    """Return second / first of two statistics of resampled runs, with an interval on the scale of the logarithm.

    Each statistic is a function of row indices. Where both have the same number of runs they are taken as paired by
    seed and resampled together. The bootstrap's standard error is corrected for few seeds by sqrt(n / (n - 1)) and
    given Student's tails; without any spread there is no interval. None where a value is not above 0.
    """
    every = np.arange(first_seeds), np.arange(second_seeds)
    below, above = first(every[0]), second(every[1])
    if not (below > 0 and above > 0):
        return None
    value = above / below
    seeds = min(first_seeds, second_seeds)
    if seeds < 2:
        return Effect(value, None, None, seeds)
    generator = np.random.default_rng(address(seed, "lab/ratio", first_seeds, second_seeds))
    logs = []
    for _ in range(resamples):
        rows = generator.integers(0, first_seeds, first_seeds)
        others = rows if first_seeds == second_seeds else generator.integers(0, second_seeds, second_seeds)
        drawn = first(rows), second(others)
        if min(drawn) > 0:
            logs.append(math.log(drawn[1] / drawn[0]))
    spread = float(np.std(logs))
    if spread < 1e-12:
        # Times are counted in whole steps: few seeds that agree to the step do not say that all seeds would.
        return Effect(value, None, None, seeds)
    half = t_quantile(seeds - 1) * math.sqrt(seeds / (seeds - 1)) * spread
    return Effect(value, value * math.exp(-min(half, 50.0)), value * math.exp(min(half, 50.0)), seeds)


def probability_of_improvement(first: Values, second: Values) -> Effect:
    """Return the chance that a run of `second` `[S2]` beats one of `first` `[S1]`, ties counted half.

    The interval is Newcombe's fifth for the Mann-Whitney share (2006): the values t at which the observed share lies
    within z standard errors, the standard error being that at t. So complete separation of three runs from three
    others, which chance alone gives once in twenty, does not become a certainty as under the bootstrap.
    """
    wins = (second[:, None] > first[None, :]) + 0.5 * (second[:, None] == first[None, :])
    value, seeds = float(wins.mean()), min(first.size, second.size)
    if seeds < 2:
        return Effect(value, None, None, seeds)
    mean_size, pairs = (first.size + second.size) / 2, first.size * second.size

    def inside(t: float) -> bool:
        variance = t * (1 - t) / pairs * (1 + (mean_size - 1) * ((1 - t) / (2 - t) + t / (1 + t)))
        return abs(value - t) <= Z * math.sqrt(variance)

    return Effect(value, _edge(inside, value, 0.0), _edge(inside, value, 1.0), seeds)


def _edge(inside: Callable[[float], bool], start: float, end: float) -> float:
    """Return where, going from `start` to `end`, `inside` ends; `start` itself counts as inside."""
    for _ in range(60):
        middle = (start + end) / 2
        start, end = (middle, end) if inside(middle) else (start, middle)
    return (start + end) / 2
