"""Kept responses of a run as a token batch, and what an objective does to each of their tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tepo.core.errors import InputError
from tepo.core.files import read_lines
from tepo.objectives import KL, EveryToken, Objective, TokenBatch
from tepo.objectives.batch import clean
from tepo.objectives.ratios import TunedRatio

# Token fields of a record that an objective may read, by the same name in the token batch.
RECORDED = (
    *("old_logp", "ref_logp", "rollout_logp", "other_logp", "entropy", "old_entropy", "token_rewards"),
    *("values", "old_values", "sum_p2", "sum_p2_logp", "kl_full"),
)
CLIP_LOW, CLIP_HIGH, CLIP_DUAL, OFF_POLICY, HELD, LEFT_OUT = 1, 2, 4, 8, 16, 32
FLAGS = {
    CLIP_LOW: "clipped below: the ratio fell under the lower bound, no gradient",
    CLIP_HIGH: "clipped above: the ratio rose over the upper bound, no gradient",
    CLIP_DUAL: "clipped at the dual bound of negative advantages",
    OFF_POLICY: "left out: the whole response drifted too far from the sampling policy",
    HELD: "under the mask of a regulariser (in TEPO: advantage > 0 and entropy falling)",
    LEFT_OUT: "not chosen to carry the policy term",
}
"""Bits of `Inspection.flags` and what they say of a token."""


@dataclass(frozen=True, eq=False)
class Inspection:
    """What an objective does to each token of a batch; all `[B, T]`, zero outside the mask.

    `credit`: -d loss / d logp, None where the loss does not depend on the log-probs at all. `entropy_credit`:
    -d loss / d entropy, None where the method does not act through the entropy. `advantage` and `ratio` as the
    policy term reads them, `weight`: the token's share of the policy term's average (they sum to 1 or less),
    `flags`: bits named in `FLAGS`. `loss`: the loss of the batch as one mini-batch.
    """

    credit: Tensor | None
    entropy_credit: Tensor | None
    advantage: Tensor
    ratio: Tensor
    weight: Tensor
    flags: Tensor
    loss: float


def read_step(path: Path) -> list[dict[str, Any]]:
    """Return the kept responses of one step; a line that a crash cut short is left out."""
    return [record for record in read_lines(path) if "token_ids" in record]


def token_batch(records: Sequence[Mapping[str, Any]]) -> TokenBatch:
    """Return kept responses as a float64 token batch, one row a record.

    A token field is there only where every record has it. Rewards that are missing are NaN.
    """
    if not records:
        raise InputError("there is no kept response: runs keep some with log.rollouts above 0")
    width = max(1, *(len(record["token_ids"]) for record in records))
    lengths = torch.tensor([len(record["token_ids"]) for record in records])
    fields = {name: _padded(records, name, width) for name in RECORDED if all(name in record for record in records)}
    if "old_values" in fields:  # a critic's values before the updates; they have no say in the log-probs' credit later
        fields.setdefault("values", fields["old_values"])
    current = next((name for name in ("logp", "old_logp", "rollout_logp") if all(name in one for one in records)), None)
    if current is None:
        raise InputError("the kept responses hold no log-probs (logp, old_logp or rollout_logp)")
    rewards = [math.nan if record.get("reward") is None else float(record["reward"]) for record in records]
    return TokenBatch(
        logp=_padded(records, current, width),
        mask=torch.arange(width)[None, :] < lengths[:, None],
        token_ids=_padded(records, "token_ids", width).long(),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        correct=torch.tensor([bool(record.get("passed")) for record in records]),
        group=torch.tensor([int(record.get("draw", 0)) for record in records]),
        row_id=torch.tensor([int(one.get("draw", 0)) * 2**20 + int(one.get("sample", 0)) for one in records]),
        truncated=torch.tensor([record.get("stop_reason") == "length" for record in records]),
        **fields,
    )


def inspect(objective: Objective, batch: TokenBatch) -> Inspection:
    """Return what the objective, at the start of its state, does to each token of the batch as one mini-batch.

    Raises `InputError` where the batch lacks a field that the objective reads.
    """
    state = objective.init_state()
    acts_through_entropy = "entropy_grad" in objective.needs.scores and batch.entropy is not None
    logp = batch.logp.detach().clone().requires_grad_(True)
    current: dict[str, Tensor] = {"logp": logp}
    if acts_through_entropy and batch.entropy is not None:
        current["entropy"] = batch.entropy.detach().clone().requires_grad_(True)
    prepared = objective.prepare(batch.replace(**current), state)
    statistics = objective.statistics(prepared.batch, state)
    parts = objective.partial(prepared.batch, statistics, state)
    gradients: Sequence[Tensor | None] = (None,) * len(current)
    if parts.loss.requires_grad:
        gradients = torch.autograd.grad(parts.loss, list(current.values()), allow_unused=True)
    found = dict(zip(current, gradients, strict=True))
    credit, entropy_credit = found["logp"], found.get("entropy")
    with torch.no_grad():
        seen = clean(prepared.batch).replace(advantage=statistics.advantage)
        level = objective.ratio.tuned(state) if isinstance(objective.ratio, TunedRatio) else objective.ratio
        ratio = level(seen, objective.log_ratio_clamp)
        surrogate = objective.surrogate(ratio, statistics.advantage, seen)
    weight = statistics.weights["policy"]
    flags = torch.zeros_like(batch.mask, dtype=torch.long)
    for bit, name in ((CLIP_LOW, "clip_low"), (CLIP_HIGH, "clip_high"), (CLIP_DUAL, "clip_dual")):
        clipped = getattr(surrogate, name)
        clipped = getattr(ratio, name, None) if clipped is None else clipped
        flags = flags if clipped is None else flags | (clipped & (weight > 0)).long() * bit
    if surrogate.off_policy is not None:
        flags = flags | surrogate.off_policy.long() * OFF_POLICY
    for part in objective.regularizers:
        if isinstance(part, KL) and not isinstance(part.mask, EveryToken):
            tokens = statistics.weights[part.name] > 0
            flags = flags | (tokens if part.current else tokens & part.tokens(seen)).long() * HELD
    flags = flags | (weight == 0).long() * LEFT_OUT
    denominator = statistics.denominators["policy"].clamp_min(torch.finfo(torch.float32).tiny)
    return Inspection(
        credit=None if credit is None else -credit,
        entropy_credit=None if entropy_credit is None else -entropy_credit,
        advantage=torch.where(batch.mask, statistics.advantage, torch.zeros_like(statistics.advantage)),
        ratio=ratio.value,
        weight=weight / denominator,
        flags=torch.where(batch.mask, flags, torch.zeros_like(flags)),
        loss=float(parts.loss.detach()),
    )


def _padded(records: Sequence[Mapping[str, Any]], name: str, width: int) -> Tensor:
    result = torch.zeros(len(records), width, dtype=torch.float64)
    for row, record in enumerate(records):
        values = record[name]
        if len(values) != len(record["token_ids"]):
            raise InputError(f"a kept response has {len(values)} {name} for {len(record['token_ids'])} tokens")
        result[row, : len(values)] = torch.tensor(values, dtype=torch.float64)
    return result
