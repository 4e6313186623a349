"""Loading: a task configuration becomes a training stream and held-out problems that share no question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tepo.core.errors import InputError
from tepo.tasks import gym
from tepo.tasks.arithmetic import (
    BARE_EXAMPLES,
    BARE_TEMPLATE,
    CHAT_TEMPLATE,
    ArithmeticOptions,
    ArithmeticPool,
    split_key,
    worked_examples,
)
from tepo.tasks.columns import map_rows
from tepo.tasks.config import Example, TaskConfig, checked
from tepo.tasks.mixture import MixtureStream, shares
from tepo.tasks.problem import Problem, normalised
from tepo.tasks.prompts import MATH_TEMPLATE, Prompter
from tepo.tasks.sources import Row, read_rows
from tepo.tasks.stream import ListPool, ProblemStream, ShuffledStream, permuted
from tepo.tasks.stream import Slice as PoolSlice

Say = Callable[[str], None]
AUTO_HELD_OUT = 200


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
        """Return the task without prompts of more than `limit` tokens, as `length` counts them."""
        train, dropped = self.train.where(lambda problem: length(problem) <= limit)
        held_out = tuple(problem for problem in self.held_out if length(problem) <= limit)
        if train.size == 0:
            raise InputError(f"task.max_prompt_tokens: no training prompt has at most {limit} tokens")
        skipped = f"{dropped} training" if dropped is not None else "training prompts as they come"
        line = f"prompts over {limit} tokens dropped: {skipped}, {len(self.held_out) - len(held_out)} held out"
        say(line)
        return Task(train, held_out, self.chat, f"{self.report}\n{line}".strip())


@dataclass(frozen=True)
class _Part:
    train: ProblemStream
    held_out: tuple[Problem, ...]
    chat: bool | Literal["auto"]
    notes: tuple[str, ...]


def load_task(config: TaskConfig, *, seed: int = 0, say: Say = quiet) -> Task:
    """Load a task; `seed` orders the training problems, `config.split_seed` chooses the held-out ones.

    Raise InputError for anything wrong with the configuration or the data.
    """
    configs: Sequence[TaskConfig] = config.mixture or (config,)
    parts = [_load_part(part, seed, number) for number, part in enumerate(configs)]
    chats = {part.chat for part in parts} if config.chat == "auto" else {config.chat}
    if len(chats) > 1:
        raise InputError("task.mixture: some parts are chats and some are not; set task.chat for all of them")
    held_out = _distinct([problem for part in parts for problem in part.held_out])
    excluded = frozenset(normalised(problem.question) for problem in held_out)
    streams = [_without(part.train, excluded) for part in parts]
    for part, stream in zip(configs, streams, strict=True):
        if stream.size == 0:
            raise InputError(f"task: nothing is left of {part.source} to train on; lower held_out")
        stream.problem(0)  # a family that has only held-out questions is found out now
    notes = [note for part in parts for note in part.notes]
    train: ProblemStream = streams[0]
    if config.mixture:
        counts = shares([part.weight for part in config.mixture])
        train = MixtureStream(tuple(streams), counts, seed)
        mixed = ", ".join(f"{count / 10:g} % {part.source}" for part, count in zip(configs, counts, strict=True))
        notes.append(f"mixture: {mixed}; {len(held_out)} distinct questions held out")
    for note in notes:
        say(note)
    return Task(train, tuple(held_out), chats.pop(), "\n".join(notes))


def load_problems(source: str | TaskConfig, *, limit: int | None = None, say: Say = quiet) -> list[Problem]:
    """Return problems to evaluate on: all of a file's or dataset's, the held-out ones of a family or mixture."""
    config = TaskConfig(source=source) if isinstance(source, str) else source
    if config.mixture or _is_family(config.source):
        problems = list(load_task(config, say=say).held_out)
        if not problems:
            raise InputError(f"task.held_out: nothing of {config.source} is held out to evaluate on")
    else:
        problems, notes = _file_problems(config, config.source, None if config.limit is None else config.limit)
        notes.append(f"{config.source}: {len(problems)} problems, {len(_distinct(problems))} distinct questions")
        for note in notes:
            say(note)
    return problems[:limit]


def _is_family(source: str) -> bool:
    return source == "arithmetic" or source.startswith("gym:")


def _load_part(config: TaskConfig, seed: int, number: int) -> _Part:
    if config.source == "arithmetic":
        part = _arithmetic(config, seed, number)
    elif config.source.startswith("gym:"):
        part = _gym(config, seed, number)
    else:
        part = _records(config, seed, number)
    if config.held_out_source is None:
        return part
    held_out, notes = _file_problems(config, config.held_out_source, None)
    if isinstance(config.held_out, int):
        held_out = held_out[: config.held_out]
    notes.append(f"held out: {len(_distinct(held_out))} distinct questions of {config.held_out_source}")
    return replace(part, held_out=tuple(held_out), notes=(*part.notes, *notes))


def _distinct(problems: Sequence[Problem]) -> list[Problem]:
    first: dict[str, Problem] = {}
    for problem in problems:
        first.setdefault(normalised(problem.question), problem)
    return list(first.values())


def _without(stream: ProblemStream, excluded: frozenset[str]) -> ProblemStream:
    if isinstance(stream, ShuffledStream) and not isinstance(stream.pool, ListPool):
        return replace(stream, excluded=stream.excluded | excluded)
    return stream.where(lambda problem: normalised(problem.question) not in excluded)[0]


def _held_out_count(config: TaskConfig, size: int) -> int:
    if config.held_out_source is not None:
        return 0
    count = min(AUTO_HELD_OUT, size // 10) if config.held_out == "auto" else config.held_out
    if count >= size:
        raise InputError(
            f"task.held_out: {config.source} has {size} distinct questions; {count} held out leave none to train on"
        )
    return count


def _arithmetic(config: TaskConfig, seed: int, number: int) -> _Part:
    options = checked(ArithmeticOptions, config.options, "task.options")
    chat = config.chat is True
    shots = config.prompt.few_shot
    shots = (0 if chat else BARE_EXAMPLES) if shots is None else shots
    template = config.prompt.template or (CHAT_TEMPLATE if chat else BARE_TEMPLATE)
    prompter = Prompter(config.prompt, template, (), chat)
    pool, key = ArithmeticPool(options, prompter), split_key(config.split_seed)
    count = _held_out_count(config, pool.size)
    examples: tuple[Example, ...] = ()
    places: tuple[int, ...] = ()
    if isinstance(shots, tuple):
        examples = shots
    else:
        if count + shots >= pool.size:
            raise InputError(
                f"task.held_out: arithmetic with these options has {pool.size} distinct questions; {count} held out "
                f"and {shots} worked examples leave none to train on"
            )
        examples, places = worked_examples(options, pool, shots, count, key)
    pool = ArithmeticPool(options, replace(prompter, examples=examples))
    shown = frozenset(normalised(example.question) for example in examples)
    held_out = [pool.get(permuted(place, pool.size, key)) for place in range(count)]
    held_out = [problem for problem in held_out if normalised(problem.question) not in shown]
    rest = PoolSlice(pool, key, count, pool.size - count - len(places), places)
    stream = ShuffledStream(rest, _order_seed(seed, number), shown if not places else frozenset())
    note = (
        f"arithmetic: {pool.size:,} distinct questions: {len(held_out)} held out, {len(examples)} worked examples, "
        f"{rest.size:,} to train on"
    )
    return _Part(stream, tuple(held_out), chat, (note,))


def _order_seed(seed: int, number: int) -> int:
    """Return the seed of one part's order, so that the parts of a mixture are shuffled apart."""
    return seed if number == 0 else seed + (number << 64)


