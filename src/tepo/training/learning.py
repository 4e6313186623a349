"""From a rollout batch to a changed policy: old and reference values, preparation, updates, and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tepo.core.errors import InputError, WorkError
from tepo.objectives import TokenBatch
from tepo.objectives.batch import check_finite
from tepo.policy import Policy, TokenSequence
from tepo.training.clock import Clock
from tepo.training.config import RunConfig
from tepo.training.critic import Critic
from tepo.training.experience import Experience, old_values_from_scorer, score_old, token_batch
from tepo.training.idle import apart, computed_rows, idle_rows
from tepo.training.learner import Learner
from tepo.training.metrics import mismatch_metrics
from tepo.training.micro import Budget
from tepo.training.pretraining import PretrainingText
from tepo.training.scoring import score_rows
from tepo.training.update import Learned, Material, make_updates, plan


@dataclass(frozen=True)
class Lesson:
    """What a step taught: the prepared rollout batch, what came of its updates, and the metrics of both."""

    batch: TokenBatch
    learned: Learned
    metrics: dict[str, Any]


@dataclass(frozen=True)
class Teacher:
    """Makes the updates of the policy, and of its critic where there is one, from rollout batches.

    `other` is a second policy whose view of the responses the objective asks for. `foreign`: the responses are another
    policy's, so the sampler's values are not this one's.
    """

    learner: Learner
    critic: Critic | None
    reference: Policy | None
    config: RunConfig
    budget: Budget
    clock: Clock
    progress: Callable[[str, int, int], None]
    text: PretrainingText | None = None
    other: Policy | None = None
    foreign: bool = False

    def learn(self, experience: Experience, *, step: int) -> Lesson:
        """Make the updates that a step's kept groups serve."""
        sequences = experience.sequences
        order = plan(experience.group_of_row, self.config.train, step=step)
        batch = token_batch(experience.groups, self.learner.policy.device)
        idle = frozenset[int]()
        if self.config.train.skip_zero_rows:
            idle = idle_rows(self.learner.objective, batch, self.learner.state)
        # Scored apart, so that the rows that updates compute have the same company here and there.
        parts = [part for rows in order[0] for part in apart(rows, idle)]
        for add in (self._with_old_values, self._with_reference, self._with_other, self._with_critic):
            batch = add(batch, sequences, parts)
        try:
            check_finite(batch)
        except InputError as error:
            raise WorkError(f"training diverged, or the weights of a model are damaged: {error}") from None
        with self.clock("update"):
            prepared = self.learner.objective.prepare(batch, self.learner.state)
            learned = make_updates(
                self.learner,
                Material(
                    prepared,
                    sequences,
                    order,
                    self.config.sampling.temperature,
                    self.reference,
                    self.critic,
                    self.text,
                    idle,
                ),
                budget=self.budget,
                progress=lambda done, total: self.progress("updating", done, total),
            )
        self.clock.count("update", learned.trained_tokens)
        # With one update its own pass is the scorer's view of the sampling policy.
        scored = learned.logp if batch.old_logp is None else batch.old_logp
        if batch.old_logp is None:
            batch = batch.replace(mask=batch.mask & computed_rows(batch, idle)[:, None])
        mismatch = {} if scored is batch.rollout_logp else mismatch_metrics(batch, scored)
        return Lesson(prepared.batch, learned, {**prepared.metrics.values(), **mismatch, **learned.metrics})

    def _with_old_values(
        self, batch: TokenBatch, sequences: Sequence[TokenSequence], rows: Sequence[Sequence[int]]
    ) -> TokenBatch:
        """Add the policy's own values before the updates, from the scorer or the sampler, where they are needed."""
        needs, policy = self.learner.objective.needs, self.learner.policy
        if not self.foreign and not old_values_from_scorer(needs, policy, self.config):
            if self.config.train.updates == 1:
                return batch
            return batch.replace(old_logp=batch.rollout_logp, old_entropy=batch.entropy)
        with self.clock("score"):
            batch = score_old(
                batch,
                policy,
                sequences,
                rows=rows,
                statistics=needs.scores,
                temperature=self.config.sampling.temperature,
                budget=self.budget,
                reference=self.reference,
            )
        self.clock.count("score", int(batch.mask.sum()))
        return batch

    def _with_reference(
        self, batch: TokenBatch, sequences: Sequence[TokenSequence], rows: Sequence[Sequence[int]]
    ) -> TokenBatch:
        """Add the reference policy's log-probs where the objective compares with them."""
        if self.reference is None or "ref_logp" not in self.learner.objective.needs.batch:
            return batch
        return batch.replace(ref_logp=self._logp_of(self.reference, "reference", batch, sequences, rows))

    def _with_other(
        self, batch: TokenBatch, sequences: Sequence[TokenSequence], rows: Sequence[Sequence[int]]
    ) -> TokenBatch:
        """Add the second policy's log-probs where the objective asks for them."""
        if self.other is None:
            return batch
        return batch.replace(other_logp=self._logp_of(self.other, "other", batch, sequences, rows))

    def _logp_of(
        self,
        policy: Policy,
        phase: str,
        batch: TokenBatch,
        sequences: Sequence[TokenSequence],
        rows: Sequence[Sequence[int]],
    ) -> Tensor:
        """Return another policy's log-probs of the responses, `[B, T]`, no gradient."""
        with self.clock(phase):
            scored = score_rows(
                policy,
                sequences,
                rows=rows,
                width=batch.mask.shape[1],
                temperature=self.config.sampling.temperature,
                statistics=frozenset(),
                budget=self.budget,
            )
        self.clock.count(phase, int(batch.mask.sum()))
        return scored["logp"].to(batch.logp.device)

    def _with_critic(
        self, batch: TokenBatch, sequences: Sequence[TokenSequence], rows: Sequence[Sequence[int]]
    ) -> TokenBatch:
        """Add the critic's values before the updates, where there is a critic."""
        if self.critic is None:
            return batch
        width = batch.mask.shape[1]
        with self.clock("critic"):
            values = self.critic.old_values(sequences, rows=rows, width=width, budget=self.budget)
        self.clock.count("critic", int(batch.mask.sum()))
        return batch.replace(old_values=values)
