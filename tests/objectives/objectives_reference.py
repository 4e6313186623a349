"""The nine methods again, from their formulas, in plain Python: values and gradients by hand, no autograd, no torch.

Every derivative is written out from the formula, so that this file shares neither code nor differentiation with
what it checks. Notation: D = logp - old; w_t = what the reducer gives a token; all sums run over response tokens.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tepo.objectives import TokenBatch


@dataclass
class Token:
    """One response token: its column, and the values of the policies there."""

    column: int
    advantage: float
    logp: float
    old: float
    entropy: float = math.nan
    old_entropy: float = math.nan
    ref: float = math.nan
    rollout: float = math.nan
    sum_p2: float = math.nan
    sum_p2_logp: float = math.nan
    kl_full: float = math.nan


@dataclass
class Row:
    """One response."""

    tokens: list[Token]
    reward: float
    group: int
    truncated: bool


@dataclass
class Result:
    """Loss; its derivative by logp, entropy and kl_full, `[B][T]`."""

    loss: float
    by_logp: list[list[float]]
    by_entropy: list[list[float]]
    by_kl: list[list[float]]


# (row, weight of its tokens, settings) -> the row's share of the loss, and its derivative by each log-prob
PolicyTerm = Callable[["Row", float, "dict[str, Any]"], "tuple[float, list[float]]"]


def rows_of(batch: TokenBatch) -> list[Row]:
    """Read a batch into plain Python."""

    def column(name: str) -> list[list[float]] | None:
        value = getattr(batch, name)
        return None if value is None else value.detach().tolist()

    logp = column("logp")
    assert logp is not None
    assert batch.rewards is not None
    assert batch.group is not None
    old, given = column("old_logp") or logp, column("advantage")
    entropy = column("entropy")
    fields = {
        "entropy": entropy,
        "old_entropy": column("old_entropy") or (entropy if batch.old_logp is None else None),
        "ref": column("ref_logp"),
        "rollout": column("rollout_logp"),
        "sum_p2": column("sum_p2"),
        "sum_p2_logp": column("sum_p2_logp"),
        "kl_full": column("kl_full"),
    }
    rewards: list[Any] = batch.rewards.tolist()
    truncated = batch.truncated.tolist() if batch.truncated is not None else [False] * len(rewards)
    rows = []
    for i, mask in enumerate(batch.mask.tolist()):
        tokens = [
            Token(
                column=t,
                advantage=given[i][t] if given else math.nan,
                logp=logp[i][t],
                old=old[i][t],
                **{name: value[i][t] for name, value in fields.items() if value is not None},
            )
            for t, used in enumerate(mask)
            if used
        ]
        parts = rewards[i] if isinstance(rewards[i], list) else [rewards[i]]
        known = [part for part in parts if not math.isnan(part)]
        rows.append(Row(tokens, sum(known) if known else math.nan, int(batch.group[i]), truncated[i]))
    return rows


# --- advantages -------------------------------------------------------------------------------------------------


def others_of(rows: list[Row], rewards: list[float], i: int) -> list[float]:
    """Rewards of the row's group, the row among them, that could be scored."""
    return [r for row, r in zip(rows, rewards, strict=True) if row.group == rows[i].group and not math.isnan(r)]


def silent(group: list[float]) -> bool:
    """Whether a group's rewards say nothing: one response, or all equal up to rounding."""
    return len(group) < 2 or max(group) - min(group) <= 1e-6 * max(abs(max(group)), abs(min(group)))


def advantages(rows: list[Row], rewards: list[float], kind: str, eps: float) -> list[float]:
    """A_i of every row: "normalized" (R - mean)/(std + eps), "centred" R - mean, "leave-one-out"."""
    result = []
    for i, reward in enumerate(rewards):
        group = others_of(rows, rewards, i)
        if math.isnan(reward) or silent(group):
            result.append(0.0)
            continue
        n, mean = len(group), math.fsum(group) / len(group)
        if kind == "leave-one-out":
            result.append(reward - (math.fsum(group) - reward) / (n - 1))
        elif kind == "centred":
            result.append(reward - mean)
        else:
            std = math.sqrt(math.fsum((r - mean) ** 2 for r in group) / (n - 1))
            result.append((reward - mean) / (std + eps))
    return result


