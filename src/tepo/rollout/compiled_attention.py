"""Attention of rows to their own tokens in the cache, compiled for the processor.

It looks at each row's own tokens only, not at columns of longer rows. Rotations, scores and softmax are float32. An
array "in the compute precision" is one of `policy.compiled_precision`.

Loads numba: imported where a decoder is made that uses it, not by `tepo.rollout`.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from tepo.policy.compiled_precision import store, wide
from tepo.policy.compiled_softmax import compiled, compiled_for_threads, exp
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
        _enter(source, heads + key_head, key_heads, turn, key_norm, epsilon, keys[pair, at[row]], values[pair, at[row]])
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
            store(attended[member], out[row, head * size : (head + 1) * size])


@compiled_for_threads
def enter(
    fused: Any,
    turns: Any,
    at: Any,
    slots: Any,
    keys: Any,
    values: Any,
    queries: Any,
    query_norm: Any,
    key_norm: Any,
    epsilon: Any,
) -> None:
    """Put keys and values of tokens into the cache and write their queries, for attention that others compute.

    Args are those of `attend`, a row being a token, any number of them of a slot; `queries` [T, H * size], in the
    compute precision, is written to.
    """
    size = keys.shape[2]
    heads = queries.shape[1] // size
    key_heads = (fused.shape[1] // size - heads) // 2
    for row in numba.prange(fused.shape[0]):
        turn = turns[at[row]]
        source = fused[row].reshape(-1, size)
        new = np.empty(size, np.float32)
        for head in range(heads):
            _turned(source[head], turn, query_norm, epsilon, new)
            store(new, queries[row, head * size : (head + 1) * size])
        for key_head in range(key_heads):
            key, value = keys[slots[row] * key_heads + key_head], values[slots[row] * key_heads + key_head]
            _enter(source, heads + key_head, key_heads, turn, key_norm, epsilon, key[at[row]], value[at[row]])


@compiled
def _enter(source: Any, head: Any, key_heads: Any, turn: Any, norm: Any, epsilon: Any, key: Any, value: Any) -> None:
    """Write the key that is `head` of a token's heads [H + 2 K, size], rotated, and its value."""
    new = np.empty(key.shape[0], np.float32)
    _turned(source[head], turn, norm, epsilon, new)
    store(new, key)
    for i in range(value.shape[0]):
        value[i] = source[head + key_heads, i]


@compiled
def _turned(source: Any, turn: Any, norm: Any, epsilon: Any, out: Any) -> None:
    """Write a head [size], normalised where `norm` is not empty, with every pair rotated, as float32."""
    size = out.shape[0]
    for i in range(size):
        out[i] = wide(source[i])
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
                s0 += query[i] * wide(k0[i])
                s1 += query[i] * wide(k1[i])
                s2 += query[i] * wide(k2[i])
                s3 += query[i] * wide(k3[i])
            out[member, j], out[member, j + 1], out[member, j + 2], out[member, j + 3] = s0, s1, s2, s3
    for j in range(whole, tokens):
        key = keys[j]
        for member in range(queries.shape[0]):
            total = np.float32(0)
            for i in range(key.shape[0]):
                total += queries[member, i] * wide(key[i])
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
                total[i] += (share[j] * wide(v0[i]) + share[j + 1] * wide(v1[i])) + (
                    share[j + 2] * wide(v2[i]) + share[j + 3] * wide(v3[i])
                )
    for j in range(whole, tokens):
        value = values[j]
        for member in range(out.shape[0]):
            for i in range(value.shape[0]):
                out[member, i] += shares[member, j] * wide(value[i])


@compiled
def _prefetch_rows(cache: Any, first: Any) -> None:
    """Ask for four rows of a cache, as far as there are any."""
    for j in range(first, min(first + 4, cache.shape[0])):
        row = cache[j]
        for i in range(0, row.shape[0], LINE // row.itemsize):
            prefetch(row, i)
