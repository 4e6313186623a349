"""Methods that choose, weigh or reward single tokens again, from their formulas, in plain Python.

Like `objectives_reference`, whose rows, reducers, KL and PPO term it shares: derivatives are written out by hand.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from objectives_reference import (
    SHARED,
    Result,
    Row,
    Token,
    advantages,
    bounded,
    importance,
    kl_token,
    left_out,
    others_of,
    ppo,
    rows_of,
    silent,
    token_weights,
)
from reference_relatives import only, plain, token_clip

from tepo.objectives import TokenBatch

Settings = dict[str, Any]
Flags = list[list[bool]]


@dataclass
class Labels:
    """What a response is beside its tokens' log-probs."""

    row_id: int = 0
    correct: bool = False
    words: list[int] = field(default_factory=list)


@dataclass
class Learned(Result):
    """A result with the derivative by a learned scalar."""

    by_lambda: float = 0.0


def labels_of(batch: TokenBatch) -> list[Labels]:
    """Read row ids, verdicts and tokens."""
    masks = batch.mask.tolist()
    ids = batch.row_id.tolist() if batch.row_id is not None else [0] * len(masks)
    correct = batch.correct.tolist() if batch.correct is not None else [False] * len(masks)
    tokens = batch.token_ids.tolist() if batch.token_ids is not None else [[0] * len(mask) for mask in masks]
    return [
        Labels(row_id, verdict, [word for word, used in zip(words, mask, strict=True) if used])
        for row_id, verdict, words, mask in zip(ids, correct, tokens, masks, strict=True)
    ]


def float32(value: float) -> float:
    """The state of a method is held in float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


# --- draws and counts -------------------------------------------------------------------------------------------

WORD = 2**64


def splitmix(state: int) -> int:
    """The splitmix64 output of a state, as a signed number."""
    z = (state + 0x9E3779B97F4A7C15) % WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    z ^= z >> 31
    return z - WORD if z >= WORD // 2 else z


def draw(seed: int, row_id: int, place: int) -> int:
    return splitmix(splitmix(splitmix(seed) + row_id) + place)


def highest(values: dict[tuple[int, int], float], count: int, labels: list[Labels]) -> set[tuple[int, int]]:
    """The `count` keys (row, place) of the largest values; ties by row id, then place."""
    order = sorted(values, key=lambda key: (-values[key], labels[key[0]].row_id, key[1]))
    return set(order[:count])


def used(flags: Flags) -> list[tuple[int, int]]:
    return [(i, k) for i, row in enumerate(flags) for k, use in enumerate(row) if use]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def z_scores(values: list[float]) -> list[float]:
    """(x - mean) / population deviation; equal values give 0."""
    if not values or max(values) - min(values) <= 1e-9 * max(map(abs, values)):
        return [0.0] * len(values)
    middle = mean(values)
    scale = math.sqrt(mean([(x - middle) ** 2 for x in values]))
    return [0.0 if abs(x - middle) < 1e-9 * scale else (x - middle) / scale for x in values]


# --- rewards and advantages -------------------------------------------------------------------------------------


def leave_one_out_of_confidence(rows: list[Row], s: Settings) -> list[float]:
    """EM-RL: R = sum log pi_old or -sum H_old, less a KL; RLOO over the responses that have tokens."""
    rewards = []
    for row in rows:
        kl = s["kl_coef"] * math.fsum(t.old - t.ref for t in row.tokens) if s["kl_coef"] else 0.0
        own = math.fsum(t.old if s["confidence"] == "sequence" else -t.old_entropy for t in row.tokens)
        rewards.append(own - kl if row.tokens else math.nan)
    return advantages(rows, rewards, "leave-one-out", 0.0)


def soft_value(rows: list[Row], s: Settings) -> list[float]:
    """R - tau log mean exp(R / tau)."""
    rewards = [row.reward for row in rows]
    if s["baseline"] == "mean":
        return advantages(rows, rewards, "centred", 0.0)
    result = []
    for i, reward in enumerate(rewards):
        group = others_of(rows, rewards, i)
        tau = s["baseline_temperature"]
        known = not (math.isnan(reward) or silent(group))
        result.append(reward - tau * math.log(mean([math.exp(r / tau) for r in group])) if known else 0.0)
    return result


def shared_out(rows: list[Row], labels: list[Labels], s: Settings) -> None:
    """GTPO and GRPO-S: rewards by entropy, then (r - mean) / std by class; sets the tokens' advantages."""
    for row in rows:
        for t in row.tokens:
            t.advantage = 0.0
    scored = [i for i, row in enumerate(rows) if row.tokens and not math.isnan(row.reward)]
    token_level = s["level"] == "token"
    members: dict[Any, list[tuple[int, int]]] = {}
    rewards: dict[tuple[int, int], float] = {}
    for group, right in {(rows[i].group, labels[i].correct) for i in scored}:
        own = [i for i in scored if (rows[i].group, labels[i].correct) == (group, right)]

        def claim(h: float, right: bool = right) -> float:
            return max(h, 1e-8) if right else 1 / max(h, 1e-8)

        def signed(part: float, right: bool = right) -> float:
            # Within a class the base is a constant, which the mean takes away; left out, it costs no digits.
            size = s["reward_bonus"] * part + (s["reward_base"] if s["normalize"] == "group" else 0.0)
            return size if right else -size

        places = range(max(len(rows[i].tokens) for i in own)) if token_level else [0]
        for k in places:
            here = [i for i in own if len(rows[i].tokens) > k]
            h = [
                rows[i].tokens[k].old_entropy if token_level else mean([t.old_entropy for t in rows[i].tokens])
                for i in here
            ]
            total = math.fsum(claim(x) for x in h)
            for i, x in zip(here, h, strict=True):
                rewards[i, k] = signed(len(here) * claim(x) / total)
                members.setdefault(group if s["normalize"] == "group" else (group, right), []).append((i, k))
    for keys in members.values():
        for (i, k), a in zip(keys, z_scores([rewards[key] for key in keys]), strict=True):
            if token_level:
                rows[i].tokens[k].advantage = a
            else:
                for t in rows[i].tokens:
                    t.advantage = a