# --- who is averaged over whom ----------------------------------------------------------------------------------


def token_weights(rows: list[Row], counted: list[list[bool]], reducer: str, empty: str, constant: float) -> list[float]:
    """The weight of a counted token of each row, so that the reduced value is sum_{i,t} w_i x_{i,t}."""
    lengths = [sum(flags) for flags in counted]
    total = sum(lengths)
    responses = len(rows) if empty == "count" else sum(length > 0 for length in lengths)
    if total == 0:
        return [0.0] * len(rows)
    if reducer == "token-mean":
        return [1 / total] * len(rows)
    if reducer == "sequence-mean":
        return [1 / (responses * length) if length else 0.0 for length in lengths]
    if reducer == "sequence-sum":
        return [1 / (responses * constant)] * len(rows)
    inside = {row.group: 0 for row in rows}
    for row, length in zip(rows, lengths, strict=True):
        inside[row.group] += length
    groups = sum(size > 0 for size in inside.values())
    return [1 / (groups * inside[row.group]) if inside[row.group] else 0.0 for row in rows]


# --- the policy term --------------------------------------------------------------------------------------------


def bounded(value: float, clamp: float) -> tuple[float, float]:
    """Value clamped to +-clamp, and its derivative."""
    return (value, 1.0) if abs(value) <= clamp else (math.copysign(clamp, value), 0.0)


def ppo(a: float, r: float, low: float, high: float, dual: float | None) -> tuple[float, float]:
    """-min(r A, clip(r) A) with the dual clip, and its derivative by r."""
    plain, clipped = -a * r, -a * min(max(r, 1 - low), 1 + high)
    value, slope = (plain, -a) if plain >= clipped else (clipped, 0.0)
    if dual is not None and a < 0 and value > -dual * a:
        return -dual * a, 0.0
    return value, slope


def importance(row: Row, how: str, cap: float, clamp: float) -> list[float]:
    """The weight of the scorer's policy over the sampler's, for each token."""
    if how == "none":
        return [1.0] * len(row.tokens)
    if how == "sequence-mask":
        w = math.exp(bounded(math.fsum(t.old - t.rollout for t in row.tokens), clamp)[0])
        return [w if w <= cap else 0.0] * len(row.tokens)
    each = [math.exp(bounded(t.old - t.rollout, clamp)[0]) for t in row.tokens]
    if how == "truncate":
        return [min(w, cap) for w in each]
    return [w if 1 / cap <= w <= cap else 0.0 for w in each]


def left_out(row: Row, t: Token, s: dict[str, Any]) -> bool:
    """Whether a response with a negative advantage has drifted away from the policy that sampled it."""
    if s["off_policy_mask"] is None or not t.advantage < 0:
        return False
    return math.fsum(u.old - u.logp for u in row.tokens) / len(row.tokens) > s["off_policy_mask"]


def policy_row(row: Row, weight: float, s: dict[str, Any]) -> tuple[float, list[float]]:
    """One row's share of the policy loss, and its derivative by each of the row's log-probs."""
    clamp, n = s["log_ratio_clamp"], len(row.tokens)
    d = [t.logp - t.old for t in row.tokens]
    rho = importance(row, s["importance_weight"], s["importance_cap"], clamp)
    loss, slopes = 0.0, [0.0] * n
    if s["level"] == "none":
        for k, t in enumerate(row.tokens):
            if left_out(row, t, s):
                continue
            loss += weight * rho[k] * -t.advantage * t.logp
            slopes[k] += weight * rho[k] * -t.advantage
        return loss, slopes
    for k, t in enumerate(row.tokens):
        if left_out(row, t, s):
            continue
        if s["level"] == "token":
            log, inside = bounded(d[k], clamp)
        elif s["level"] == "sequence-sum":
            log, inside = bounded(math.fsum(d), clamp)
        else:
            log, inside = bounded(math.fsum(d) / n, clamp)
        r = math.exp(log)
        value, by_r = ppo(t.advantage, r, s["clip_low"], s["clip_high"], s["clip_dual"])
        loss += weight * rho[k] * value
        by_log = weight * rho[k] * by_r * r * inside
        if s["level"] in ("token", "sequence-token"):
            slopes[k] += by_log
        else:  # the log-ratio of the row depends on all its tokens
            for j in range(n):
                slopes[j] += by_log / n if s["level"] == "sequence" else by_log
    return loss, slopes


