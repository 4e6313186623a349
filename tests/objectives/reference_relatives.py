"""GRPO's relatives again, from their formulas, in plain Python: other advantages, ratios and surrogates.

Like `objectives_reference`, whose rows, weights and KL it shares: derivatives are written out by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from objectives_reference import (
    SHARED,
    Result,
    Row,
    advantages,
    assemble,
    bounded,
    importance,
    left_out,
    others_of,
    ppo,
    rows_of,
    silent,
)

from tepo.objectives import TokenBatch

Settings = dict[str, Any]
# A token's loss, and its derivative by every log-prob of the row.
Term = Callable[[Row, int, Settings], tuple[float, list[float]]]

# --- advantages -------------------------------------------------------------------------------------------------


def group_relative(rows: list[Row], rewards: list[float], s: Settings) -> list[float]:
    """The usual ones, and R - mean over the standard deviation of all rewards of the batch."""
    if s["advantage"] != "batch-scaled":
        return advantages(rows, rewards, s["advantage"], s["advantage_eps"])
    known = [r for r in rewards if not math.isnan(r)]
    scale = deviation(known) + s["advantage_eps"]
    return [a / scale for a in advantages(rows, rewards, "centred", 0.0)]


def deviation(values: list[float]) -> float:
    """Sample standard deviation."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def length_weighted(rows: list[Row], rewards: list[float], s: Settings) -> list[float]:
    """OPO: R_i - sum L R / sum L over the group."""
    result = []
    for i, reward in enumerate(rewards):
        group = [(len(row.tokens), r) for row, r in zip(rows, rewards, strict=True) if row.group == rows[i].group]
        group = [(n, r) for n, r in group if not math.isnan(r)]
        total = sum(n for n, _ in group)
        if math.isnan(reward) or silent([r for _, r in group]):
            result.append(0.0)
        else:
            result.append(reward - (math.fsum(n * r for n, r in group) / total if total else 0.0))
    return result


def best_only(rows: list[Row], rewards: list[float], s: Settings) -> list[float]:
    """pass@k: the best of the group gets its lead over the second."""
    result = []
    for i, reward in enumerate(rewards):
        group = sorted(others_of(rows, rewards, i), reverse=True)
        if math.isnan(reward) or silent(group) or reward < group[0]:
            result.append(0.0)
            continue
        scale = deviation(group) + s["advantage_eps"] if s["divide_by_std"] else 1.0
        result.append((group[0] - group[1]) / scale)
    return result


def rescaled(rows: list[Row], rewards: list[float], s: Settings) -> list[float]:
    """GPG: alpha (R - mean) / F."""
    kind = "normalized" if s["divide_by_std"] else "centred"
    plain = advantages(rows, rewards, kind, s["advantage_eps"])
    if s["alpha"] == "none":
        alpha = 1.0
    elif s["alpha"] == "rewards":
        known = [r for r in rewards if not math.isnan(r)]
        alpha = len(known) / max(1, sum(r != 0 for r in known))
    else:
        first = {row.group: i for i, row in enumerate(rows)}
        speaking = sum(not silent(others_of(rows, rewards, i)) for i in first.values())
        alpha = len(first) / max(1, speaking)
    return [alpha * a for a in plain]


def decoupled(batch: TokenBatch, rows: list[Row], s: Settings) -> list[float]:
    """GDPO: each reward normalised within its group, weighted and summed, whitened over responses."""
    assert batch.rewards is not None
    columns = batch.rewards.reshape(len(rows), -1).T.tolist()
    weights = s["reward_weights"] or [1.0] * len(columns)
    if len(weights) != len(columns):
        weights = weights[: len(columns)]
    total = [0.0] * len(rows)
    for weight, column in zip(weights, columns, strict=True):
        for i, a in enumerate(advantages(rows, column, "normalized", s["advantage_eps"])):
            total[i] += weight * a
    if s["whiten"] != "responses":
        return total
    chosen = [i for i, row in enumerate(rows) if row.tokens and not math.isnan(row.reward)]
    values = whitened([total[i] for i in chosen], 0.0, s["advantage_eps"])
    return [dict(zip(chosen, values, strict=True)).get(i, 0.0) for i in range(len(rows))]


