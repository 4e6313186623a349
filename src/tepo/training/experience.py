"""From problems to a rollout batch: draw, sample groups, grade, filter, score old values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tepo.objectives import Needs, TokenBatch
from tepo.policy import Policy, TokenSequence
from tepo.rollout import Response, SamplingConfig, sample
from tepo.tasks import Grade, Grader, Problem, Task
from tepo.training.clock import Clock
from tepo.training.config import RunConfig, TrainConfig
from tepo.training.grading import GroupGrading
from tepo.training.micro import Budget
from tepo.training.scoring import score_rows

PURPOSE = "rollout"
"""Purpose under which the draws of training responses are addressed."""
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Group:
    """One prompt's responses and their grades.

    `each_reward`: the objective compares each of several rewards by itself, not their sum.
    """

    problem: Problem
    draw: int
    responses: tuple[Response, ...]
    grades: tuple[Grade, ...]
    each_reward: bool = False

    @property
    def rewards(self) -> list[float]:
        """One reward a response; NaN where no reward can score it."""
        return [math.nan if grade.score is None else grade.score for grade in self.grades]

    @property
    def has_signal(self) -> bool:
        """Whether two responses were rewarded differently, so that advantages are not all zero.

        Rewards within a millionth of each other count as equal, as they do for the objectives.
        """
        return any(_differ(column) for column in zip(*reward_rows([self]), strict=True))


def reward_rows(groups: Sequence[Group]) -> list[list[float]]:
    """Return the rewards of each response: their weighted sum, or each by itself where the objective asks for that.

    NaN stands where a reward can't score the response. The columns of several rewards are in the order of
    `reward.parts`, unweighted: an objective that compares each has weights of its own.
    """
    names = _reward_names(groups) if any(group.each_reward for group in groups) else []
    if len(names) < 2:
        return [[reward] for group in groups for reward in group.rewards]
    cells = [[grade.parts.get(name) for name in names] for group in groups for grade in group.grades]
    return [[math.nan if cell is None else cell for cell in row] for row in cells]


def _reward_names(groups: Sequence[Group]) -> list[str]:
    """The names of the rewards; what a reward reports beside its own score (`NAME/component`) is no reward."""
    seen: dict[str, None] = {}
    for group in groups:
        for grade in group.grades:
            seen.update(dict.fromkeys(grade.parts))
    return [name for name in seen if not any(name.startswith(f"{other}/") for other in seen)]


def _differ(rewards: Sequence[float]) -> bool:
    scored = [reward for reward in rewards if not math.isnan(reward)]
    return len(scored) > 1 and max(scored) - min(scored) > 1e-6 * max(map(abs, scored))


@dataclass(frozen=True)
class Experience:
    """The rollout batch of one step, row r being response r of the kept groups in order.

    `drawn` are all groups sampled, in the order of their draws; `groups` those trained on.
    """

    drawn: tuple[Group, ...]
    groups: tuple[Group, ...]
    next_draw: int

    @property
    def responses(self) -> list[Response]:
        """The rows."""
        return [response for group in self.groups for response in group.responses]

    @property
    def group_of_row(self) -> list[int]:
        """The index of each row's group."""
        return [index for index, group in enumerate(self.groups) for _ in group.responses]

    @property
    def sequences(self) -> list[TokenSequence]:
        """The rows as prompt and response tokens."""
        return [TokenSequence(response.prompt_ids, response.token_ids) for response in self.responses]


@dataclass(frozen=True)
class Sampler:
    """Everything a group of responses comes from."""

    policy: Policy
    task: Task
    grader: Grader
    config: SamplingConfig
    group_size: int
    seed: int
    chat: bool
    rows: Budget
    clock: Clock
    progress: Progress
    each_reward: bool = False

    def groups(self, draws: Sequence[int], purpose: str = PURPOSE) -> list[Group]:
        """Sample and grade one group for each draw of the task's stream."""
        problems = [self.task.train.problem(draw) for draw in draws]
        return self.sampled(problems, draws, purpose)

    def sampled(self, problems: Sequence[Problem], draws: Sequence[int], purpose: str) -> list[Group]:
        """Sample and grade one group for each problem."""
        prompts = [self.policy.encode(problem.messages, chat=self.chat) for problem in problems]
        with GroupGrading(self.grader, problems, self.group_size) as grading:
            with self.clock("sample"):
                responses = self.rows.run(
                    lambda rows: sample(
                        self.policy,
                        prompts,
                        samples=self.group_size,
                        config=self.config.model_copy(update={"rows": rows}),
                        seed=self.seed,
                        purpose=purpose,
                        draws=draws,
                        progress=lambda done, total: self.progress("sampling", done, total),
                        on_response=grading.add,
                    ),
                    largest=len(prompts) * self.group_size,
                )
            self.clock.count("sample", sum(len(one.token_ids) for group in responses for one in group))
            with self.clock("grade"):  # what is left of it
                grades = grading.grades()
        return [
            Group(problem, draw, tuple(group), tuple(graded), self.each_reward)
            for problem, draw, group, graded in zip(problems, draws, responses, grades, strict=True)
        ]


