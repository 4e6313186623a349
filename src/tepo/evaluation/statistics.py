"""Estimators over sampled answers and their 95 % intervals.

Questions are what a benchmark samples, so intervals resample questions. Estimators over a question's own n samples
(pass@k, maj@k) are exact expectations over its subsets of size k, drawn without replacement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tepo.core.errors import InputError
from tepo.core.seeds import address

RESAMPLES = 10_000
LEVEL = 0.95
Z = 1.959963984540054  # standard normal quantile of (1 + LEVEL) / 2
EXACT_VOTES = 128  # samples a question up to which maj@k is computed exactly
SAMPLED_VOTES = 4_000  # subsets drawn beyond that

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` questions with its 95 % interval [low, high]."""

    value: float
    low: float
    high: float
    n: int

    def to_json(self) -> dict[str, float | int]:
        """Return the fields as a JSON object."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the chance that k of n samples, c of them right, hold a right one: 1 - C(n-c, k) / C(n, k).

    Unbiased (Chen et al., 2021). Raise InputError for k > n: fewer samples cannot say it.
    """
    _check_counts(n, c, k, "pass")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority_at_k(n: int, c: int, wrong: Sequence[int], k: int, *, seed: int = 0) -> float:
    """Return the chance that the majority of k of n samples is right.

    `c` samples are right; `wrong` has how many samples gave each wrong answer; the n - c - sum(wrong) others gave no
    answer and do not vote. Of t + 1 answers tied for most votes one is taken by lot, so a tie counts 1 / (t + 1);
    when nobody votes the majority is wrong. Exact up to 128 samples, beyond that the mean of 4,000 subsets drawn
    without replacement from `seed`.
    """
    _check_counts(n, c, k, "maj")
    if c + sum(wrong) > n:
        raise InputError(f"maj@{k}: {c} right and {sum(wrong)} wrong answers are more than {n} samples")
    votes = tuple(sorted(count for count in wrong if count > 0))
    if n <= EXACT_VOTES:
        return _majority_exact(n, c, votes, k)
    return _majority_sampled(n, c, votes, k, seed)


def _check_counts(n: int, c: int, k: int, name: str) -> None:
    if not 1 <= k <= n:
        raise InputError(f"{name}@{k} needs at least {max(k, 1)} samples a question, and k at least 1; there are {n}")
    if not 0 <= c <= n:
        raise InputError(f"{name}@{k}: {c} right of {n} samples")


@lru_cache(maxsize=65536)
def _majority_exact(n: int, c: int, wrong: tuple[int, ...], k: int) -> float:
    silent = n - c - sum(wrong)
    favourable = 0.0
    total = math.comb(n, k)
    for votes in range(1, min(c, k) + 1):
        # ways[(used, ties)]: choices from the wrong answers with none above `votes` and `ties` of them at it.
        ways = {(0, 0): 1}
        for count in wrong:
            grown: dict[tuple[int, int], int] = {}
            for (used, ties), number in ways.items():
                for taken in range(min(count, votes, k - votes - used) + 1):
                    place = (used + taken, ties + (taken == votes))
                    grown[place] = grown.get(place, 0) + number * math.comb(count, taken)
            ways = grown
        chosen = math.comb(c, votes)
        for (used, ties), number in ways.items():
            subsets = chosen * number * math.comb(silent, k - votes - used)
            favourable += subsets / total / (1 + ties)
    return favourable


@lru_cache(maxsize=65536)
def _majority_sampled(n: int, c: int, wrong: tuple[int, ...], k: int, seed: int) -> float:
    generator = np.random.default_rng(address(seed, "evaluation/majority", n, c, k, *wrong))
    silent = n - c - sum(wrong)
    drawn = generator.multivariate_hypergeometric([c, *wrong, silent], k, size=SAMPLED_VOTES)
    right, others = drawn[:, 0], drawn[:, 1:-1]
    best = others.max(axis=1) if wrong else np.zeros(SAMPLED_VOTES, dtype=np.int64)
    ties = (others == right[:, None]).sum(axis=1) if wrong else np.zeros(SAMPLED_VOTES, dtype=np.int64)
    return float(np.where((right > 0) & (right >= best), 1.0 / (1 + ties), 0.0).mean())


def wilson(mean: float, n: int) -> tuple[float, float]:
    """Return the Wilson score interval of a proportion: never of width zero, never outside [0, 1]."""
    if n < 1:
        raise InputError("an interval needs at least one question")
    centre = (mean + Z * Z / (2 * n)) / (1 + Z * Z / n)
    spread = Z / (1 + Z * Z / n) * math.sqrt(mean * (1 - mean) / n + Z * Z / (4 * n * n))
    return max(0.0, min(mean, centre - spread)), min(1.0, max(mean, centre + spread))


def estimates(rows: Sequence[Sequence[float]], *, seed: int = 0) -> list[Estimate]:
    """Return the mean and interval of each row of per-question values, [M, Q].

    The interval is the percentile bootstrap over questions, 10,000 resamples, the same ones for every row. Where all
    values of a row are equal the bootstrap would have width zero: a value in [0, 1] then gets the Wilson interval of
    a proportion over Q questions (nothing seen to fail is not proof that nothing does).
    """
    values = np.asarray(rows, dtype=np.float64)
    if values.ndim != 2 or values.shape[1] == 0:
        raise InputError("an estimate needs at least one question")
    lows, highs = _bootstrap(values, seed)
    result = []
    for row, low, high in zip(values, lows, highs, strict=True):
        mean = float(row.mean())
        degenerate = np.ptp(row) == 0 and 0.0 <= mean <= 1.0
        bounds = wilson(mean, row.size) if degenerate else (float(low), float(high))
        result.append(Estimate(mean, *bounds, row.size))
    return result


def difference(first: Sequence[float], second: Sequence[float], *, seed: int = 0) -> Estimate:
    """Return the mean of `second - first`, paired over the same questions, with its bootstrap interval.

    Values lie in [0, 1]. Where every difference is the same, the bootstrap would have width zero; then up to a share h
    of questions, the Wilson bound of a proportion of which none was seen, may differ in any way from what was seen.
    """
    if len(first) != len(second) or not first:
        raise InputError(f"paired values of the same questions are needed, not {len(first)} and {len(second)}")
    gaps = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    low, high = (float(bound[0]) for bound in _bootstrap(gaps[None, :], seed))
    mean = float(gaps.mean())
    if np.ptp(gaps) == 0:
        unseen = wilson(0.0, gaps.size)[1]
        low, high = (1 - unseen) * mean - unseen, (1 - unseen) * mean + unseen
    return Estimate(mean, low, high, gaps.size)


def _bootstrap(values: Values, seed: int) -> tuple[Values, Values]:
    """Return the lower and upper percentile of the resampled means of each row, [M] and [M]."""
    questions = values.shape[1]
    generator = np.random.default_rng(address(seed, "evaluation/bootstrap", questions))
    chunk = max(1, min(RESAMPLES, 2_000_000 // questions))  # about 16 MB of indices at a time
    means = []
    for start in range(0, RESAMPLES, chunk):
        rows = min(chunk, RESAMPLES - start)
        picked = generator.integers(0, questions, size=(rows, questions))
        picked += np.arange(rows)[:, None] * questions
        counts = np.bincount(picked.ravel(), minlength=rows * questions).reshape(rows, questions)
        means.append(counts @ values.T / questions)
    tail = (1 - LEVEL) / 2
    bounds = np.quantile(np.concatenate(means), [tail, 1 - tail], axis=0)
    return bounds[0], bounds[1]