def whitened(values: list[float], in_variance: float, beside: float) -> list[float]:
    """(x - mean) / (sqrt(var + a) + b)."""
    if len(values) < 2 or max(values) - min(values) <= 1e-6 * max(abs(v) for v in values):
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    scale = math.sqrt(deviation(values) ** 2 + in_variance) + beside
    return [(v - mean) / scale for v in values]


def whiten_tokens(rows: list[Row]) -> None:
    """Whiten the advantages of all tokens of the responses that have a reward; the others get 0."""
    tokens = [t for row in rows if not math.isnan(row.reward) for t in row.tokens]
    for t, a in zip(tokens, whitened([t.advantage for t in tokens], 1e-8, 0.0), strict=True):
        t.advantage = a
    for row in rows:
        if math.isnan(row.reward):
            for t in row.tokens:
                t.advantage = 0.0


def token_returns(rows: list[Row], rewards: list[float], s: Settings) -> None:
    """REINFORCE++: discounted returns of -coef (log pi_old - log pi_ref), and the reward at the last token."""
    for row, reward in zip(rows, rewards, strict=True):
        following = 0.0
        for k in range(len(row.tokens) - 1, -1, -1):
            t = row.tokens[k]
            kl = s["kl_coef"] * (t.old - t.ref) if s["kl_coef"] else 0.0
            own = (reward if k == len(row.tokens) - 1 else 0.0) - kl
            following = own + s["gamma"] * following
            t.advantage = 0.0 if math.isnan(reward) else following


# --- terms ------------------------------------------------------------------------------------------------------


def only(n: int, k: int, slope: float) -> list[float]:
    """The derivative of a loss that depends on its own token alone."""
    return [slope if j == k else 0.0 for j in range(n)]


def token_clip(row: Row, k: int, s: Settings) -> tuple[float, list[float]]:
    t = row.tokens[k]
    log, inside = bounded(t.logp - t.old, s["log_ratio_clamp"])
    r = math.exp(log)
    value, by_r = ppo(t.advantage, r, s["clip_low"], s["clip_high"], s["clip_dual"])
    return value, only(len(row.tokens), k, by_r * r * inside)


def plain(row: Row, k: int, s: Settings) -> tuple[float, list[float]]:
    t = row.tokens[k]
    return -t.advantage * t.logp, only(len(row.tokens), k, -t.advantage)


def capped(row: Row, k: int, s: Settings) -> tuple[float, list[float]]:
    t = row.tokens[k]
    w = math.exp(bounded(t.logp - t.old, s["log_ratio_clamp"])[0])
    high, low = s["clip_high"], s["clip_low"]
    if s["cap"] == "relative":
        high, low = 1 + high, None if low is None else 1 - low
    w = min(w, high)
    w = w if low is None else max(w, low)
    return -w * t.advantage * t.logp, only(len(row.tokens), k, -w * t.advantage)


def gated(row: Row, k: int, s: Settings) -> tuple[float, list[float]]:
    t = row.tokens[k]
    log, inside = bounded(t.logp - t.old, s["log_ratio_clamp"])
    r, tau = math.exp(log), s["tau_positive"] if t.advantage > 0 else s["tau_negative"]
    gate = 1 / (1 + math.exp(-tau * (r - 1)))
    return -t.advantage * 4 / tau * gate, only(len(row.tokens), k, -t.advantage * 4 * gate * (1 - gate) * r * inside)


def power(row: Row, s: Settings, low: float | None, high: float | None) -> tuple[float, list[float]]:
    """The power mean of the token ratios, each clipped (in nats) where its advantage gains, and its derivatives."""
    p, n = s["p"], len(row.tokens)
    logs, free = [], []
    for t in row.tokens:
        d = t.logp - t.old
        cut = (high is not None and t.advantage > 0 and d > high) or (low is not None and t.advantage < 0 and d < -low)
        logs.append((high if t.advantage > 0 else -low) if cut else d)  # type: ignore[operator]
        free.append(0.0 if cut else 1.0)
    if p == 0:
        log, shares = math.fsum(logs) / n, [1 / n] * n
    else:
        powers = [math.exp(p * d) for d in logs]
        log = math.log(math.fsum(powers) / n) / p
        shares = [x / math.fsum(powers) for x in powers]
    log, inside = bounded(log, s["log_ratio_clamp"])
    h = math.exp(log)
    return h, [h * inside * share * f for share, f in zip(shares, free, strict=True)]