# --- the KL term ------------------------------------------------------------------------------------------------


def under_mask(t: Token, s: dict[str, Any]) -> bool:
    """TEPO's mask: positive advantage and falling entropy; other methods hold every token."""
    if s["entropy_criterion"] is None:
        return True
    if not t.advantage > 0:
        return False
    if s["entropy_criterion"] == "realised":
        return t.entropy < t.old_entropy - s["entropy_margin"]
    if s["entropy_criterion"] == "sign":
        return t.logp + t.entropy > 0
    # Delta H = -eta A [p (log p + H) - sum p^2 (log p + H)] < 0
    return math.exp(t.logp) * (t.logp + t.entropy) - (t.sum_p2_logp + t.entropy * t.sum_p2) > 0


def kl_token(t: Token, s: dict[str, Any]) -> tuple[float, float, float]:
    """The estimate, its derivative by logp, and by kl_full."""
    if s["kl_estimator"] == "full":
        return t.kl_full, 0.0, 1.0
    target = t.ref if s["kl_target"] == "reference" else t.old
    d, inside = bounded(target - t.logp, s["log_ratio_clamp"])
    value, by_logp = {
        "k1": (-d, 1.0),
        "abs": (abs(d), -math.copysign(1.0, d) if d else 0.0),
        "k2": (d * d / 2, -d),
        "k3": (math.expm1(d) - d, 1 - math.exp(d)),
        "k3-old": (math.expm1(-d) + d, math.exp(-d) - 1),
    }[s["kl_estimator"]]
    return value, by_logp * inside, 0.0


# --- the methods ------------------------------------------------------------------------------------------------

