"""Optimizer updates on one rollout batch: epochs x mini-batches x micro-batches."""

from __future__ import annotations

import statistics as averages
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tepo.core.seeds import stream
from tepo.objectives import Parts, Prepared, Statistics, TokenBatch
from tepo.policy import Policy, TokenSequence
from tepo.training.config import TrainConfig
from tepo.training.critic import Critic
from tepo.training.idle import idle_parts, to_compute
from tepo.training.learner import Learner
from tepo.training.micro import Budget, micro_batches, mini_batches, padded_tokens
from tepo.training.pretraining import PretrainingText
from tepo.training.scoring import FIELDS, score_rows

LAST = ("ratio/mean", "ratio/max", "clip/low", "clip/high", "kl/old", "entropy/change", "mask/kl")
"""Metrics also reported for the last update alone, where the policy is farthest from the old one."""


@dataclass(frozen=True)
class Material:
    """What the updates of one step work on: the prepared rollout batch and the tokens behind its rows."""

    prepared: Prepared
    sequences: Sequence[TokenSequence]
    plan: Sequence[Sequence[Sequence[int]]]
    """Rows of each mini-batch of each epoch."""
    temperature: float
    reference: Policy | None = None
    critic: Critic | None = None
    """Learns from the same updates, where the objective has one."""
    text: PretrainingText | None = None
    """Mixed into the updates, where the objective has a term for it."""
    idle: frozenset[int] = frozenset()
    """Rows that need not be computed, unless an update finds that they can change something after all."""


@dataclass(frozen=True)
class Learned:
    """What came of a step's updates.

    `logp` and `entropy` `[B, T]` are the current policy's values in the last pass in which each row took part, and the
    rollout batch's own for rows that took part in none.
    """

    metrics: dict[str, float]
    trained_tokens: int
    logp: Tensor
    entropy: Tensor | None


def plan(groups: Sequence[int], config: TrainConfig, *, step: int) -> list[list[list[int]]]:
    """Return the rows of each mini-batch of each epoch of a step, given the group of each row.

    Groups are shuffled anew for each epoch, at the address (seed, step, epoch).
    """
    return [
        mini_batches(groups, config.mini_batches, stream(config.seed, "mini-batches", step, epoch).shuffle)
        for epoch in range(config.epochs)
    ]


def make_updates(
    learner: Learner,
    material: Material,
    *,
    budget: Budget,
    progress: Callable[[int, int], None] | None = None,
) -> Learned:
    """Make one optimizer update for each mini-batch of the plan; return their metrics, averaged over the updates."""
    batch = material.prepared.batch
    seen = {"logp": batch.logp.detach().clone()}
    if batch.entropy is not None:
        seen["entropy"] = batch.entropy.detach().clone()
    history: list[dict[str, float]] = []
    every = [rows for epoch in material.plan for rows in epoch]
    trained = 0
    for rows in every:
        history.append(update(learner, material, rows, budget=budget, first=not history, seen=seen))
        trained += sum(len(material.sequences[row].response) for row in rows)
        if progress is not None:
            progress(len(history), len(every))
    return Learned(combine(history), trained, seen["logp"], seen.get("entropy"))


def update(
    learner: Learner,
    material: Material,
    rows: Sequence[int],
    *,
    budget: Budget,
    first: bool,
    seen: dict[str, Tensor] | None = None,
) -> dict[str, float]:
    """Make one optimizer update on a mini-batch and return its metrics.

    `first` says that the policy is still the one that sampled, so that old values stand for current ones.
    `seen` collects the current values of the rows, `[B, T]` arrays by field.
    """
    objective = learner.objective
    index = torch.tensor(rows, device=material.prepared.batch.logp.device)
    mini = material.prepared.batch.take(index)
    fixed = objective.statistics(current_values(learner, material, mini, rows, budget, first), learner.state)
    sequences = [material.sequences[row] for row in rows]
    idle = objective.idle(fixed).tolist() if material.idle else []
    skipped = [place for place, row in enumerate(rows) if row in material.idle and idle[place]]

    def work(tokens: int) -> Parts:
        return accumulate(learner, material, mini, fixed, sequences, tokens, rows, seen, skipped)

    parts = budget.run(work, largest=padded_tokens(sequences, range(len(sequences))))
    metrics = parts.metrics()
    step_metrics = learner.apply_gradients() | (material.critic.learn() if material.critic is not None else {})
    learner.update_state(metrics)
    tuned = {f"state/{name}": float(value.detach()) for name, value in learner.state.items()}
    return metrics | step_metrics | tuned