def branching(rows: list[Row], labels: list[Labels]) -> None:
    """T-SPMO: mean reward of those that share the tokens up to here, less that of those that share the ones before."""
    for i, row in enumerate(rows):
        for k, t in enumerate(row.tokens):
            t.advantage = 0.0
            if math.isnan(row.reward):
                continue
            kin = [j for j, other in enumerate(rows) if other.group == row.group and not math.isnan(other.reward)]
            before = [j for j in kin if labels[j].words[:k] == labels[i].words[:k]]
            after = [j for j in before if labels[j].words[: k + 1] == labels[i].words[: k + 1]]
            before = [j for j in before if len(labels[j].words) >= k]
            value = mean([rows[j].reward for j in after]) - mean([rows[j].reward for j in before])
            if len(after) < len(before) and abs(value) > 1e-9:
                t.advantage = value


def entropy_bonus(rows: list[Row], s: Settings) -> None:
    for row in rows:
        for t in row.tokens:
            h = t.entropy if s["entropy"] == "current" else t.old_entropy
            t.advantage += min(s["alpha"] * h, abs(t.advantage) / s["kappa"])


def progress_gate(rows: list[Row], s: Settings) -> None:
    """ERPO: A + eta sigmoid(gamma z(H)) sgn(A) z_bucket(log pi_old - log pi_ref), never across 0."""
    for group in {row.group for row in rows}:
        tokens = [(row, k, t) for row in rows if row.group == group for k, t in enumerate(row.tokens)]
        gates = z_scores([t.old_entropy for _, _, t in tokens])
        stretches: dict[int, list[int]] = {}
        for n, (row, k, _) in enumerate(tokens):
            stretches.setdefault(k * s["buckets"] // len(row.tokens), []).append(n)
        signal = [0.0] * len(tokens)
        for inside in stretches.values():
            for n, z in zip(inside, z_scores([tokens[n][2].old - tokens[n][2].ref for n in inside]), strict=True):
                signal[n] = z / (1 + math.exp(-s["gate"] * gates[n]))
        for (_, _, t), x in zip(tokens, signal, strict=True):
            shaped = t.advantage + s["progress"] * math.copysign(1.0, t.advantage) * x
            t.advantage = shaped if shaped * t.advantage > 0 else 0.0


# --- statistics of the mini-batch -------------------------------------------------------------------------------


def covariances(rows: list[Row], keys: list[tuple[int, int]]) -> dict[tuple[int, int], float]:
    tokens = {key: rows[key[0]].tokens[key[1]] for key in keys}
    if not tokens:
        return {}
    a, p = mean([t.advantage for t in tokens.values()]), mean([t.logp for t in tokens.values()])
    return {key: (t.advantage - a) * (t.logp - p) for key, t in tokens.items()}


def kernel(rows: list[Row], keys: list[tuple[int, int]], s: Settings) -> None:
    """CW-GRPO: A <- A N w / sum w, w = exp(-c^2 / 2 sigma^2)."""
    sets = [keys]
    if s["scope"] == "group":
        sets = [[key for key in keys if rows[key[0]].group == group] for group in {row.group for row in rows}]
    for inside in sets:
        c = covariances(rows, inside)
        if not c:
            continue
        middle = mean(list(c.values()))
        divisor = len(c) - (s["deviation"] == "sample") or 1
        sigma = math.sqrt(math.fsum((x - middle) ** 2 for x in c.values()) / divisor)
        if sigma <= 1e-7 * max(map(abs, c.values())):
            continue
        w = {key: math.exp(-(x**2) / (2 * (sigma * s["bandwidth"]) ** 2)) for key, x in c.items()}
        total = math.fsum(w.values())
        for (i, k), x in w.items():
            rows[i].tokens[k].advantage *= len(w) * x / total


def change_weights(rows: list[Row], keys: list[tuple[int, int]], s: Settings) -> None:
    """STEER: A <- w(|Omega|) A."""

    def omega(t: Token) -> float:
        p, old = min(max(math.exp(t.logp), 1e-8), 1 - 1e-8), min(max(math.exp(t.old), 1e-8), 1.0)
        return abs(t.advantage / old * p * (1 - p) * (math.log(p) + t.entropy))

    change = {key: omega(rows[key[0]].tokens[key[1]]) for key in keys}
    if not change:
        return
    low, high = min(change.values()), max(change.values())
    for (i, k), x in change.items():
        if s["weight_map"] == "exponential":
            w = math.exp(math.log(s["weight_low"]) * x / max(high, 0.02))
        elif high > low:
            w = s["weight_high"] - (s["weight_high"] - s["weight_low"]) * (x - low) / (high - low)
        else:
            w = (s["weight_high"] + s["weight_low"]) / 2
        rows[i].tokens[k].advantage *= w


# --- which tokens -----------------------------------------------------------------------------------------------


def random_subset(rows: list[Row], labels: list[Labels], s: Settings) -> Flags:
    """S-GRPO: the first `always`, then each with `probability`, at most `most`."""
    flags = []
    for row, label in zip(rows, labels, strict=True):
        chosen: list[bool] = []
        for k in range(len(row.tokens)):
            chance = (draw(s["seed"], label.row_id, k) % WORD) >> 40
            wanted = k < s["always"] or chance < round(s["probability"] * 2**24)
            chosen.append(wanted and (s["most"] is None or sum(chosen) < s["most"]))
        flags.append(chosen)
    return flags


def let_go(rows: list[Row], labels: list[Labels], keys: list[tuple[int, int]], s: Settings) -> set[tuple[int, int]]:
    """Clip-Cov: max(1, floor(f N)) random tokens of the band that PPO has not clipped."""
    band = {}
    for key, c in covariances(rows, keys).items():
        t = rows[key[0]].tokens[key[1]]
        r = math.exp(bounded(t.logp - t.old, s["log_ratio_clamp"])[0])
        clipped = (t.advantage > 0 and r > 1 + s["clip_high"]) or (t.advantage < 0 and r < 1 - s["clip_low"])
        if s["covariance_low"] < c < s["covariance_high"] and not clipped:
            band[key] = float(draw(s["seed"], labels[key[0]].row_id, key[1]))
    return highest(band, max(1, math.floor(s["clip_fraction"] * len(keys) + 1e-9)), labels)


def undecided(rows: list[Row], labels: list[Labels], keys: list[tuple[int, int]], s: Settings) -> set[tuple[int, int]]:
    """80/20: the ceil(f N) tokens of highest entropy, or those at or above the quantile."""
    h = {key: rows[key[0]].tokens[key[1]].entropy for key in keys}
    if s["rule"] == "top-k":
        return highest(h, max(1, math.ceil(s["entropy_fraction"] * len(keys) - 1e-9)), labels)
    if not h:
        return set()
    ordered, place = sorted(h.values()), (1 - s["entropy_fraction"]) * (len(h) - 1)
    below, above = ordered[math.floor(place)], ordered[min(math.floor(place) + 1, len(h) - 1)]
    border = below + (above - below) * (place - math.floor(place))
    return {key for key, x in h.items() if x >= border - 1e-12}


def representatives(rows: list[Row], labels: list[Labels], keys: list[tuple[int, int]]) -> set[tuple[int, int]]:
    """T-SPMO: of the responses that share a prefix with credit, the one with the smallest row id."""
    first: dict[Any, tuple[int, tuple[int, int]]] = {}
    for i, k in keys:
        if rows[i].tokens[k].advantage != 0:
            node = (rows[i].group, tuple(labels[i].words[: k + 1]))
            first[node] = min(first.get(node, (labels[i].row_id, (i, k))), (labels[i].row_id, (i, k)))
    return {key for _, key in first.values()}


# --- terms ------------------------------------------------------------------------------------------------------


def unclipped(row: Row, k: int, s: Settings) -> tuple[float, list[float]]:
    t = row.tokens[k]
    log, inside = bounded(t.logp - t.old, s["log_ratio_clamp"])
    return -t.advantage * math.exp(log), only(len(row.tokens), k, -t.advantage * math.exp(log) * inside)


def arithmetic(row: Row, k: int, s: Settings) -> tuple[float, list[float]]:
    """GRPO-S: the mean of the token ratios."""
    n = len(row.tokens)
    ratios = [math.exp(t.logp - t.old) for t in row.tokens]
    log, inside = bounded(math.log(math.fsum(ratios) / n), s["log_ratio_clamp"])
    value, by_r = ppo(row.tokens[k].advantage, math.exp(log), s["clip_low"], s["clip_high"], s["clip_dual"])
    total = math.fsum(ratios)
    return value, [by_r * math.exp(log) * inside * r / total for r in ratios]


def preference(rows: list[Row], s: Settings) -> list[tuple[float, float]]:
    """lambda-GRPO: f_i = G softmax(h^lambda), and its derivative by lambda."""
    result = []
    lam = float32(s["length_preference"])
    for row in rows:
        lengths = [len(other.tokens) for other in rows if other.group == row.group and other.tokens]
        if not row.tokens:
            result.append((1.0, 0.0))
            continue
        middle = mean([float(n) for n in lengths])
        sigma = math.sqrt(mean([(n - middle) ** 2 for n in lengths]))
        h = {n: max(1e-6, 1 + s["length_scale"] * ((n - middle) / sigma if sigma else 0.0)) for n in lengths}
        g = {n: x**lam for n, x in h.items()}
        slope = {n: g[n] * math.log(h[n]) for n in lengths}
        total = math.fsum(math.exp(g[n]) for n in lengths)
        f = len(lengths) * math.exp(g[len(row.tokens)]) / total
        average = math.fsum(math.exp(g[n]) * slope[n] for n in lengths) / total
        result.append((f, f * (slope[len(row.tokens)] - average)))
    return result


# --- the methods ------------------------------------------------------------------------------------------------

Term = Callable[[Row, int, Settings], tuple[float, list[float]]]
DAPO = {"term": token_clip, "clip_low": 0.2, "clip_high": 0.28, "reducer": "token-mean"}
GRPO = {"term": token_clip, "clip_low": 0.2, "clip_high": 0.2, "reducer": "sequence-mean"}
COVARIANCE = {"reducer": "token-mean", "seed": 0}
EM_RL = {"term": plain, "ratio": "none", "clip_low": 0.2, "clip_high": 0.2, "reducer": "sequence-sum", "kl_coef": 1e-3}
METHODS: dict[str, Settings] = {
    "clip-cov": COVARIANCE
    | {"term": token_clip, "clip_low": 1.0, "clip_high": 1.0, "clip_fraction": 2e-4}
    | {"covariance_low": 1.0, "covariance_high": 5.0},
    "kl-cov": COVARIANCE
    | {"term": unclipped, "kl_coef": 1.0, "kl_fraction": 2e-3, "kl_estimator": "abs", "kl_target": "old"},
    "steer": DAPO | {"clip_dual": 10.0, "weight_map": "exponential", "weight_low": 0.8, "weight_high": 1.2},
    "high-entropy": DAPO | {"clip_dual": 10.0, "entropy_fraction": 0.2, "rule": "top-k", "denominator": "selected"},
    "entropy-advantage": DAPO | {"alpha": 0.4, "kappa": 2.0, "entropy": "old"},
    "cw-grpo": GRPO | {"scope": "mini", "deviation": "population", "bandwidth": 1.0},
    "gtpo": DAPO | {"level": "token", "reward_base": 1.0, "reward_bonus": 0.1, "normalize": "class"},
    "grpo-s": DAPO
    | {"level": "sequence", "reward_base": 1.0, "reward_bonus": 0.1, "normalize": "class"}
    | {"term": arithmetic, "reducer": "sequence-mean"},
    "erpo": DAPO | {"gate": 5.0, "progress": 0.2, "buckets": 10},
    "lambda-grpo": DAPO | {"length_preference": 0.0, "learn": True, "length_scale": 1 / 9},
    "s-grpo": GRPO | {"probability": 0.4, "always": 0, "most": None, "seed": 0},
    "t-spmo": {"term": unclipped, "reducer": "token-mean"},
    "max-entropy": DAPO
    | {"temperature": 1e-3, "target_entropy": 0.3, "tuning": "dual", "temperature_rate": 0.1, "temperature_max": 0.1}
    | {"baseline": "soft", "baseline_temperature": 1.0},
    "em-rl-sequence": EM_RL | {"confidence": "sequence"},
    "em-rl-token": EM_RL | {"confidence": "token"},
    "em-ft": {"term": None, "reducer": "token-mean"},
}


def reference(name: str, overrides: Settings, batch: TokenBatch) -> Learned:
    """Loss and derivatives of a method on a batch."""
    s = SHARED | METHODS[name] | overrides
    if s.get("ratio") == "token":
        s["term"] = token_clip
    rows, labels = rows_of(batch), labels_of(batch)
    dull = set_advantages(name, batch, rows, labels, s)
    kept = [
        not (s["truncated"] == "drop" and row.truncated) and not (s["zero_variance"] == "drop" and silence)
        for row, silence in zip(rows, dull, strict=True)
    ]
    whole: Flags = [[keep] * len(row.tokens) for keep, row in zip(kept, rows, strict=True)]
    if name == "s-grpo":
        subset = random_subset(rows, labels, s)
        whole = [[a and b for a, b in zip(one, two, strict=True)] for one, two in zip(whole, subset, strict=True)]
    keys = used(whole)
    if name == "entropy-advantage" and s["entropy"] == "current":
        entropy_bonus([Row([rows[i].tokens[k]], 0, 0, False) for i, k in keys], s)
    if name == "cw-grpo":
        kernel(rows, keys, s)
    if name == "steer":
        change_weights(rows, keys, s)
    policy, counted, held = set(keys), whole, set(keys)
    if name == "clip-cov":
        policy -= let_go(rows, labels, keys, s)
    if name == "high-entropy":
        policy = undecided(rows, labels, keys, s)
    if name == "t-spmo":
        policy = representatives(rows, labels, keys)
    if name == "kl-cov":
        count = max(1, math.floor(s["kl_fraction"] * len(keys) + 1e-9))
        held = highest(covariances(rows, keys), count, labels)
    if s.get("denominator") == "selected" or name == "t-spmo":
        counted = [[(i, k) in policy for k in range(len(row.tokens))] for i, row in enumerate(rows)]
    return add_up(name, batch, rows, s, Parts(policy, counted, set(keys), whole, held))


@dataclass
class Parts:
    """Which tokens carry the policy term, divide it, carry the other terms, divide those, and are held by the KL."""

    policy: set[tuple[int, int]]
    policy_counted: Flags
    whole: set[tuple[int, int]]
    whole_counted: Flags
    held: set[tuple[int, int]]


def set_advantages(name: str, batch: TokenBatch, rows: list[Row], labels: list[Labels], s: Settings) -> list[bool]:
    """Give every token its advantage of the rollout batch; return the rows whose group says nothing."""
    raw = [row.reward for row in rows]
    dull = [silent(others_of(rows, raw, i)) for i in range(len(rows))]
    if batch.advantage is None:
        if name in ("gtpo", "grpo-s"):
            shared_out(rows, labels, s)
        elif name == "t-spmo":
            branching(rows, labels)
        else:
            for row, a in zip(rows, of_responses(name, rows, s), strict=True):
                for t in row.tokens:
                    t.advantage = a
    made = batch.advantage is None and ("confidence" in s or name == "grpo-s")
    if made:  # these make rewards of their own, by which a group is judged
        dull = judged(rows, labels, s)
    if name == "entropy-advantage" and s["entropy"] == "old":
        entropy_bonus(rows, s)
    if name == "erpo":
        progress_gate(rows, s)
    return dull


def of_responses(name: str, rows: list[Row], s: Settings) -> list[float]:
    """One advantage a response."""
    if "confidence" in s:
        return leave_one_out_of_confidence(rows, s)
    if name == "max-entropy":
        return soft_value(rows, s)
    if name == "em-ft":
        return [0.0] * len(rows)
    return advantages(rows, [row.reward for row in rows], "normalized", s["advantage_eps"])


def judged(rows: list[Row], labels: list[Labels], s: Settings) -> list[bool]:
    """Whether the made rewards of a row's group are all equal."""
    own: list[float] = []
    for i, row in enumerate(rows):
        if not row.tokens or ("level" in s and math.isnan(row.reward)):
            own.append(math.nan)
        elif "confidence" in s:
            own.append(math.fsum(t.old if s["confidence"] == "sequence" else -t.old_entropy for t in row.tokens))
        else:
            kin = [
                j
                for j, other in enumerate(rows)
                if other.tokens and not math.isnan(other.reward) and other.group == row.group
                if labels[j].correct == labels[i].correct
            ]
            power = 1 if labels[i].correct else -1
            h = [max(1e-8, mean([t.old_entropy for t in rows[j].tokens])) ** power for j in kin]
            base = s["reward_base"] if s["normalize"] == "group" else 0.0
            own.append(power * (base + s["reward_bonus"] * len(kin) * h[kin.index(i)] / math.fsum(h)))
    return [silent(others_of(rows, own, i)) for i in range(len(rows))]


def add_up(name: str, batch: TokenBatch, rows: list[Row], s: Settings, parts: Parts) -> Learned:
    height, width = batch.mask.shape
    result = Learned(0.0, *([[0.0] * width for _ in range(height)] for _ in range(3)))
    policy = token_weights(rows, parts.policy_counted, s["reducer"], s["empty_rows"], s["constant"])
    whole = token_weights(rows, parts.whole_counted, s["reducer"], s["empty_rows"], s["constant"])
    factors = preference(rows, s) if name == "lambda-grpo" else [(1.0, 0.0)] * len(rows)
    bonus = s["entropy_coef"]
    if name == "max-entropy" and s["tuning"] != "steps":  # steps: no bonus before a first measurement
        bonus += float32(s["temperature"])
    for i, row in enumerate(rows):
        rho = importance(row, s["importance_weight"], s["importance_cap"], s["log_ratio_clamp"])
        for k, t in enumerate(row.tokens):
            scale = policy[i] * rho[k]
            carried = (i, k) in parts.policy and not left_out(row, t, s)
            if name == "em-ft" and carried:
                result.loss += scale * t.entropy
                result.by_entropy[i][t.column] += scale
            elif carried:
                value, by_logp = s["term"](row, k, s)
                result.loss += scale * factors[i][0] * value
                result.by_lambda += scale * factors[i][1] * value
                for u, slope in zip(row.tokens, by_logp, strict=True):
                    result.by_logp[i][u.column] += scale * factors[i][0] * slope
            if bonus and (i, k) in parts.whole:
                result.loss -= bonus * whole[i] * t.entropy
                result.by_entropy[i][t.column] -= bonus * whole[i]
            if s["kl_coef"] and "confidence" not in s and (i, k) in parts.held:
                value, slope, by_kl = kl_token(t, s)
                result.loss += s["kl_coef"] * whole[i] * value
                result.by_logp[i][t.column] += s["kl_coef"] * whole[i] * slope
                result.by_kl[i][t.column] += s["kl_coef"] * whole[i] * by_kl
    return result
