"""Everything a run needs, checked and loaded before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tepo.core.errors import InputError
from tepo.objectives import Objective
from tepo.policy import Policy, PolicyConfig, load_policy
from tepo.tasks import Problem, Task, load_task
from tepo.training.checkpoint import Checkpoint, Counters, checkpoint_steps
from tepo.training.config import RunConfig
from tepo.training.critic import Critic, load_critic
from tepo.training.learner import Learner, ModelLearner
from tepo.training.partner import load_partner
from tepo.training.pretraining import PretrainingText, load_text
from tepo.training.resume import check_same_settings, fork_checkpoint, latest_checkpoint
from tepo.training.rundir import RunFolder, read_config, refuse_existing, run_name
from tepo.training.trackers import check_trackers

Say = Callable[[str], None]

_TEMPLATE_TOKENS = 256
"""More than any chat template adds to a prompt."""
_PROVIDED = frozenset(
    {"rollout_logp", "old_logp", "ref_logp", "entropy", "old_entropy", "token_ids", "sum_p2", "sum_p2_logp"}
    | {"values", "old_values", "kl_full", "rewards", "group", "row_id", "truncated", "correct", "advantage"}
)
"""Fields of the token batch that this trainer fills."""


@dataclass(frozen=True)
class Setup:
    """A run ready to start or to go on."""

    config: RunConfig
    folder: RunFolder
    task: Task
    chat: bool
    policy: Policy
    learner: Learner
    critic: Critic | None
    partner: Learner | None
    reference: Policy | None
    text: PretrainingText | None
    counters: Counters
    continued: bool
    """The folder exists and is gone on with."""
    fork: str | None
    """RUN@STEP this run started from."""

    @property
    def learners(self) -> tuple[ModelLearner, ...]:
        """Every model that is trained, the policy first."""
        return tuple(one for one in (self.learner, self.critic, self.partner) if one is not None)


def set_up(config: RunConfig, *, resume: Path | None, fork: str | None, say: Say) -> Setup:
    """Check and load a run; every fault of configuration, data or model is an `InputError` and nothing is written.

    `resume` is the folder to go on with; `fork` names the checkpoint a new run starts from.
    """
    if resume is not None and fork is not None:
        raise InputError("resume and fork exclude each other: a fork is a new run")
    check(config, say)
    check_trackers(config)
    folder = RunFolder(resume if resume is not None else Path(config.runs) / run_name(config))
    if resume is not None:
        saved, provenance = read_config(folder)
        check_same_settings(saved, config, folder)
        fork = provenance.get("fork")
    else:
        refuse_existing(folder.path)
    checkpoint = latest_checkpoint(folder, say) if resume is not None else None
    if checkpoint is None and fork is not None:
        checkpoint = fork_checkpoint(fork)
    if resume is not None and checkpoint is None:
        if checkpoint_steps(folder):
            raise InputError(f"--resume {folder.path}: every checkpoint is damaged; fork or start anew")
        say(f"{folder.path} has no checkpoint yet: starting it again from step 0")
    objective = config.objective.build()
    provided = _PROVIDED | ({"other_logp"} if objective.partner is not None else set())
    missing = sorted(objective.needs.batch - provided)
    if missing:
        raise InputError(
            f"objective {objective.name!r} needs {', '.join(missing)} in its batch, which this trainer does not provide"
        )
    task = load_task(config.task, seed=config.train.seed, say=say)
    if (config.checkpoint.best or "").startswith("eval/") and not task.held_out:
        raise InputError(f"checkpoint.best = {config.checkpoint.best!r} needs task.held_out: there are no questions")
    policy = load_policy(config.model, seed=config.train.seed, say=say)
    chat = policy.has_chat_template if task.chat == "auto" else task.chat
    if chat and not policy.has_chat_template:
        raise InputError(f"task.chat is true, but the tokenizer of {config.model.path} has no chat template")
    task = _within_positions(task, policy, config, chat, say)
    reference = _reference(config, policy, objective, say)
    learner = Learner(policy, objective, config.optim, updates_per_step=config.train.updates, steps=config.train.steps)
    critic = load_critic(config, policy, say) if objective.needs.critic else None
    partner = load_partner(config, policy, objective.partner, say) if objective.partner is not None else None
    text = load_text(config, policy, objective.ptx_coef, say)
    counters = Counters(micro_tokens=config.train.micro_tokens, rows=config.sampling.rows)
    if checkpoint is not None:
        forked = resume is None or not checkpoint_steps(folder)
        budgets = {"micro_tokens": counters.micro_tokens, "rows": counters.rows} if forked else {}
        counters = replace(checkpoint.counters, **budgets)
        for one in (learner, critic, partner):
            if one is not None:
                restore(one, checkpoint, forked=forked, say=say)
    return Setup(
        config=config,
        folder=folder,
        task=task,
        chat=chat,
        policy=policy,
        learner=learner,
        critic=critic,
        partner=partner,
        reference=reference,
        text=text,
        counters=counters,
        continued=resume is not None,
        fork=fork,
    )


def check(config: RunConfig, say: Say) -> None:
    """Refuse settings that contradict each other and say what is allowed but unusual."""
    if config.sampling.greedy:
        raise InputError("sampling.temperature is 0: a group of equal responses teaches nothing; use 1.0")
    if config.sampling.truncates:
        say(
            "warning: sampling.top_p, top_k or em_inf changes which tokens are drawn, while log-probs are of the full "
            "distribution: the gradient is biased"
        )
    if config.train.group_size == 1 and "group" in config.objective.build().needs.batch:
        say("warning: train.group_size is 1, so advantages against the group are all 0")
    rows = config.train.prompts * config.train.group_size
    if config.train.mini_batches > rows:
        raise InputError(
            f"train.mini_batches is {config.train.mini_batches}, but a rollout batch has only {rows} responses"
        )
    if config.checkpoint.best is not None and not config.checkpoint.every:
        raise InputError("checkpoint.best needs checkpoint.every: only saved steps can be kept")
    if (config.checkpoint.best or "").startswith("eval/") and not (config.eval.every or config.eval.at_end):
        raise InputError(
            f"checkpoint.best = {config.checkpoint.best!r} needs eval.every: no saved step would be evaluated"
        )


def restore(learner: ModelLearner, checkpoint: Checkpoint, *, forked: bool, say: Say) -> None:
    """Load a learner from a checkpoint.

    A fork whose objective keeps another state starts with a fresh one, and so does one with a learner that the run it
    comes from did not have.
    """
    if learner.name not in checkpoint.tensors:
        if not forked:
            raise InputError(f"the checkpoint has no {learner.name}, which the objective trains")
        say(f"the {learner.name} starts anew: the run that is forked has none")
        return
    weights = checkpoint.tensors[learner.name]
    optimizer = checkpoint.tensors[f"{learner.name}-optimizer"]
    own = {f"state/{name}" for name in learner.state}
    saved = {name for name in optimizer if name.startswith("state/")}
    if forked and own != saved:
        say("the objective starts with a state of its own")
        fresh = {f"state/{name}": value for name, value in learner.state.items()}
        optimizer = {**{name: value for name, value in optimizer.items() if name not in saved}, **fresh}
    learner.load(weights, optimizer, updates=checkpoint.counters.updates)


def _within_positions(task: Task, policy: Policy, config: RunConfig, chat: bool, say: Say) -> Task:
    """Drop prompts that are over the configured limit, or that leave no room for a whole response."""
    room = policy.max_positions - config.sampling.max_tokens
    if room < 1:
        raise InputError(
            f"sampling.max_tokens is {config.sampling.max_tokens}, but {config.model.path} has "
            f"{policy.max_positions} positions for prompt and response together"
        )

    def tokens(problem: Problem) -> int:
        return len(policy.encode(problem.messages, chat=chat))

    if config.task.max_prompt_tokens is not None:
        return task.within(tokens, min(config.task.max_prompt_tokens, room), say)

    def bound(problem: Problem) -> int:
        # No token is shorter than a byte, and a chat template adds little: most prompts need no encoding here.
        size = sum(len(message["content"].encode()) for message in problem.messages)
        return size if size + _TEMPLATE_TOKENS <= room else tokens(problem)

    fitting = task.within(bound, room)
    if (fitting.train.size, len(fitting.held_out)) != (task.train.size, len(task.held_out)):
        say(
            f"prompts over {room} tokens dropped: {config.model.path} has {policy.max_positions} positions and "
            f"a response may take {config.sampling.max_tokens}"
        )
    return fitting


def _reference(config: RunConfig, policy: Policy, objective: Objective, say: Say) -> Policy | None:
    """Return the reference policy where the objective needs one: the model before training, or a named one."""
    if not objective.needs.reference:
        return None
    if config.train.reference == "start":
        return policy.frozen_copy()
    named = PolicyConfig.model_validate({**config.model.model_dump(), "path": config.train.reference, "lora": None})
    reference = load_policy(named, seed=config.train.seed, say=say)
    for parameter in reference.model.parameters():
        parameter.requires_grad_(False)
    if reference.vocabulary != policy.vocabulary:
        raise InputError(
            f"train.reference {config.train.reference} has {reference.vocabulary} token ids, the policy "
            f"{policy.vocabulary}: they must share a tokenizer"
        )
    return reference
