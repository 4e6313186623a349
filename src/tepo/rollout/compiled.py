"""What passes do beside products and attention, compiled for the processor: norms, gates, draws.

Each function does in one pass over its rows what takes a chain of small tensor operations otherwise. Sums are float32.
An array "in the compute precision" is one of `policy.compiled_precision`.

Loads numba: imported where a decoder is made that uses it, not by `tepo.rollout`.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from tepo.policy.compiled_precision import put, wide
from tepo.policy.compiled_softmax import BLOCK, NOTHING, block_sums, compiled, compiled_for_threads, exp, greatest


@compiled_for_threads
def add_and_norm(x: Any, delta: Any, weight: Any, epsilon: Any, out: Any) -> None:
    """Add `delta` to the residual stream `x`, in place, and write its root-mean-square norm.

    Args:
        x: [B, D] float32.
        delta: [B, D] in the compute precision.
        weight: [D] float32.
        epsilon: added to the mean square, float32.
        out: [B, D] in the compute precision, written to.
    """
    size = x.shape[1]
    for row in numba.prange(x.shape[0]):
        total = np.float32(0)
        for i in range(size):
            x[row, i] += wide(delta[row, i])
            total += x[row, i] * x[row, i]
        rate = np.float32(1) / np.float32(math.sqrt(total / np.float32(size) + epsilon))
        for i in range(size):
            put(out[row], i, x[row, i] * rate * weight[i])


@compiled_for_threads
def gate(fused: Any, out: Any) -> None:
    """Write silu(gate) * up.

    Args:
        fused: [B, 2 F] gate and up, in the compute precision.
        out: [B, F] in the compute precision, written to.
    """
    size = out.shape[1]
    for row in numba.prange(out.shape[0]):
        for i in range(size):
            z = wide(fused[row, i])
            small = exp(-abs(z))  # no overflow on either side
            sigmoid = (np.float32(1) if z >= 0 else small) / (np.float32(1) + small)
            put(out[row], i, z * sigmoid * wide(fused[row, size + i]))


@compiled_for_threads
def draw(logits: Any, scale: Any, uniform: Any, greedy: bool, tokens: Any, logp: Any, entropy: Any) -> None:
    """Choose a token of each row, with its log-prob and the entropy of softmax(scale * logits).

    Args:
        logits: [B, V] float32.
        scale: one over the temperature, float32.
        uniform: [B] float64 in [0, 1), inverted through the cumulative sum; not looked at when greedy.
        greedy: choose the most probable token, the first of equals.
        tokens: [B] int64, written to.
        logp: [B] float64, written to; NaN where the row's logits are no distribution.
        entropy: [B] float64, written to, in nats.
    """
    size = logits.shape[1]
    for row in numba.prange(logits.shape[0]):
        z = logits[row]
        largest = greatest(z)
        sums = np.empty((size + BLOCK - 1) // BLOCK, np.float64)
        moment = 0.0
        for block in range(sums.shape[0]):
            sums[block], part = block_sums(z[block * BLOCK : (block + 1) * BLOCK], largest, scale)
            moment += part
        total = sums.sum() if abs(largest) < np.inf else np.nan
        if greedy:
            token = 0
            while token < size - 1 and z[token] < largest:
                token += 1
        else:
            token = _inverted(z, sums, largest, scale, uniform[row] * total)
        tokens[row] = token
        logp[row] = np.float64((z[token] - largest) * scale) - math.log(total)
        entropy[row] = math.log(total) - moment / total


@compiled
def _inverted(z: Any, sums: Any, largest: Any, scale: Any, target: Any) -> Any:
    """Return the token at which the cumulative sum passes `target`; never one of weight zero."""
    block, below = 0, 0.0
    while block < sums.shape[0] - 1 and below + sums[block] <= target:
        below += sums[block]
        block += 1
    while block > 0 and sums[block] == 0:  # rounding led past the last weight
        block -= 1
        below = target
    token, found = block * BLOCK, False
    for v in range(block * BLOCK, min((block + 1) * BLOCK, z.shape[0])):
        centred = (z[v] - largest) * scale
        if centred > NOTHING and not found:
            token = v  # the last possible one, should rounding lead past the end of the block
            below += np.float64(exp(centred))
            found = below > target
    return token
