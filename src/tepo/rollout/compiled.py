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

from tepo.policy.compiled_softmax import BLOCK, NOTHING, block_sums, compiled, compiled_for_threads, exp, greatest
from tepo.policy.prefetch import LINE, prefetch

AHEAD = 16
"""Rows of a cache that are asked for before they are read: memory answers late, and rows of different heads are too far
apart for the processor to guess."""


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
    group = heads // key_heads
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
        queries = np.empty((group, size), np.float32)
        for member in range(group):
            _turned(source[key_head * group + member], turn, query_norm, epsilon, queries[member])
        shares = np.empty((group, tokens), np.float32)
        _scores(queries, keys[pair], shares)
        for member in range(group):
            _softmax(shares[member], scale)
        attended = queries  # no longer needed
        attended[:] = 0
        _add_shares(shares, values[pair], attended)
        for member in range(group):
            head = key_head * group + member
            _store(attended[member], out[row, head * size : (head + 1) * size])


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
def _scores(queries: Any, keys: Any, out: Any) -> None:
    """Write the products [G, tokens] of queries [G, size] and as many keys as `out` has room for.

    Four keys at a time: a query is read once for them, and their sums do not wait for each other.
    """
    tokens = out.shape[1]
    whole = tokens - tokens % 4
    for j in range(0, whole, 4):
        k0, k1, k2, k3 = keys[j], keys[j + 1], keys[j + 2], keys[j + 3]
        _prefetch_rows(keys, j + AHEAD)
        for member in range(queries.shape[0]):
            query = queries[member]
            s0 = s1 = s2 = s3 = np.float32(0)
            for i in range(query.shape[0]):
                s0 += query[i] * _wide(k0[i])
                s1 += query[i] * _wide(k1[i])
                s2 += query[i] * _wide(k2[i])
                s3 += query[i] * _wide(k3[i])
            out[member, j], out[member, j + 1], out[member, j + 2], out[member, j + 3] = s0, s1, s2, s3
    for j in range(whole, tokens):
        key = keys[j]
        for member in range(queries.shape[0]):
            total = np.float32(0)
            for i in range(key.shape[0]):
                total += queries[member, i] * _wide(key[i])
            out[member, j] = total


@compiled
def _softmax(scores: Any, scale: Any) -> None:
    """Replace scores by softmax(scale * scores)."""
    largest, total = np.float32(-np.inf), np.float32(0)
    for j in range(scores.shape[0]):
        largest = max(largest, scores[j] * scale)
    for j in range(scores.shape[0]):
        scores[j] = exp(scores[j] * scale - largest)
        total += scores[j]
    for j in range(scores.shape[0]):
        scores[j] /= total


@compiled
def _add_shares(shares: Any, values: Any, out: Any) -> None:
    """Add shares [G, tokens] @ values to `out` [G, size], four values at a time."""
    tokens = shares.shape[1]
    whole = tokens - tokens % 4
    for j in range(0, whole, 4):
        v0, v1, v2, v3 = values[j], values[j + 1], values[j + 2], values[j + 3]
        _prefetch_rows(values, j + AHEAD)
        for member in range(out.shape[0]):
            share, total = shares[member], out[member]
            for i in range(total.shape[0]):
                total[i] += (share[j] * _wide(v0[i]) + share[j + 1] * _wide(v1[i])) + (
                    share[j + 2] * _wide(v2[i]) + share[j + 3] * _wide(v3[i])
                )
    for j in range(whole, tokens):
        value = values[j]
        for member in range(out.shape[0]):
            for i in range(value.shape[0]):
                out[member, i] += shares[member, j] * _wide(value[i])


@compiled
def _prefetch_rows(cache: Any, first: Any) -> None:
    """Ask for four rows of a cache, as far as there are any."""
    for j in range(first, min(first + 4, cache.shape[0])):
        row = cache[j]
        for i in range(0, row.shape[0], LINE // row.itemsize):
            prefetch(row, i)


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
