"""Loading: a task configuration becomes a training stream and held-out problems that share no question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tepo.core.errors import InputError
from tepo.tasks.config import TaskConfig, changed
from tepo.tasks.mixture import MixtureStream, shares
from tepo.tasks.parts import check_fields, is_family, load_part, read_problems
from tepo.tasks.problem import Problem, distinct, normalised
from tepo.tasks.stream import ListPool, ProblemStream, ShuffledStream

Say = Callable[[str], None]


def quiet(line: str) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class Task:
    """A task ready to train on.

    `chat` is "auto" when the policy's tokenizer decides. `report` says, one line each, what was guessed, dropped
    and held out. No normalised question of `held_out` is ever drawn from `train`.
    """

    train: ProblemStream
    held_out: tuple[Problem, ...]
    chat: bool | Literal["auto"]
    report: str

    def within(self, length: Callable[[Problem], int], limit: int, say: Say = quiet) -> Task:
        """Return the task without prompts of more than `limit` tokens, as `length` counts them.

        Problems read from files are dropped now and counted; those a family makes are passed over as they come.
        Raise InputError when nothing is left to train on.
        """
        train, dropped = self.train.where(lambda problem: length(problem) <= limit)
        held_out = tuple(problem for problem in self.held_out if length(problem) <= limit)
        _check_some(train, f"task.max_prompt_tokens: no training prompt has at most {limit} tokens")
        skipped = f"{dropped} to train on" if dropped is not None else "those a family makes, as they come"
        line = f"prompts over {limit} tokens dropped: {skipped}; {len(self.held_out) - len(held_out)} held out"
        say(line)
        return Task(train, held_out, self.chat, f"{self.report}\n{line}".strip())


def load_task(config: TaskConfig, *, seed: int = 0, say: Say = quiet) -> Task:
    """Load a task; `seed` orders the training problems, `config.split_seed` chooses the held-out ones.

    Raise InputError for anything wrong with the configuration or the data.
    """
    configs: Sequence[TaskConfig] = config.mixture or (config,)
    # The parts of a mixture are ordered apart: the number of the part stands above the bits of the seed.
    parts = [load_part(_inherited(part, config), seed + (number << 64)) for number, part in enumerate(configs)]
    chats = {part.chat for part in parts}
    if len(chats) > 1:
        raise InputError("task.mixture: some parts are chats and some are not; set task.chat for all of them")
    held_out = tuple(distinct([problem for part in parts for problem in part.held_out]))
    excluded = frozenset(normalised(problem.question) for problem in held_out)
    streams = [_without(part.train, excluded) for part in parts]
    for part, stream in zip(configs, streams, strict=True):
        _check_some(stream, f"task: every question of {part.source} is held out; none is left to train on")
    notes = [note for part in parts for note in part.notes]
    train = streams[0]
    if config.mixture:
        counts = shares([part.weight for part in config.mixture])
        train = MixtureStream(tuple(streams), counts, seed)
        mixed = ", ".join(f"{count / 10:g} % {part.source}" for part, count in zip(configs, counts, strict=True))
        notes.append(f"mixture: {mixed}; {len(held_out)} distinct questions held out")
    for note in notes:
        say(note)
    return Task(train, held_out, chats.pop(), "\n".join(notes))


def load_problems(source: str | TaskConfig, *, limit: int | None = None, say: Say = quiet) -> list[Problem]:
    """Return problems to evaluate on: all of a file's or dataset's, the held-out ones of a family or mixture.

    Worked examples of a file must be given as texts here, since all its problems are asked.
    """
    config = TaskConfig(source=source) if isinstance(source, str) else source
    if config.mixture or is_family(config.source):
        problems = list(load_task(config, say=say).held_out)
        if not problems:
            raise InputError(f"task.held_out: nothing of {config.source} is held out to evaluate on")
        return problems[:limit]
    if isinstance(config.prompt.few_shot, int) and config.prompt.few_shot:
        raise InputError(
            "task.prompt.few_shot: a number of worked examples is taken from training problems, and a benchmark has "
            "none; give the examples themselves"
        )
    check_fields(config)
    problems, notes = read_problems(config, config.source, limit=config.limit)
    notes.append(f"{config.source}: {len(problems)} problems, {len(distinct(problems))} distinct questions")
    for note in notes:
        say(note)
    return problems[:limit]


def _inherited(part: TaskConfig, whole: TaskConfig) -> TaskConfig:
    """Return a part of a mixture with `chat`, `split_seed` and `held_out` of the whole where it says nothing."""
    if part is whole:
        return part
    shared = set(changed(whole, ("chat", "split_seed", "held_out"))) - set(changed(part, type(part).model_fields))
    return part.model_copy(update={name: getattr(whole, name) for name in shared})


def _without(stream: ProblemStream, excluded: frozenset[str]) -> ProblemStream:
    if isinstance(stream, ShuffledStream) and not isinstance(stream.pool, ListPool):
        return replace(stream, excluded=stream.excluded | excluded)
    return stream.where(lambda problem: normalised(problem.question) not in excluded)[0]


def _check_some(stream: ProblemStream, otherwise: str) -> None:
    if stream.size == 0:
        raise InputError(otherwise)
    try:
        stream.problem(0)
    except LookupError:
        raise InputError(otherwise) from None