def _gym(config: TaskConfig, seed: int, number: int) -> _Part:
    family = config.source.removeprefix("gym:")
    prompter = Prompter(config.prompt, config.prompt.template or gym.TEMPLATE, (), config.chat)
    shots = config.prompt.few_shot or 0
    apart = gym.gym_pool(family, config.options, gym.pool_seed(config.split_seed, "held-out"), prompter)
    wanted = None if config.held_out == "auto" else config.held_out
    wanted = 0 if config.held_out_source is not None else wanted
    examples: tuple[Example, ...] = shots if isinstance(shots, tuple) else ()
    if isinstance(shots, int) and shots:
        shown, _ = gym.held_out(replace(apart, seed=apart.seed ^ 1, dataset=_reseeded(apart, config)), shots)
        examples = tuple(Example(question=item.question, answer=str(item.answer)) for item in shown)
    prompter = replace(prompter, examples=examples)
    hidden = frozenset(normalised(example.question) for example in examples)
    held_out, draws = gym.held_out(replace(apart, prompter=prompter), wanted)
    held_out = [problem for problem in held_out if normalised(problem.question) not in hidden]
    training = gym.gym_pool(family, config.options, gym.pool_seed(_order_seed(seed, number), "train"), prompter)
    note = f"gym:{family}: {len(held_out)} distinct questions held out ({draws} draws); training unlimited"
    return _Part(ShuffledStream(training, seed, hidden), tuple(held_out), config.chat, (note,))