def geometric(row: Row, k: int, s: Settings) -> tuple[float, list[float]]:
    h, by_logp = power(row, {**s, "p": 0}, s["clip_low"], s["clip_high"])
    a = row.tokens[k].advantage
    return -a * h, [-a * slope for slope in by_logp]


def holder(row: Row, k: int, s: Settings) -> tuple[float, list[float]]:
    a = row.tokens[k].advantage
    if s["clip"] == "token":
        h, by_logp = power(row, s, -math.log(1 - s["clip_low"]), math.log(1 + s["clip_high"]))
        return -a * h, [-a * slope for slope in by_logp]
    h, by_logp = power(row, s, None, None)
    value, by_h = ppo(a, h, s["clip_low"], s["clip_high"], None)
    return value, [by_h * slope for slope in by_logp]


def sequence_clip(row: Row, k: int, s: Settings) -> tuple[float, list[float]]:
    h, by_logp = power(row, {**s, "p": 0}, None, None)
    value, by_h = ppo(row.tokens[k].advantage, h, s["clip_low"], s["clip_high"], s["clip_dual"])
    return value, [by_h * slope for slope in by_logp]


def gamma_weighted(row: Row, k: int, s: Settings) -> tuple[float, list[float]]:
    t = row.tokens[k]
    log = bounded(math.fsum(u.logp - u.old for u in row.tokens), s["log_ratio_clamp"])[0]
    sign = "positive" if t.advantage >= 0 else "negative"
    power_of, lam = s[f"k_{sign}"], s[f"lam_{sign}"]
    weight = math.exp(log) ** power_of * math.exp(lam * (1 - math.exp(log)))
    return -weight * t.advantage * t.logp, only(len(row.tokens), k, -weight * t.advantage)


def prefix(row: Row, k: int, s: Settings) -> tuple[float, list[float]]:
    t, n = row.tokens[k], len(row.tokens)
    log, inside = bounded(math.fsum(u.logp - u.old for u in row.tokens[: k + 1]) / (k + 1), s["log_ratio_clamp"])
    w = math.exp(log)
    if s["surrogate"] == "clip":
        value, by_w = ppo(t.advantage, w, s["clip_low"], s["clip_high"], None)
    elif s["accept_low"] <= w <= s["accept_high"]:
        value, by_w = -t.advantage * w, -t.advantage
    else:
        value, by_w = 0.0, 0.0
    slope = by_w * w * inside
    if s["gradient"] == "token":
        return value, only(n, k, slope)
    return value, [slope / (k + 1) if j <= k else 0.0 for j in range(n)]


def trusted(row: Row, k: int, s: Settings) -> tuple[float, list[float]]:
    t = row.tokens[k]
    p, old = math.exp(t.logp), math.exp(t.old)
    default = {"tv": 0.15, "kl": 0.05}[s["divergence"]]
    high = default if s["threshold_high"] is None else s["threshold_high"]
    low = default if s["threshold_low"] is None else s["threshold_low"]
    if s["divergence"] == "tv":
        inside = p - old <= high if t.advantage > 0 else p - old >= -low
    else:
        moved = old * (t.old - t.logp) + (1 - old) * math.log((1 - old + 1e-8) / (1 - p + 1e-8))
        inside = (moved <= high or p <= old) if t.advantage > 0 else (moved <= low or p >= old)
    if not inside:
        return 0.0, [0.0] * len(row.tokens)
    w = min(math.exp(bounded(t.logp - t.old, s["log_ratio_clamp"])[0]), s["ratio_cap"])
    return -w * t.advantage * t.logp, only(len(row.tokens), k, -w * t.advantage)


def quadratic(row: Row, k: int, s: Settings) -> tuple[float, list[float]]:
    t = row.tokens[k]
    d, inside = bounded(t.logp - t.old, s["log_ratio_clamp"])
    value = s["beta"] / 2 * d * d - t.advantage * t.logp
    return value, only(len(row.tokens), k, s["beta"] * d * inside - t.advantage)


# --- the methods ------------------------------------------------------------------------------------------------

