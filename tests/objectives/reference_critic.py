"""Actor-critic methods again, from their formulas, in plain Python: values and gradients by hand, no autograd.

Covers `ppo`, `instructgpt` and `tulu3-rlvr` with all their own settings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tepo.objectives import TokenBatch

PPO = {
    **{"clip_low": 0.2, "clip_high": 0.2, "clip_dual": None, "gamma": 1.0, "lam": 0.95, "whiten": True},
    **{"value_clip": 0.2, "value_coef": 0.1, "entropy_coef": 0.0, "truncated": "keep", "log_ratio_clamp": 20.0},
}
METHODS: dict[str, dict[str, Any]] = {
    "ppo": PPO,
    "instructgpt": PPO | {"kl_coef": 0.02, "reward_clip": None, "kl_adapt_to": None},
    "tulu3-rlvr": PPO | {"kl_coef": 0.05, "verified_reward": 10.0, "missing_eos": -10.0},
}


@dataclass
class Step:
    """One response token with everything the formulas ask for."""

    row: int
    column: int
    fields: dict[str, float]
    reward: float = 0.0
    advantage: float = 0.0
    target: float = 0.0

    def __getitem__(self, name: str) -> float:
        return self.fields[name]


@dataclass
class Result:
    """Loss; its derivative by logp, values and entropy, `[B][T]`."""

    loss: float
    by_logp: list[list[float]]
    by_values: list[list[float]]
    by_entropy: list[list[float]]


def reference(name: str, overrides: dict[str, Any], batch: TokenBatch) -> Result:
    """Loss and derivatives of a method on a batch."""
    s = METHODS[name] | overrides
    rows = read(batch)
    assert batch.rewards is not None
    for i, row in enumerate(rows):
        score = score_of(name, i, batch, s)
        episode(row, score, s)
    if batch.advantage is not None:
        given = batch.advantage.tolist()
        for row in rows:
            for step in row:
                step.advantage = given[step.row][step.column]
                step.target = step.advantage + step["old_values"]
    if s["whiten"]:
        whiten([step for i, row in enumerate(rows) if score_of(name, i, batch, s) is not None for step in row])
    cut = batch.truncated.tolist() if s["truncated"] == "drop" and batch.truncated is not None else [False] * len(rows)
    steps = [step for row, dropped in zip(rows, cut, strict=True) if not dropped for step in row]
    height, width = batch.mask.shape
    result = Result(0.0, *([[0.0] * width for _ in range(height)] for _ in range(3)))
    for step in steps:
        loss, by_logp = policy(step, s)
        value, by_value = critic(step, s)
        n = len(steps)
        result.loss += (loss + s["value_coef"] * value) / n
        result.by_logp[step.row][step.column] = by_logp / n
        result.by_values[step.row][step.column] = s["value_coef"] * by_value / n
        if s["entropy_coef"]:
            result.loss -= s["entropy_coef"] * step["entropy"] / n
            result.by_entropy[step.row][step.column] = -s["entropy_coef"] / n
    return result


def read(batch: TokenBatch) -> list[list[Step]]:
    """Read the response tokens of a batch into plain Python."""
    names = ("logp", "old_logp", "ref_logp", "entropy", "values", "old_values", "token_rewards")
    columns = {name: value.detach().tolist() for name in names if (value := getattr(batch, name)) is not None}
    columns.setdefault("old_logp", columns["logp"])
    return [
        [Step(i, t, {name: value[i][t] for name, value in columns.items()}) for t, used in enumerate(mask) if used]
        for i, mask in enumerate(batch.mask.tolist())
    ]


def score_of(name: str, row: int, batch: TokenBatch, s: dict[str, Any]) -> float | None:
    """The reward of a whole response, as the method makes it of the task's; None where nothing can score it."""
    assert batch.rewards is not None
    raw: Any = batch.rewards[row].tolist()
    known = [part for part in (raw if isinstance(raw, list) else [raw]) if not math.isnan(part)]
    score = math.fsum(known) if known else None
    if name == "tulu3-rlvr":
        assert batch.correct is not None
        if score is not None:
            score = s["verified_reward"] if bool(batch.correct[row]) else 0.0
        if s["missing_eos"] is not None and score is not None:
            assert batch.truncated is not None
            score = s["missing_eos"] if bool(batch.truncated[row]) else score
    elif s.get("reward_clip") is not None and score is not None:
        score = max(-s["reward_clip"], min(s["reward_clip"], score))
    return score


def episode(row: list[Step], score: float | None, s: dict[str, Any]) -> None:
    """GAE written as its sum: A_t = sum_k (gamma lam)^k (r_{t+k} + gamma V_{t+k+1} - V_{t+k})."""
    for k, step in enumerate(row):
        last = k == len(row) - 1
        kl = s.get("kl_coef", 0.0) * (step["old_logp"] - step["ref_logp"]) if s.get("kl_coef") else 0.0
        step.reward = step.fields.get("token_rewards", 0.0) - kl + ((score or 0.0) if last else 0.0)
    errors = [
        step.reward + (s["gamma"] * row[k + 1]["old_values"] if k + 1 < len(row) else 0.0) - step["old_values"]
        for k, step in enumerate(row)
    ]
    for k, step in enumerate(row):
        rate = s["gamma"] * s["lam"]
        step.advantage = math.fsum(rate**j * error for j, error in enumerate(errors[k:])) if score is not None else 0.0
        step.target = step.advantage + step["old_values"]


def whiten(steps: list[Step]) -> None:
    """(A - mean) / sqrt(sample variance + 1e-8) over tokens; nothing where they all agree."""
    values = [step.advantage for step in steps]
    if len(values) < 2 or max(values) - min(values) <= 1e-6 * max(map(abs, values)):
        for step in steps:
            step.advantage = 0.0
        return
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    for step in steps:
        step.advantage = (step.advantage - mean) / math.sqrt(variance + 1e-8)


def policy(step: Step, s: dict[str, Any]) -> tuple[float, float]:
    """-min(r A, clip(r) A), dually clipped, and its derivative by logp."""
    a, d = step.advantage, step["logp"] - step["old_logp"]
    if abs(d) > s["log_ratio_clamp"]:
        d, inside = math.copysign(s["log_ratio_clamp"], d), 0.0
    else:
        inside = 1.0
    r = math.exp(d)
    plain, clipped = -a * r, -a * min(max(r, 1 - s["clip_low"]), 1 + s["clip_high"])
    if s["clip_dual"] is not None and a < 0 and max(plain, clipped) > -s["clip_dual"] * a:
        return -s["clip_dual"] * a, 0.0
    return (plain, -a * r * inside) if plain >= clipped else (clipped, 0.0)


def critic(step: Step, s: dict[str, Any]) -> tuple[float, float]:
    """0.5 max((v - R)^2, (clip(v) - R)^2), and its derivative by v."""
    v, old, target = step["values"], step["old_values"], step.target
    plain = (v - target) ** 2
    if s["value_clip"] is None:
        return 0.5 * plain, v - target
    near = abs(v - old) <= s["value_clip"]
    bounded = v if near else old + math.copysign(s["value_clip"], v - old)
    clipped = (bounded - target) ** 2
    return (0.5 * plain, v - target) if plain >= clipped else (0.5 * clipped, 0.0)