SHARED = {
    "truncated": "keep",
    "zero_variance": "keep",
    "entropy_coef": 0.0,
    "importance_weight": "none",
    "importance_cap": 2.0,
    "off_policy_mask": None,
    "log_ratio_clamp": 20.0,
    "kl_coef": 0.0,
    "kl_norm": "all",
    "kl_target": "reference",
    "kl_estimator": "k3",
    "kl_adapt_to": None,
    "entropy_criterion": None,
    "kl_in_reward": False,
    "overlong_length": None,
    "empty_rows": "skip",
    "advantage_eps": 1e-6,
    "clip_dual": None,
    "constant": 1.0,
    "advantage": "normalized",
}
TEPO_MARKOV = {"level": "sequence", "clip_low": 0.2, "clip_high": 0.28, "reducer": "token-mean"}
GSPO = {"level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "reducer": "sequence-mean"}
METHODS: dict[str, dict[str, Any]] = {
    "tepo-markov": TEPO_MARKOV,
    "tepo": TEPO_MARKOV | {"kl_coef": 1.0, "kl_target": "old", "entropy_criterion": "realised", "entropy_margin": 1e-3},
    "grpo": {"level": "token", "clip_low": 0.2, "clip_high": 0.2, "reducer": "sequence-mean", "kl_coef": 0.04},
    "dapo": {"level": "token", "clip_low": 0.2, "clip_high": 0.28, "reducer": "token-mean"},
    "dapo-overlong": {
        **{"level": "token", "clip_low": 0.2, "clip_high": 0.28, "reducer": "token-mean"},
        **{"truncated": "drop", "overlong_length": 20480, "overlong_cache": 4096, "overlong_penalty": 1.0},
    },
    "dr-grpo": {
        **{"level": "token", "clip_low": 0.2, "clip_high": 0.2, "reducer": "sequence-sum"},
        **{"constant": 3000, "advantage": "centred"},
    },
    "gspo": GSPO,
    "gspo-token": GSPO | {"level": "sequence-token"},
    "reinforce": {"level": "none", "reducer": "token-mean", "advantage": "centred"},
    "rloo": {
        **{"level": "none", "reducer": "sequence-sum", "advantage": "leave-one-out", "kl_coef": 0.03},
        **{"kl_in_reward": True, "clip_low": 0.2, "clip_high": 0.2},
    },
}


def settings_of(name: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """The settings of a method, in this file's words."""
    s = SHARED | METHODS[name] | overrides
    if "ratio" in overrides:
        s["level"] = overrides["ratio"]
    if "max_length" in overrides:
        s["constant"] = overrides["max_length"]
    if overrides.get("scope") == "group":
        s["reducer"] = "group-token-mean"
    if name == "rloo" and s["level"] == "sequence-sum":
        s["reducer"] = "sequence-mean"
    if s["kl_adapt_to"] is not None:  # the state holds the coefficient in float32
        s["kl_coef"] = struct.unpack("f", struct.pack("f", s["kl_coef"]))[0]
    return s


def reference(name: str, overrides: dict[str, Any], batch: TokenBatch) -> Result:
    """Loss and derivatives of a method on a batch."""
    s = settings_of(name, overrides)
    rows = rows_of(batch)
    raw = [row.reward for row in rows]
    if batch.advantage is None:
        shaped = list(raw)
        if s["kl_in_reward"] and s["kl_coef"]:
            shaped = [
                r - s["kl_coef"] * math.fsum(t.old - t.ref for t in row.tokens)
                for r, row in zip(raw, rows, strict=True)
            ]
        if s["overlong_length"] is not None:
            start = s["overlong_length"] - s["overlong_cache"]
            over = [min(1.0, max(0.0, (len(row.tokens) - start) / s["overlong_cache"])) for row in rows]
            shaped = [r - s["overlong_penalty"] * share for r, share in zip(raw, over, strict=True)]
        for row, a in zip(rows, advantages(rows, shaped, s["advantage"], s["advantage_eps"]), strict=True):
            for t in row.tokens:
                t.advantage = a
    dull = [silent(others_of(rows, raw, i)) for i in range(len(rows))]
    return assemble(batch, rows, dull, s, policy_row)


def assemble(batch: TokenBatch, rows: list[Row], dull: list[bool], s: dict[str, Any], policy: PolicyTerm) -> Result:
    """Loss and derivatives of the policy term, entropy bonus and KL over rows that have their advantages.

    `dull`: the rows of groups whose rewards say nothing; `policy` gives a row's share and its derivatives.
    """
    kept = [
        not (s["truncated"] == "drop" and row.truncated) and not (s["zero_variance"] == "drop" and silence)
        for row, silence in zip(rows, dull, strict=True)
    ]
    height, width = batch.mask.shape
    result = Result(0.0, *([[0.0] * width for _ in range(height)] for _ in range(3)))
    counted = [[keep] * len(row.tokens) for keep, row in zip(kept, rows, strict=True)]
    weights = token_weights(rows, counted, s["reducer"], s["empty_rows"], s["constant"])
    for i, row in enumerate(rows):
        if not kept[i]:
            continue
        loss, slopes = policy(row, weights[i], s)
        result.loss += loss
        for t, slope in zip(row.tokens, slopes, strict=True):
            result.by_logp[i][t.column] += slope
            result.loss -= s["entropy_coef"] * weights[i] * (t.entropy if s["entropy_coef"] else 0.0)
            result.by_entropy[i][t.column] -= s["entropy_coef"] * weights[i]
    if s["kl_coef"] and not s["kl_in_reward"]:
        add_kl(result, rows, counted, s)
    return result


def add_kl(result: Result, rows: list[Row], counted: list[list[bool]], s: dict[str, Any]) -> None:
    """Add coef * reduce(mask * KL), with its own denominator where only masked tokens divide."""
    held = [
        [keep and under_mask(t, s) for keep, t in zip(counted[i], row.tokens, strict=True)]
        for i, row in enumerate(rows)
    ]
    divided = held if s["kl_norm"] == "masked" else counted
    weights = token_weights(rows, divided, s["reducer"], s["empty_rows"], s["constant"])
    for i, row in enumerate(rows):
        for k, t in enumerate(row.tokens):
            if held[i][k]:
                value, by_logp, by_kl = kl_token(t, s)
                scale = s["kl_coef"] * weights[i]
                result.loss += scale * value
                result.by_logp[i][t.column] += scale * by_logp
                result.by_kl[i][t.column] += scale * by_kl
