"""Whether a run held: how far it fell from its best, how often its gradient jumped, whether it collapsed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tepo.lab.intervals import Values
from tepo.lab.survival import trailing_mean

WINDOW = 10
SPIKE_FACTOR = 5.0
SPIKE_HISTORY = 20
COLLAPSE_REWARD = 0.5
COLLAPSE_ENTROPY = 0.05
RULES = {
    "worst_drop": f"largest fall of the mean reward of {WINDOW} steps below its best so far",
    "spikes": f"steps whose gradient norm is over {SPIKE_FACTOR:g} times the median of the {SPIKE_HISTORY} before",
    "collapsed": f"the last tenth's mean reward has lost over {1 - COLLAPSE_REWARD:.0%} of the best gain over the "
    f"start, or its entropy is under {COLLAPSE_ENTROPY:.0%} of the start's while the reward is below its best, "
    "or a value is not finite",
}


@dataclass(frozen=True)
class Stability:
    """How one run held; the rules are in `RULES`. `why` says what made it collapse, empty where it did not."""

    worst_drop: float
    spikes: int
    collapsed: bool
    why: str

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return asdict(self)


def stability(reward: Values, gradient: Values, entropy: Values) -> Stability:
    """Judge a run by its rewards, gradient norms and entropies, one value a step, `[T]` (lengths may differ)."""
    why = collapse(reward, entropy)
    return Stability(worst_drop(reward), gradient_spikes(gradient), bool(why), why)


def worst_drop(reward: Values, *, window: int = WINDOW) -> float:
    """Return the largest fall of the smoothed reward below its best so far; 0 for a run that never falls."""
    finite = reward[np.isfinite(reward)]
    smooth = smoothed(finite, window)
    return float((np.maximum.accumulate(smooth) - smooth).max()) if smooth.size else 0.0


def gradient_spikes(gradient: Values, *, factor: float = SPIKE_FACTOR, history: int = SPIKE_HISTORY) -> int:
    """Count the steps whose norm is not finite or over `factor` times the median of up to `history` steps before.

    The first five steps have too little before them to be judged.
    """
    count = 0
    for step, value in enumerate(gradient):
        before = gradient[max(0, step - history) : step]
        before = before[np.isfinite(before)]
        if not np.isfinite(value) or (before.size >= 5 and value > factor * float(np.median(before))):
            count += 1
    return count


def collapse(reward: Values, entropy: Values) -> str:
    """Return why a run counts as collapsed, in words; an empty text where it does not."""
    if reward.size == 0:
        return ""
    tail = tenth(reward.size)
    if not np.isfinite(reward[-tail:]).all() or (entropy.size and not np.isfinite(entropy[-tail:]).all()):
        return "a reward or entropy at the end is not finite"
    smooth = smoothed(reward[np.isfinite(reward)], min(WINDOW, tail))
    start, best, end = float(smooth[0]), float(smooth.max()), float(reward[-tail:].mean())
    if best > start and end < start + COLLAPSE_REWARD * (best - start) and best - end > _noise(reward):
        return f"the reward fell from {best:.3f} at its best to {end:.3f} at the end"
    if entropy.size:
        first, last = float(entropy[: tenth(entropy.size)].mean()), float(entropy[-tenth(entropy.size) :].mean())
        if last < COLLAPSE_ENTROPY * first and best - end > _noise(reward):
            return f"entropy fell from {first:.3f} to {last:.3f} and the reward is {best - end:.3f} below its best"
    return ""


def smoothed(values: Values, window: int) -> Values:
    """Return the trailing means that have a full window; of fewer values than that, their mean alone."""
    if values.size == 0:
        return values
    return trailing_mean(values, window)[window - 1 :] if values.size >= window else values.mean(keepdims=True)


def tenth(size: int) -> int:
    """Return how many values a tenth is, at least one."""
    return max(1, round(size / 10))


def kept(values: Values) -> float | None:
    """Return the mean of the last tenth over that of the first tenth; None without a first above 0."""
    finite = values[np.isfinite(values)]
    if finite.size == 0:
        return None
    part = tenth(finite.size)
    first = float(finite[:part].mean())
    return float(finite[-part:].mean()) / first if first > 0 else None


def _noise(reward: Values) -> float:
    """Return twice the standard error of a tenth's mean, from the differences of neighbouring steps."""
    finite = reward[np.isfinite(reward)]
    if finite.size < 3:
        return 0.0
    step = float(np.diff(finite).std()) / np.sqrt(2)
    return float(2 * step * np.sqrt(2 / tenth(finite.size)))
