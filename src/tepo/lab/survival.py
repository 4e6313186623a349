"""How long until a threshold, where some runs never reach it: right-censored times.

A run that ends below the threshold says only that its time is longer than what it ran. Averages over the runs that
made it would favour the method whose slow runs are dropped; so survival curves (Kaplan and Meier, 1958) and their
restricted mean, the area under the curve up to a common horizon, are used instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tepo.lab.intervals import Effect, Values, seed_ratio

RESAMPLES = 2_000


@dataclass(frozen=True)
class Times:
    """When each run first reached a threshold.

    `times` `[S]`: steps, tokens or seconds; of a run that did not reach it, how long it ran. `reached` `[S]`: which
    ones did. `watched` `[S]`: how long each run went, whether it reached the threshold or not. Run i of two `Times`
    that are compared has the same seed.
    """

    times: Values
    reached: npt.NDArray[np.bool_]
    watched: Values

    def __post_init__(self) -> None:
        shapes = {self.times.shape, self.reached.shape, self.watched.shape}
        if len(shapes) != 1 or self.times.ndim != 1:
            raise ValueError(f"one time, one flag and one length a run, not {sorted(shapes)}")

    def take(self, rows: npt.NDArray[np.int64]) -> Times:
        """Return the runs `rows`, repeats included."""
        return Times(self.times[rows], self.reached[rows], self.watched[rows])


def first_reached(x: Values, y: Values, threshold: float, *, window: int = 1) -> tuple[float, bool]:
    """Return the first x at which the mean of the last `window` values of y is at least `threshold`, and True.

    Where that never happens: the last x, and False. `x` and `y` are `[T]`; y that is not finite never reaches.
    The first window - 1 points have no full window and cannot reach, so that no lucky first step decides.
    """
    if x.shape != y.shape or x.size == 0:
        raise ValueError(f"one x a value and at least one, not {x.shape} and {y.shape}")
    smooth = trailing_mean(y, window)
    hits = np.flatnonzero(smooth >= threshold)
    return (float(x[hits[0]]), True) if hits.size else (float(x[-1]), False)


def trailing_mean(y: Values, window: int) -> Values:
    """Return the mean of the last `window` values at each place, `[T]`; NaN where there are fewer."""
    if window < 1:
        raise ValueError(f"a window has at least one value, not {window}")
    if window == 1:
        return y.astype(np.float64)
    result = np.full(y.shape, np.nan)
    if y.size >= window:
        result[window - 1 :] = np.lib.stride_tricks.sliding_window_view(y, window).mean(axis=1)
    return result


def kaplan_meier(data: Times) -> tuple[Values, Values]:
    """Return (times of events `[E]`, share of runs still below the threshold just after each `[E]`).

    A run censored at the very time of an event still counts as at risk there, as is usual.
    """
    events = np.unique(data.times[data.reached])
    alive = 1.0
    shares = []
    for time in events:
        at_risk = int((data.times >= time).sum())
        alive *= 1 - int((data.times[data.reached] == time).sum()) / at_risk
        shares.append(alive)
    return events, np.asarray(shares)


def restricted_mean(data: Times, horizon: float) -> float:
    """Return the mean time to the threshold, times beyond `horizon` counted as `horizon`: the area under the curve.

    `horizon` must not lie beyond the longest run: what comes after it is unknown.
    """
    if horizon > data.watched.max() + 1e-9:
        raise ValueError(f"the horizon {horizon} lies beyond the longest run, {data.watched.max()}")
    return _area(data, horizon)


def _area(data: Times, horizon: float) -> float:
    events, shares = kaplan_meier(data)
    inside = events < horizon
    edges = np.concatenate([[0.0], events[inside], [horizon]])
    heights = np.concatenate([[1.0], shares[inside]])
    return float((np.diff(edges) * heights).sum())


def median_time(data: Times) -> float | None:
    """Return the first time by which half of the runs reached the threshold; None where that was not seen."""
    events, shares = kaplan_meier(data)
    below = np.flatnonzero(shares <= 0.5)
    return float(events[below[0]]) if below.size else None


def common_horizon(*groups: Times) -> float:
    """Return the latest time up to which every group was watched."""
    return float(min(group.watched.max() for group in groups))


def time_ratio(first: Times, second: Times, *, seed: int = 0) -> Effect | None:
    """Return the restricted mean time of `second` over that of `first`, up to their common horizon.

    Below 1 the second is faster. The interval comes from resampling seeds, the same ones for both where they are
    paired (see `intervals.seed_ratio`). None where no run of either reached the threshold, or one starts above it:
    then there is no ratio to speak of.
    """
    if not (first.reached.any() or second.reached.any()):
        return None
    horizon = common_horizon(first, second)

    return seed_ratio(
        lambda rows: _area(first.take(rows), horizon),
        lambda rows: _area(second.take(rows), horizon),
        first.times.size,
        second.times.size,
        resamples=RESAMPLES,
        seed=seed,
    )
