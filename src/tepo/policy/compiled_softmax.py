"""Sums over softmax distributions in one pass over float32 logits, compiled for the processor.

Loads numba: imported where `compiler.why_no_compiler` finds nothing against it, not by `tepo.policy`.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

# Sums may be reordered and contracted; infinities and NaN stay what they are.
FAST = {"reassoc", "contract", "nsz", "arcp"}

compiled = numba.njit(fastmath=FAST, cache=True)
compiled_for_threads = numba.njit(fastmath=FAST, cache=True, parallel=True)

BLOCK = 256
"""Logits summed in float32; over blocks sums are float64."""

NOTHING = np.float32(-87)
"""e^x is less than any normal float32 below, and counts as zero."""

_LEAST = np.int32(-(2**31) + 0x7FFFFF)
"""Minus infinity in the order of `greatest`."""

_STRETCH = 16 * BLOCK  # logits whose largest is found before they are summed: they stay in the nearest cache


@compiled_for_threads
def fold(logits: Any, scale: Any, tops: Any, totals: Any, moments: Any) -> None:
    """Write the largest logit of each row and the sums of e^c and of c e^c, c = scale * (logit - largest).

    A row that is no distribution, with NaN, +inf or nothing but -inf, gets the sum NaN.

    Args:
        logits: [N, V] float32.
        scale: one over the temperature, float32.
        tops: [N] float32, written to.
        totals: [N] float64, written to.
        moments: [N] float64, written to.
    """
    size = logits.shape[1]
    for row in numba.prange(logits.shape[0]):
        largest, total, moment = np.float32(-np.inf), 0.0, 0.0
        for start in range(0, size, _STRETCH):
            stretch = logits[row, start : start + _STRETCH]
            top = greatest(stretch)
            if not top <= largest:
                if largest > -np.inf:  # what was summed so far was relative to a smaller one
                    lower = np.float64(scale) * (np.float64(largest) - np.float64(top))
                    moment = math.exp(lower) * (moment + lower * total)
                    total = math.exp(lower) * total
                largest = top
            if largest == -np.inf:
                continue
            for block in range(0, stretch.shape[0], BLOCK):
                part, turn = block_sums(stretch[block : block + BLOCK], largest, scale)
                total += part
                moment += turn
        tops[row] = largest
        totals[row] = total if abs(largest) < np.inf else np.nan
        moments[row] = moment


@compiled
def greatest(z: Any) -> Any:
    """Return the largest of some logits, NaN if one of them is: as integers, which become vector instructions."""
    least, largest = np.int32(2**31 - 1), np.int32(-(2**31))
    bits = z.view(np.int32)
    for v in range(z.shape[0]):
        # Read as integers, negative numbers are in the reverse order: all bits but the sign are turned.
        ordered = bits[v] ^ ((bits[v] >> np.int32(31)) & np.int32(0x7FFFFFFF))
        least, largest = min(least, ordered), max(largest, ordered)
    if least < _LEAST:  # a NaN with a sign, as the processor makes it
        return np.float32(np.nan)
    return np.int32(largest ^ ((largest >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


@compiled
def block_sums(z: Any, largest: Any, scale: Any) -> Any:
    """Return the sums of e^c and of c e^c over some logits that are no NaN, c = scale * (z - largest)."""
    total, moment = np.float32(0), np.float32(0)
    for v in range(z.shape[0]):
        centred = max((z[v] - largest) * scale, NOTHING)  # a finite number, for minus infinity
        weight = exp(centred) if centred > NOTHING else np.float32(0)
        total += weight
        moment += weight * centred
    return np.float64(total), np.float64(moment)


@compiled
def exp(x: Any) -> Any:
    """Return e^x for float32 x <= 0, relative error below 2e-7 (x to 1 ulp), never less than 2^-126.

    It is 2^(x log2 e), the whole part by the exponent's bits and the rest, in (-1, 0], by a polynomial with value 1 at
    0. Unlike the library's function it becomes vector instructions.
    """
    doublings = max(x * np.float32(1.4426950408889634), np.float32(-126))
    whole = np.int32(doublings)  # towards zero; `math.floor` would compute in 64 bits
    f = doublings - np.float32(whole)
    power = np.float32(1.0902334e-4)
    power = power * f + np.float32(1.2747486e-3)
    power = power * f + np.float32(9.5791798e-3)
    power = power * f + np.float32(5.5490758e-2)
    power = power * f + np.float32(2.4022436e-1)
    power = power * f + np.float32(6.9314706e-1)
    power = power * f + np.float32(1)
    return power * np.int32((whole + np.int32(127)) << np.int32(23)).view(np.float32)
