"""What a decoding step does beside matrix products, compiled for the processor: attention, norms, gates, draws.

Each function does in one pass over its rows what takes a chain of small tensor operations otherwise, and attention
looks at each row's own tokens only, not at columns of longer rows. Sums, rotations and softmax are float32. An array
"in the compute precision" is float32, or bfloat16 seen as uint16, which numba has no type for.

Loads numba: imported where a decoder is made that uses it, not by `tepo.rollout`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.extending import overload

from tepo.policy.compiled_softmax import BLOCK, NOTHING, block_sums, compiled, compiled_for_threads, exp


@compiled_for_threads
def attend(
    fused: Any,
    turns: Any,
    at: Any,
    slots: Any,
    keys: Any,
    values: Any,
    out: Any,
    scale: Any,
    query_norm: Any,
    key_norm: Any,
    epsilon: Any,
) -> None:
    """Rotate each row's new query and key, put key and value into the cache and attend to the row's tokens.

    Args:
        fused: [B, (H + 2 K) * size] queries, keys and values, in the compute precision.
        turns: [positions, size] float32, cosine and sine of every rotary pair next to each other.
        at: [B] int64, the place of the new token.
        slots: [B] int64, the slot of each row in the cache.
        keys: [slots * K, columns, size] in the compute precision, written to.
        values: the same.
        out: [B, H * size] in the compute precision, written to.
        scale: factor of the scores, float32.
        query_norm: [size] float32, weight of the norm of queries; empty where there is none.
        key_norm: the same of keys.
        epsilon: of both norms, float32.
    """
    size = keys.shape[2]
    heads = out.shape[1] // size
    key_heads = (fused.shape[1] // size - heads) // 2
    for task in numba.prange(fused.shape[0] * key_heads):
        row, key_head = task // key_heads, task % key_heads
        pair = slots[row] * key_heads + key_head
        tokens = at[row] + 1
        turn = turns[at[row]]
        source = fused[row].reshape(-1, size)
        new = np.empty(size, np.float32)
        _turned(source[heads + key_head], turn, key_norm, epsilon, new)
        _store(new, keys[pair, at[row]])
        for i in range(size):
            values[pair, at[row], i] = source[heads + key_heads + key_head, i]
        scores = np.empty(tokens, np.float32)
        for head in range(key_head * (heads // key_heads), (key_head + 1) * (heads // key_heads)):
            _turned(source[head], turn, query_norm, epsilon, new)
            largest = _scores(new, keys[pair], scale, scores)
            total = np.float32(0)
            for j in range(tokens):
                scores[j] = exp(scores[j] - largest)
                total += scores[j]
            new[:] = 0
            for j in range(tokens):
                share = scores[j] / total
                value = values[pair, j]
                for i in range(size):
                    new[i] += share * _wide(value[i])
            _store(new, out[row, head * size : (head + 1) * size])


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
            x[row, i] += _wide(delta[row, i])
            total += x[row, i] * x[row, i]
        rate = np.float32(1) / np.float32(math.sqrt(total / np.float32(size) + epsilon))
        for i in range(size):
            _put(out[row], i, x[row, i] * rate * weight[i])


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
            z = _wide(fused[row, i])
            small = exp(-abs(z))  # no overflow on either side
            sigmoid = (np.float32(1) if z >= 0 else small) / (np.float32(1) + small)
            _put(out[row], i, z * sigmoid * _wide(fused[row, size + i]))


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
        largest = np.float32(-np.inf)
        for v in range(size):
            largest = max(largest, z[v])
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


@compiled
def _turned(source: Any, turn: Any, norm: Any, epsilon: Any, out: Any) -> None:
    """Write a head [size], normalised where `norm` is not empty, with every pair rotated, as float32."""
    size = out.shape[0]
    for i in range(size):
        out[i] = _wide(source[i])
    if norm.shape[0] > 0:
        total = np.float32(0)
        for i in range(size):
            total += out[i] * out[i]
        rate = np.float32(1) / np.float32(math.sqrt(total / np.float32(size) + epsilon))
        for i in range(size):
            out[i] = out[i] * rate * norm[i]
    for i in range(0, size, 2):
        a, b = out[i], out[i + 1]
        out[i] = a * turn[i] - b * turn[i + 1]
        out[i + 1] = a * turn[i + 1] + b * turn[i]


@compiled
def _scores(query: Any, keys: Any, scale: Any, out: Any) -> Any:
    """Write scale * keys @ query for as many keys as `out` has room for; return the largest."""
    largest = np.float32(-np.inf)
    for j in range(out.shape[0]):
        key = keys[j]
        total = np.float32(0)
        for i in range(query.shape[0]):
            total += query[i] * _wide(key[i])
        out[j] = total * scale
        largest = max(largest, out[j])
    return largest


@compiled
def _store(source: Any, out: Any) -> None:
    """Write a float32 vector in the compute precision."""
    for i in range(out.shape[0]):
        _put(out, i, source[i])


def _wide(value: Any) -> Any:
    """Return an entry of an array in the compute precision as float32."""
    raise NotImplementedError


def _put(out: Any, index: Any, value: Any) -> None:
    """Write a float32 into an array in the compute precision, rounded to the nearest, ties to even."""
    raise NotImplementedError


@overload(_wide, inline="always")
def _typed_wide(value: Any) -> Callable[[Any], Any]:
    return _wide_bfloat16 if value == numba.types.uint16 else _wide_float32


@overload(_put, inline="always")
def _typed_put(out: Any, index: Any, value: Any) -> Callable[[Any, Any, Any], None]:
    return _put_bfloat16 if out.dtype == numba.types.uint16 else _put_float32


def _wide_bfloat16(value: Any) -> Any:
    return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)


def _wide_float32(value: Any) -> Any:
    return value


def _put_bfloat16(out: Any, index: Any, value: Any) -> None:
    bits = np.float32(value).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # A NaN must stay one, whatever a carry makes of its last bits.
    out[index] = np.uint16(np.uint32(0x7FC0) if math.isnan(value) else rounded)


def _put_float32(out: Any, index: Any, value: Any) -> None:
    out[index] = value