def _reseeded(pool: gym.GymPool, config: TaskConfig) -> Any:
    return gym.create(pool.family, config.options, pool.seed ^ 1)


def _records(config: TaskConfig, seed: int, number: int) -> _Part:
    problems, notes = _file_problems(config, config.source, config.limit)
    distinct = _distinct(problems)
    count = _held_out_count(config, len(distinct))
    key, size = split_key(config.split_seed), len(distinct)
    order = [distinct[permuted(place, size, key)] for place in range(size)]
    held_out, train = order[:count], order[count:]
    shots = config.prompt.few_shot
    if isinstance(shots, int) and shots:
        if shots >= len(train):
            raise InputError(f"task.prompt.few_shot: {shots} worked examples leave nothing of {config.source}")
        shown, train = train[:shots], train[shots:]
        examples = tuple(Example(question=item.question, answer=str(item.answer)) for item in shown)
        prompter = Prompter(config.prompt, _template(config), examples, config.chat)
        held_out, train = ([_asked_anew(item, prompter) for item in side] for side in (held_out, train))
    shown_texts = frozenset(normalised(item.question) for item in shots) if isinstance(shots, tuple) else frozenset()
    held_out = [problem for problem in held_out if normalised(problem.question) not in shown_texts]
    train = [problem for problem in train if normalised(problem.question) not in shown_texts]
    notes.append(
        f"{config.source}: {len(problems):,} problems, {len(distinct):,} distinct questions: "
        f"{len(held_out):,} held out, {len(train):,} to train on"
    )
    stream = ShuffledStream(ListPool(train), _order_seed(seed, number))
    return _Part(stream, tuple(held_out), config.chat, tuple(notes))


def _asked_anew(problem: Problem, prompter: Prompter) -> Problem:
    return replace(problem, messages=prompter.messages(problem.question))


def _template(config: TaskConfig) -> str:
    return config.prompt.template or MATH_TEMPLATE


def _file_problems(config: TaskConfig, source: str, limit: int | None) -> tuple[list[Problem], list[str]]:
    rows: list[Row] = read_rows(source, split=config.split, subset=config.subset)[:limit]
    shots = config.prompt.few_shot
    examples = shots if isinstance(shots, tuple) else ()
    prompter = Prompter(config.prompt, _template(config), examples, config.chat)
    own = source == config.source
    columns = config.columns if own else config.columns.model_copy(update=_missing(config, rows))
    mapped = map_rows(rows, columns, config.answer_format if own else "auto", prompter, Path(source).stem)
    return mapped.problems, mapped.notes


def _missing(config: TaskConfig, rows: Sequence[Row]) -> dict[str, None]:
    """Return the configured columns that a second file does not have, to be guessed there."""
    given = config.columns.model_dump(exclude_none=True)
    return {role: None for role, name in given.items() if name.partition(".")[0] not in rows[0]}