def collect(sampler: Sampler, config: TrainConfig, *, next_draw: int) -> Experience:
    """Sample the groups of one step, from position `next_draw` of the stream on.

    Under dynamic sampling groups without signal are dropped and further problems drawn, as many as the rate seen so
    far in this step suggests, until there are `prompts` groups or `max_draws x prompts` were drawn; then the first
    `prompts` in order of draw are kept. All of it follows from the position and the responses, never from time.
    """
    if not config.dynamic_sampling:
        drawn = sampler.groups(range(next_draw, next_draw + config.prompts))
        return Experience(tuple(drawn), tuple(drawn), next_draw + config.prompts)
    most = round(config.max_draws * config.prompts)
    drawn, kept = [], []
    wanted = config.prompts
    while wanted:
        start = next_draw + len(drawn)
        drawn += sampler.groups(range(start, start + wanted))
        kept = [group for group in drawn if group.has_signal]
        wanted = further_draws(len(drawn), len(kept), config.prompts, most)
    return Experience(tuple(drawn), tuple(kept[: config.prompts]), next_draw + len(drawn))


def further_draws(drawn: int, kept: int, prompts: int, most: int) -> int:
    """Return how many more problems to draw: what the rate so far suggests, at most `prompts` and at most `most` in
    all."""
    missing = prompts - kept
    if missing <= 0:
        return 0
    expected = math.ceil(missing * drawn / kept) if kept else prompts
    return max(0, min(expected, prompts, most - drawn))


def token_batch(groups: Sequence[Group], device: torch.device) -> TokenBatch:
    """Return the rows of these groups as arrays; `logp` and `entropy` are the sampler's until the scorer has run."""
    responses = [response for group in groups for response in group.responses]
    width = max(len(response.token_ids) for response in responses)
    lengths = torch.tensor([len(response.token_ids) for response in responses])
    rewards = torch.tensor(reward_rows(groups), dtype=torch.float32)
    rollout_logp = _padded([response.logp for response in responses], width, torch.float32)
    batch = TokenBatch(
        logp=rollout_logp,
        rollout_logp=rollout_logp.clone(),
        entropy=_padded([response.entropy for response in responses], width, torch.float32),
        mask=torch.arange(width)[None, :] < lengths[:, None],
        token_ids=_padded([response.token_ids for response in responses], width, torch.long),
        rewards=rewards[:, 0] if rewards.shape[1] == 1 else rewards,
        correct=torch.tensor([grade.passed for group in groups for grade in group.grades]),
        group=torch.tensor([index for index, group in enumerate(groups) for _ in group.responses]),
        row_id=torch.tensor([row_id(response) for response in responses]),
        truncated=torch.tensor([response.stop_reason == "length" for response in responses]),
    )
    return batch.to(device)


def row_id(response: Response) -> int:
    """Return a number that names a response within its run, whatever batch it is in."""
    return response.draw * 2**20 + response.sample


def old_values_from_scorer(needs: Needs, policy: Policy, config: RunConfig) -> bool:
    """Return whether the scorer must run over the rollout batch before its updates.

    With one update the old values are the current ones and nothing is scored twice, unless a part looks at them
    before the first backward pass. With several, the sampler's own values serve only in float32 and only where
    neither entropies are compared nor ratios clipped finely.
    """
    if needs.old_logp or needs.mini_statistics:
        return True
    if config.train.updates == 1:
        return False
    if config.train.old_logp != "auto" and not needs.old_entropy:
        return config.train.old_logp == "scorer"
    return needs.old_entropy or needs.fine_clip or policy.compute_dtype != torch.float32


def score_old(
    batch: TokenBatch,
    policy: Policy,
    sequences: Sequence[TokenSequence],
    *,
    rows: Sequence[Sequence[int]],
    statistics: frozenset[str],
    temperature: float,
    budget: Budget,
    reference: Policy | None,
) -> TokenBatch:
    """Return the batch with `logp`, `old_logp`, `entropy`, `old_entropy` and the other statistics from the scorer."""
    found = score_rows(
        policy,
        sequences,
        rows=rows,
        width=batch.mask.shape[1],
        temperature=temperature,
        statistics=statistics | {"entropy"},
        budget=budget,
        reference=reference if "kl_full" in statistics else None,
    )
    return replace(batch, **found, old_logp=found["logp"], old_entropy=found["entropy"])


def _padded(rows: Sequence[Sequence[float] | Sequence[int]], width: int, dtype: torch.dtype) -> Tensor:
    result = torch.zeros(len(rows), width, dtype=dtype)
    for index, values in enumerate(rows):
        result[index, : len(values)] = torch.tensor(values, dtype=dtype)
    return result
