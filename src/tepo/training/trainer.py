"""The loop: draw, sample, grade, filter, score, update, measure; evaluate and save on their schedule."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tepo.core.allocator import keep_freed_memory
from tepo.core.errors import TepoError, WorkError
from tepo.core.files import write_json
from tepo.core.lock import hold
from tepo.tasks import Grader
from tepo.training.callbacks import Callback, Callbacks, RunInfo, listening
from tepo.training.checkpoint import Counters, checkpoint_steps, what_is_safe
from tepo.training.clock import Clock
from tepo.training.config import RunConfig
from tepo.training.evaluating import HeldOut, evaluation_metrics
from tepo.training.experience import Experience, Sampler, collect
from tepo.training.interrupt import catch_interrupt
from tepo.training.learning import Teacher
from tepo.training.loading import check_config, load_config
from tepo.training.metrics import memory_metrics, rollout_metrics
from tepo.training.micro import Budget
from tepo.training.preflight import Preflight, preflight
from tepo.training.records import write_rollouts
from tepo.training.rundir import (
    RunFolder,
    create,
    provenance,
    read_config,
    run_name,
    step_name,
    write_config,
)
from tepo.training.saving import save_learners, save_models
from tepo.training.setup import Setup, set_up
from tepo.training.trackers import trackers
from tepo.training.watching import watches


@dataclass(frozen=True)
class RunResult:
    """What a run came to.

    `metrics` are those of the last step; `evaluations` maps steps to their `eval/*` metrics, earlier sessions of a
    continued run included; `preflight` is there where one was made.
    """

    folder: Path
    steps: int
    interrupted: bool
    metrics: Mapping[str, Any]
    evaluations: Mapping[int, Mapping[str, float]]
    preflight: Preflight | None = None

    @property
    def model(self) -> Path:
        """The final policy; it exists unless the run was interrupted."""
        return self.folder / "model"


def train(
    config: RunConfig | Mapping[str, Any] | Path | str,
    *,
    callbacks: Sequence[Callback] = (),
    resume: bool | Path | str = False,
    fork: str | None = None,
    dry_run: bool = False,
) -> RunResult:
    """Run, or go on with, a training run and return what it came to.

    Args:
        config: the configuration, a tree of plain values, or a TOML file.
        callbacks: listeners; they never change the result.
        resume: go on with this run folder (True: the folder the configuration names). Its settings must be the same;
            more steps are allowed.
        fork: `RUN@STEP`, the checkpoint a new run starts from.
        dry_run: stop after the pre-flight; nothing is written.

    Raises:
        InputError: something is wrong with configuration, data or model; nothing was written.
        WorkError: the run failed; the message says what is safe on disk.
    """
    keep_freed_memory()
    config = _as_config(config)
    folder = _resume_folder(config, resume)
    with listening(callbacks) as listeners, ExitStack() as stack:
        if folder is not None and not dry_run:
            read_config(RunFolder(folder))  # a folder that is no run stays as it is
            stack.enter_context(hold(folder))
        setup = set_up(config, resume=folder, fork=fork, say=listeners.on_message)
        grader = stack.enter_context(Grader(config.reward, device=str(setup.policy.device)))
        return Trainer(setup, grader, listeners, stack).run(dry_run=dry_run)


class Trainer:
    """One session of a run. What it must remember to go on is in `counters` and its learners, nowhere else."""

    def __init__(self, setup: Setup, grader: Grader, listeners: Callbacks, stack: ExitStack) -> None:
        self.config = setup.config
        self.setup = setup
        self.policy = setup.policy
        self.learners = setup.learners
        self.grader = grader
        self.listeners = listeners
        self.step = setup.counters.step
        self.draws = setup.counters.draws
        self.response_tokens = setup.counters.response_tokens
        say = listeners.on_message
        self.micro = Budget(setup.counters.micro_tokens, "train.micro_tokens", say)
        self.rows = Budget(setup.counters.rows, "sampling.rows", say)
        self.clock = Clock()
        self._stack = stack
        self._tell: Callback = listeners
        self.sampler = Sampler(
            policy=self.policy,
            task=setup.task,
            grader=grader,
            config=self.config.sampling,
            group_size=self.config.train.group_size,
            seed=self.config.train.seed,
            chat=setup.chat,
            rows=self.rows,
            clock=self.clock,
            progress=listeners.on_progress,
            each_reward=setup.learner.objective.needs.each_reward,
        )
        self.teacher = Teacher(
            learner=setup.learner,
            critic=setup.critic,
            reference=setup.reference,
            config=self.config,
            budget=self.micro,
            clock=self.clock,
            progress=listeners.on_progress,
            text=setup.text,
            other=setup.partner.policy if setup.partner is not None else None,
        )
        self.held_out = HeldOut(setup, grader, self.rows, listeners.on_progress)
        self.partner_teacher = None
        if setup.partner is not None:
            self.partner_teacher = dataclasses.replace(
                self.teacher, learner=setup.partner, critic=None, reference=None, text=None, other=None, foreign=True
            )

    def run(self, *, dry_run: bool = False) -> RunResult:
        """Make the steps that are left."""
        found = self._preflight(dry_run)
        if dry_run:
            return RunResult(self.setup.folder.path, self.step, False, {}, {}, found)
        try:
            self._open_folder(found)
        except OSError as error:
            path = self.setup.folder.path
            raise WorkError(f"run folder {path} cannot be written to: {error.strerror or error}") from error
        with self._failures_say_what_is_safe(), catch_interrupt(self._tell.on_message) as interrupt:
            if self.config.eval.at_start and not self.setup.folder.read_metrics():
                self._record(self._evaluate())
            while not self._over and not interrupt.asked:
                self._one_step()
                if self._due(self.config.checkpoint.every, at_end=self.config.checkpoint.at_end):
                    self._save()
            self._finish()
        return self._result(found)

    @property
    def _over(self) -> bool:
        """Whether the run has used up its budget of steps or of response tokens."""
        train = self.config.train
        return self.step >= train.steps or 0 < train.tokens <= self.response_tokens

    def _one_step(self) -> None:
        self.step += 1
        with self.clock("step"):
            experience = collect(self.sampler, self.config.train, next_draw=self.draws)
            self.draws = experience.next_draw
            self.response_tokens += sum(
                len(response.token_ids) for group in experience.drawn for response in group.responses
            )
            self._tell.on_experience(self.step, experience)
            metrics = rollout_metrics(experience)
            metrics |= self._learn(experience) if experience.groups else {"updates": 0}
        if self._due(self.config.eval.every, at_end=self.config.eval.at_end):
            metrics |= self._evaluate()
        self._record(metrics)

    def _learn(self, experience: Experience) -> dict[str, Any]:
        """Turn the kept groups into optimizer updates of the policy; return their metrics."""
        lesson = self.teacher.learn(experience, step=self.step)
        if lesson.learned.metrics["update/skipped"] or lesson.learned.metrics.get("critic/update/skipped"):
            self._tell.on_message(f"step {self.step}: a gradient was not finite; its update was left out")
        if self.config.log.rollouts and self.step % self.config.log.rollouts_every == 0:
            write_rollouts(
                self.setup.folder.rollouts / f"{step_name(self.step)}.jsonl",
                experience,
                lesson.batch,
                lesson.learned,
                lambda token: self.policy.decode([token], special=True),
                responses=self.config.log.rollouts,
            )
        if self.partner_teacher is None:
            return lesson.metrics
        second = self.partner_teacher.learn(experience, step=self.step)
        return lesson.metrics | {f"partner/{name}": value for name, value in second.metrics.items()}

    def _evaluate(self) -> dict[str, Any]:
        """Evaluate the policy on the held-out questions; write the results and return their metrics."""
        with self.clock("evaluate"):
            evaluation = self.held_out.evaluate()
        if evaluation is None:
            return {}
        evaluation.write(self.setup.folder.eval / f"{step_name(self.step)}.jsonl")
        self._tell.on_evaluation(self.step, evaluation)
        return evaluation_metrics(evaluation)

    def _record(self, metrics: Mapping[str, Any]) -> None:
        if not metrics:
            return
        line = {
            **metrics,
            "tokens": self.response_tokens,
            "draws": self.draws,
            "micro_tokens": self.micro.amount,
            **self.clock.read(),
            **memory_metrics(self.policy.device),
        }
        self.setup.folder.append_metrics(self.step, line)
        self._tell.on_step(self.step, line)

    def _due(self, every: int, *, at_end: bool) -> bool:
        return (at_end and self._over) or (every > 0 and self.step % every == 0)

    def _save(self) -> None:
        counters = Counters(
            step=self.step,
            draws=self.draws,
            updates=self.learners[0].updates,
            micro_tokens=self.micro.amount,
            rows=self.rows.amount,
            response_tokens=self.response_tokens,
        )
        path = save_learners(self.setup.folder, self.learners, counters, self.config.checkpoint)
        self._tell.on_checkpoint(self.step, path)

    def _finish(self) -> None:
        folder = self.setup.folder
        if not self._over:
            if self.step not in checkpoint_steps(folder) and self.step > 0:
                self._save()
            return
        save_models(folder, self.setup.learner, self.setup.partner)

    def _preflight(self, dry_run: bool) -> Preflight | None:
        if self.step > 0 or self.setup.continued or not (self.config.train.preflight or dry_run):
            return None
        found = preflight(self.sampler, self.setup)
        self.clock.read()
        for line in found.lines():
            self._tell.on_message(line)
        return found

    def _open_folder(self, found: Preflight | None) -> None:
        """Make the folder, or cut an existing one back to the step that is gone on from, and start listening."""
        setup = self.setup
        if setup.continued:
            setup.folder.cut_back(self.step if checkpoint_steps(setup.folder) else -1)
            write_config(setup.folder, self.config, read_config(setup.folder)[1])
        else:
            setup.folder.path.mkdir(parents=True, exist_ok=True)
            self._stack.enter_context(hold(setup.folder.path))
            create(setup.folder.path, self.config, provenance(device=str(self.policy.device), fork=setup.fork))
        if found is not None:
            write_json(setup.folder.path / "preflight.json", found.to_json())
        sent = [self._stack.enter_context(contextlib.closing(one)) for one in trackers(self.config, setup.folder)]
        self._tell = Callbacks([self.listeners, *sent, *watches(self.config, self.listeners.on_message)])
        parameters = sum(value.numel() for one in self.learners for value in one.weight_tensors().values())
        self._tell.on_start(RunInfo(self.config, setup.folder.path, self.step + 1, parameters))

    @contextlib.contextmanager
    def _failures_say_what_is_safe(self) -> Iterator[None]:
        try:
            yield
        except (TepoError, OSError) as error:
            safe = what_is_safe(self.setup.folder)
            # What was found wrong only now, input included, is a failure of the work.
            text = str(error) if safe in str(error) else f"step {self.step}: {error}\n{safe}"
            raise WorkError(text) from error
        except BaseException:
            self._tell.on_message(f"step {self.step}: stopped. {what_is_safe(self.setup.folder)}")
            raise

    def _result(self, found: Preflight | None) -> RunResult:
        interrupted = not self._over
        lines = self.setup.folder.read_metrics()
        evaluations = {
            int(line["step"]): {name: value for name, value in line.items() if name.startswith("eval/")}
            for line in lines
            if any(name.startswith("eval/") for name in line)
        }
        self._tell.on_end(self.setup.folder.path, interrupted=interrupted)
        return RunResult(self.setup.folder.path, self.step, interrupted, lines[-1] if lines else {}, evaluations, found)


def _as_config(config: RunConfig | Mapping[str, Any] | Path | str) -> RunConfig:
    if isinstance(config, RunConfig):
        return config
    return check_config(config) if isinstance(config, Mapping) else load_config(config)


def _resume_folder(config: RunConfig, resume: bool | Path | str) -> Path | None:
    if isinstance(resume, bool):
        return Path(config.runs) / run_name(config) if resume else None
    return Path(resume)