def accumulate(
    learner: Learner,
    material: Material,
    mini: TokenBatch,
    fixed: Statistics,
    sequences: Sequence[TokenSequence],
    tokens: int,
    rows: Sequence[int] = (),
    seen: dict[str, Tensor] | None = None,
    skipped: Sequence[int] = (),
) -> Parts:
    """Add up the gradient of one mini-batch over micro-batches of at most `tokens` computed tokens.

    The share of every micro-batch is already divided by the mini-batch's denominators, so the split changes nothing.
    Rows in `skipped`, places in the mini-batch, are not computed.
    """
    objective = learner.objective
    computed = to_compute(sequences, skipped)
    critic = material.critic
    for one in (learner, critic):
        if one is not None:
            one.zero_grad()
    total: Parts | None = None
    for part in micro_batches(sequences, computed, tokens, learner.policy.layout):
        chosen = [sequences[row] for row in part]
        scores = learner.policy.score(
            chosen,
            temperature=material.temperature,
            statistics=objective.needs.scores | {"entropy"},
            reference=material.reference if "kl_full" in objective.needs.scores else None,
        )
        fields = {name: value for name in FIELDS if (value := getattr(scores, name)) is not None}
        if critic is not None:
            fields["values"] = critic.values(chosen)
        index = torch.tensor(part, device=mini.logp.device)
        width = scores.logp.shape[1]
        micro = mini.take(index, width).replace(**fields)
        parts = objective.partial(micro, fixed.take(index, width), learner.state)
        parts.loss.backward()  # type: ignore[no-untyped-call]
        parts = Parts(parts.loss.detach(), parts.sums)
        total = parts if total is None else total + parts
        if seen is not None:
            _remember(seen, [rows[row] for row in part], fields)
    assert total is not None
    if len(computed) < len(sequences):
        total += idle_parts(objective, learner.state, mini, fixed, sorted(set(range(len(sequences))) - set(computed)))
    if material.text is not None:
        coef = objective.ptx_coef
        total += material.text.accumulate(learner.policy, coef, update=learner.updates, tokens=tokens)
    return total


def current_values(
    learner: Learner,
    material: Material,
    mini: TokenBatch,
    rows: Sequence[int],
    budget: Budget,
    first: bool,
) -> TokenBatch:
    """Return the mini-batch with the current policy's values where the objective's statistics look at them.

    At the first update those are the old values, which the rollout batch holds; later they take a pass of their own.
    """
    if not learner.objective.needs.mini_statistics or first:
        return mini
    scores = learner.objective.needs.scores
    found = score_rows(
        learner.policy,
        [material.sequences[row] for row in rows],
        rows=[range(len(rows))],
        width=mini.logp.shape[1],
        temperature=material.temperature,
        statistics=scores | {"entropy"},
        budget=budget,
        reference=material.reference if "kl_full" in scores else None,
    )
    return mini.replace(**found)


def combine(history: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return one step's metrics: the mean over its updates, the extreme for `*/max` and `*/min`, and `last/*`."""
    result: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics in history for name in metrics):
        values = [metrics[name] for metrics in history if name in metrics]
        if name.endswith("/max"):
            result[name] = max(values)
        elif name.endswith("/min"):
            result[name] = min(values)
        else:
            result[name] = averages.fmean(values)
    if len(history) > 1:
        result |= {f"last/{name}": history[-1][name] for name in LAST if name in history[-1]}
    result["updates"] = float(len(history))
    return result


def _remember(seen: dict[str, Tensor], rows: Sequence[int], fields: Mapping[str, Tensor]) -> None:
    for name in ("logp", "entropy"):
        value = fields.get(name)
        if value is None:
            continue
        if name not in seen:
            seen[name] = torch.zeros_like(seen["logp"])
        index = torch.tensor(rows, device=value.device)
        seen[name][index, : value.shape[1]] = value.detach().to(seen[name].dtype)
