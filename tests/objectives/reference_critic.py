"""Actor-critic methods again, from their formulas, in plain Python: values and gradients by hand, no autograd.

Covers `ppo`, `instructgpt` and `tulu3-rlvr` with all their own settings; the policy term and the settings that every
method shares are those of `objectives_reference`.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

from objectives_reference import SHARED, Result, Row, assemble, others_of, policy_row, rows_of, silent

from tepo.objectives import TokenBatch

PPO = {
    **{"clip_low": 0.2, "clip_high": 0.2, "gamma": 1.0, "lam": 0.95, "whiten": True},
    **{"value_clip": 0.2, "value_coef": 0.1, "level": "token", "reducer": "token-mean", "kl_in_reward": True},
}
METHODS: dict[str, dict[str, Any]] = {
    "ppo": PPO,
    "instructgpt": PPO | {"kl_coef": 0.02, "reward_clip": None, "kl_adapt_to": None, "ptx_coef": 0.0},
    "tulu3-rlvr": PPO | {"kl_coef": 0.05, "verified_reward": 10.0, "missing_eos": -10.0},
}


@dataclass
class CriticResult(Result):
    """Loss; its derivative by logp, entropy, kl_full and values, `[B][T]`."""

    by_values: list[list[float]]


def reference(name: str, overrides: dict[str, Any], batch: TokenBatch) -> CriticResult:
    """Loss and derivatives of a method on a batch."""
    s = SHARED | METHODS[name] | overrides
    if s["kl_adapt_to"] is not None:  # the state holds the coefficient in float32
        s["kl_coef"] = struct.unpack("f", struct.pack("f", s["kl_coef"]))[0]
    assert batch.old_values is not None
    rows, old_values = rows_of(batch), batch.old_values.tolist()
    raw = [row.reward for row in rows]
    scores = [score_of(name, row, i, batch, s) for i, row in enumerate(rows)]
    if batch.advantage is None:
        for i, row in enumerate(rows):
            episode(row, i, scores[i], batch, s)
    targets = [[t.advantage + old_values[i][t.column] for t in row.tokens] for i, row in enumerate(rows)]
    if s["whiten"]:
        whiten([row for row, score in zip(rows, scores, strict=True) if not math.isnan(score)])
    dull = [silent(others_of(rows, raw, i)) for i in range(len(rows))]
    policy = assemble(batch, rows, dull, s, policy_row)
    result = CriticResult(**vars(policy), by_values=[[0.0] * len(columns) for columns in policy.by_logp])
    add_critic(result, rows, dull, targets, batch, s)
    return result


def score_of(name: str, row: Row, i: int, batch: TokenBatch, s: dict[str, Any]) -> float:
    """The reward of a whole response, as the method makes it of the task's; NaN where nothing can score it."""
    score = row.reward
    if math.isnan(score):
        return score
    if name == "tulu3-rlvr":
        assert batch.correct is not None
        score = s["verified_reward"] if bool(batch.correct[i]) else 0.0
        if s["missing_eos"] is not None:
            assert batch.truncated is not None
            score = s["missing_eos"] if row.truncated else score
    elif s.get("reward_clip") is not None:
        score = max(-s["reward_clip"], min(s["reward_clip"], score))
    return score


def episode(row: Row, i: int, score: float, batch: TokenBatch, s: dict[str, Any]) -> None:
    """GAE written as its sum: A_t = sum_k (gamma lam)^k (r_{t+k} + gamma V_{t+k+1} - V_{t+k})."""
    assert batch.old_values is not None
    n, values = len(row.tokens), batch.old_values[i].tolist()
    own = [0.0] * batch.mask.shape[1] if batch.token_rewards is None else batch.token_rewards[i].tolist()
    errors = []
    for k, t in enumerate(row.tokens):
        kl = s["kl_coef"] * (t.old - t.ref) if s["kl_coef"] else 0.0
        reward = own[t.column] - kl + (score if k == n - 1 else 0.0)
        after = s["gamma"] * values[row.tokens[k + 1].column] if k < n - 1 else 0.0
        errors.append(reward + after - values[t.column])
    for k, t in enumerate(row.tokens):
        rate = s["gamma"] * s["lam"]
        t.advantage = 0.0 if math.isnan(score) else math.fsum(rate**j * error for j, error in enumerate(errors[k:]))


def whiten(rows: list[Row]) -> None:
    """(A - mean) / sqrt(sample variance + 1e-8) over tokens; nothing where they all agree."""
    tokens = [t for row in rows for t in row.tokens]
    values = [t.advantage for t in tokens]
    if len(values) < 2 or max(values) - min(values) <= 1e-6 * max(map(abs, values)):
        for t in tokens:
            t.advantage = 0.0
        return
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    for t in tokens:
        t.advantage = (t.advantage - mean) / math.sqrt(variance + 1e-8)


def add_critic(
    result: CriticResult,
    rows: list[Row],
    dull: list[bool],
    targets: list[list[float]],
    batch: TokenBatch,
    s: dict[str, Any],
) -> None:
    """Add coef times the mean over kept tokens of 0.5 max((v - R)^2, (clip(v) - R)^2)."""
    assert batch.values is not None
    assert batch.old_values is not None
    kept = [
        not (s["truncated"] == "drop" and row.truncated) and not (s["zero_variance"] == "drop" and silence)
        for row, silence in zip(rows, dull, strict=True)
    ]
    n = sum(len(row.tokens) for row, keep in zip(rows, kept, strict=True) if keep)
    for i, row in enumerate(rows):
        for t, target in zip(row.tokens if kept[i] else [], targets[i], strict=False):
            v, old = float(batch.values[i][t.column]), float(batch.old_values[i][t.column])
            value, by_value = critic(v, old, target, s["value_clip"])
            result.loss += s["value_coef"] * value / n
            result.by_values[i][t.column] = s["value_coef"] * by_value / n


def critic(v: float, old: float, target: float, clip: float | None) -> tuple[float, float]:
    """0.5 max((v - R)^2, (clip(v) - R)^2), and its derivative by v."""
    plain = (v - target) ** 2
    if clip is None:
        return 0.5 * plain, v - target
    near = abs(v - old) <= clip
    bounded = v if near else old + math.copysign(clip, v - old)
    clipped = (bounded - target) ** 2
    return (0.5 * plain, v - target) if plain >= clipped else (0.5 * clipped, 0.0)