PPO = {"term": token_clip, "clip_low": 0.2, "clip_high": 0.2, "reducer": "token-mean"}
PLAIN = {"term": plain, "reducer": "token-mean"}
METHODS: dict[str, Settings] = {
    "ppo-clip": PPO | {"max_length": 1, "scope": "mini"},
    "reinforce++": PPO | {"kl_coef": 0.01, "kl_in_reward": True, "gamma": 1.0, "returns": True, "whiten": "tokens"},
    "reinforce++-baseline": PPO
    | {"advantage": "centred", "whiten": "tokens", "kl_coef": 1e-5, "kl_estimator": "k2", "kl_target": "reference"},
    "gpg": PLAIN | {"of_rewards": rescaled, "alpha": "groups", "divide_by_std": False},
    "opo": PLAIN | {"of_rewards": length_weighted},
    "grpo-passk": PPO | {"of_rewards": best_only, "divide_by_std": True},
    "gdpo": PPO | {"reducer": "sequence-mean", "reward_weights": None, "whiten": "responses", "each": True},
    "cispo": {"term": capped, "cap": "absolute", "clip_high": 5.0, "clip_low": None, "reducer": "token-mean"},
    "sapo": {"term": gated, "tau_positive": 1.0, "tau_negative": 1.05, "reducer": "sequence-mean"},
    "gmpo": {"term": geometric, "clip_low": 0.4, "clip_high": 0.4, "reducer": "sequence-mean"},
    "luspo": {"term": sequence_clip, "clip_low": 2e-3, "clip_high": 2.5e-3, "reducer": "sequence-sum"},
    "vespo": {
        **{"term": gamma_weighted, "reducer": "token-mean"},
        **{"k_positive": 2.0, "lam_positive": 3.0, "k_negative": 3.0, "lam_negative": 2.0},
    },
    "holder": {
        **{"term": holder, "p": 2.0, "clip": "sequence", "clip_low": 0.2, "clip_high": 0.2},
        **{"reducer": "sequence-mean"},
    },
    "pnpo": {
        **{"term": prefix, "surrogate": "rejection", "gradient": "token", "reducer": "token-mean"},
        **{"accept_low": 0.5, "accept_high": 5.0, "clip_low": 0.2, "clip_high": 0.28},
    },
    "dppo": {
        **{"term": trusted, "divergence": "tv", "threshold_low": None, "threshold_high": None},
        **{"ratio_cap": 20.0, "reducer": "token-mean"},
    },
    "dro": {"term": quadratic, "beta": 1.0, "reducer": "token-mean"},
}


def reference(name: str, overrides: Settings, batch: TokenBatch) -> Result:
    """Loss and derivatives of a method on a batch."""
    own = {"of_rewards": group_relative, "returns": False, "whiten": "none", "each": False}
    s = SHARED | own | METHODS[name] | overrides
    if s["reducer"] == "token-mean" and s.get("scope") == "group":
        s["reducer"] = "group-token-mean"
    s["constant"] = s.get("max_length", 1)
    rows = rows_of(batch)
    raw = [row.reward for row in rows]
    if batch.advantage is None:
        set_advantages(batch, rows, raw, s)
    if s["whiten"] == "tokens":
        whiten_tokens(rows)
    dull = [silent(others_of(rows, raw, i)) for i in range(len(rows))]
    if s["each"] and batch.rewards is not None:
        columns = batch.rewards.reshape(len(rows), -1).T.tolist()
        dull = [all(silent(others_of(rows, column, i)) for column in columns) for i in range(len(rows))]
    return assemble(batch, rows, dull, s, row_share)


def set_advantages(batch: TokenBatch, rows: list[Row], raw: list[float], s: Settings) -> None:
    """Give every token its advantage, before any whitening over tokens."""
    if s["returns"]:
        token_returns(rows, raw, s)
        return
    values = decoupled(batch, rows, s) if s["each"] else s["of_rewards"](rows, raw, s)
    for row, a in zip(rows, values, strict=True):
        for t in row.tokens:
            t.advantage = a


def row_share(row: Row, weight: float, s: Settings) -> tuple[float, list[float]]:
    """One row's share of the policy loss, and its derivative by each of the row's log-probs."""
    rho = importance(row, s["importance_weight"], s["importance_cap"], s["log_ratio_clamp"])
    loss, slopes = 0.0, [0.0] * len(row.tokens)
    term: Term = s["term"]
    for k, t in enumerate(row.tokens):
        if left_out(row, t, s):
            continue
        value, by_logp = term(row, k, s)
        loss += weight * rho[k] * value
        slopes = [slope + weight * rho[k] * more for slope, more in zip(slopes, by_logp, strict=True)]
    return loss, slopes
