"""Before a run: does the start policy get a signal, does it fit, how long will it take."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tepo.training.config import RunConfig
from tepo.training.critic import Critic
from tepo.training.experience import Group, Sampler, token_batch
from tepo.training.learner import Learner, ModelLearner
from tepo.training.metrics import memory_metrics
from tepo.training.micro import Budget
from tepo.training.pretraining import PretrainingText
from tepo.training.setup import Setup
from tepo.training.update import Material, accumulate

PURPOSE = "preflight"
"""Purpose of the draws, apart from those of the run: a pre-flight changes nothing in it."""
QUESTIONS = 16
"""Questions of a pre-flight that was asked for where the configuration has none."""


@dataclass(frozen=True)
class Preflight:
    """What the pre-flight found; seconds and memory are estimates of this machine."""

    questions: int
    responses: int
    pass_rate: float
    """Fraction of responses with a full score."""
    signal: float
    """Fraction of groups with unequal rewards: for 0/1 rewards an unbiased estimate of 1 - p^G - (1 - p)^G."""
    mean_length: float
    """Tokens of a response."""
    truncated: float
    """Fraction of responses cut at the length limit."""
    step_seconds: float
    run_seconds: float
    memory_mb: float
    """Estimated peak of the process."""
    checkpoint_mb: float
    """Size of one checkpoint."""
    disk_free_mb: float
    warnings: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the report, one line a finding."""
        return [
            f"pre-flight: {self.questions} questions, {self.responses} responses: "
            f"pass rate {self.pass_rate:.1%}, groups with signal {self.signal:.0%}, "
            f"mean length {self.mean_length:.0f} tokens, truncated {self.truncated:.0%}",
            f"estimate: {self.step_seconds:.1f} s a step, {duration(self.run_seconds)} in all without evaluations, "
            f"{self.memory_mb / 1024:.1f} GiB of memory, {self.checkpoint_mb / 1024:.2f} GiB a checkpoint",
            *(f"warning: {text}" for text in self.warnings),
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the findings as plain values."""
        return asdict(self)


def preflight(sampler: Sampler, setup: Setup) -> Preflight:
    """Sample the start policy on a few training questions and time one forward and backward pass.

    Nothing is written and neither weights nor the run's draws change.
    """
    config = setup.config
    start = time.perf_counter()
    draws = range(min(config.train.preflight or QUESTIONS, _distinct(sampler)))
    groups = sampler.groups(draws, PURPOSE)
    sampling = (time.perf_counter() - start) / max(1, len(groups)) * config.train.prompts
    responses = [response for group in groups for response in group.responses]
    training = _train_seconds(setup.learner, setup.critic, config, groups, setup.text)
    if setup.partner is not None:
        training += _train_seconds(setup.partner, None, config, groups)
    truncated = statistics.fmean(response.stop_reason == "length" for response in responses)
    pass_rate = statistics.fmean(grade.passed for group in groups for grade in group.grades)
    signal = statistics.fmean(group.has_signal for group in groups)
    step = sampling * _draws_per_kept(config, signal) + training
    weights = sum(_bytes(learner) for learner in setup.learners)
    free = shutil.disk_usage(_existing(setup.folder.path)).free
    memory = memory_metrics(setup.policy.device)
    return Preflight(
        questions=len(groups),
        responses=len(responses),
        pass_rate=pass_rate,
        signal=signal,
        mean_length=statistics.fmean(len(response.token_ids) for response in responses),
        truncated=truncated,
        step_seconds=step,
        run_seconds=step * config.train.steps,
        # AdamW's two moments are allocated at the first update, after this measurement.
        memory_mb=memory.get("memory/device_mb", memory.get("memory/peak_mb", 0.0)) + 2 * weights / 2**20,
        checkpoint_mb=3 * weights / 2**20,
        disk_free_mb=free / 2**20,
        warnings=tuple(_warnings(config, groups, truncated, 3 * weights, free)),
    )


def duration(seconds: float) -> str:
    """Return seconds in words: `45 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def _train_seconds(
    learner: Learner,
    critic: Critic | None,
    config: RunConfig,
    groups: Sequence[Group],
    text: PretrainingText | None = None,
) -> float:
    """Time one accumulated gradient over a few groups and return the seconds of a step's scoring and updates."""
    few = list(groups[: max(1, config.train.prompts // config.train.mini_batches)])
    batch = token_batch(few, learner.policy.device)
    # Old and reference values are stand-ins: the time does not depend on them.
    stand_in = {"old_logp": batch.logp, "ref_logp": batch.logp, "old_entropy": batch.entropy}
    others = ("sum_p2", "sum_p2_logp", "kl_full", "values", "old_values", "other_logp")
    batch = batch.replace(**stand_in, **dict.fromkeys(others, batch.logp))
    sequences = [sequence for group in few for sequence in _sequences(group)]
    # The policy itself is as slow as its reference.
    reference = learner.policy if "kl_full" in learner.objective.needs.scores else None
    prepared = learner.objective.prepare(batch, learner.state)
    material = Material(prepared, sequences, (), config.sampling.temperature, reference, critic, text)
    fixed = learner.objective.statistics(prepared.batch, learner.state)
    budget = Budget(config.train.micro_tokens, "train.micro_tokens", lambda text: None)
    start = time.perf_counter()
    largest = len(sequences) * max(map(len, sequences))
    budget.run(lambda tokens: accumulate(learner, material, prepared.batch, fixed, sequences, tokens), largest=largest)
    if learner.policy.device.type == "cuda":
        torch.cuda.synchronize(learner.policy.device)
    seconds = time.perf_counter() - start
    for one in (learner, critic):
        if one is not None:
            one.zero_grad()
    one_epoch = seconds * config.train.prompts / len(few)
    scoring = one_epoch / 3 if config.train.updates > 1 else 0.0
    passes = 1 + learner.objective.needs.reference + (critic is not None)
    return one_epoch * config.train.epochs + scoring * passes


def _sequences(group: Group) -> list[Any]:
    from tepo.policy import TokenSequence

    return [TokenSequence(response.prompt_ids, response.token_ids) for response in group.responses]


def _draws_per_kept(config: RunConfig, signal: float) -> float:
    if not config.train.dynamic_sampling:
        return 1.0
    return min(config.train.max_draws, 1 / signal if signal > 0 else config.train.max_draws)


def _warnings(
    config: RunConfig, groups: Sequence[Group], truncated: float, checkpoint: float, free: float
) -> list[str]:
    found = []
    grades = [grade for group in groups for grade in group.grades]
    pass_rate = statistics.fmean(grade.passed for grade in grades)
    if all(grade.score is None for grade in grades):
        found.append(
            f"no reward: none of {len(grades)} responses could be scored; can the reward judge these problems?"
        )
    elif not any(group.has_signal for group in groups):
        found.append(
            "no group had rewards that differ, so there is nothing to learn from: "
            + ("the task is too hard, or answers are not recognised" if pass_rate == 0 else "the task is too easy")
        )
    if truncated > 0.5:
        found.append(f"{truncated:.0%} of the responses were cut at sampling.max_tokens = {config.sampling.max_tokens}")
    needed = checkpoint * (config.checkpoint.keep_last + 1 + (config.checkpoint.best is not None))
    if free < needed:
        found.append(f"{free / 2**30:.1f} GiB free on disk, checkpoints may need {needed / 2**30:.1f} GiB")
    return found


def _bytes(learner: ModelLearner) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in learner.weight_tensors().values())


def _distinct(sampler: Sampler) -> int:
    size = sampler.task.train.size
    return size if size is not None else 2**62


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.absolute().parent
    return path
