"""One source as a part of a task: its training stream, its held-out problems and its worked examples, kept apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tepo.core.errors import InputError
from tepo.tasks import gym
from tepo.tasks.arithmetic import (
    BARE_EXAMPLES,
    BARE_TEMPLATE,
    CHAT_TEMPLATE,
    ArithmeticOptions,
    ArithmeticPool,
    worked_examples,
)
from tepo.tasks.columns import map_rows
from tepo.tasks.config import Example, TaskConfig, changed, checked
from tepo.tasks.problem import Problem, distinct, normalised
from tepo.tasks.prompts import MATH_TEMPLATE, Prompter
from tepo.tasks.sources import read_rows
from tepo.tasks.stream import ListPool, ProblemStream, ShuffledStream, Slice, permuted, split_key

AUTO_HELD_OUT = 200  # at most a tenth of the source


@dataclass(frozen=True)
class Part:
    """A source loaded. `prompter` is how its questions are asked, worked examples included."""

    train: ProblemStream
    held_out: tuple[Problem, ...]
    prompter: Prompter
    notes: tuple[str, ...]

    @property
    def chat(self) -> bool | Literal["auto"]:
        """Whether its prompts are chats."""
        return self.prompter.chat


def is_family(source: str) -> bool:
    """Return whether a source makes its problems instead of reading them."""
    return source == "arithmetic" or source.startswith("gym:")


def load_part(config: TaskConfig, seed: int) -> Part:
    """Load one source; `seed` is that of the training order."""
    check_fields(config)
    if config.source == "arithmetic":
        part = _arithmetic(config, seed)
    elif config.source.startswith("gym:"):
        part = _gym(config, seed)
    else:
        part = _records(config, seed)
    if config.held_out_source is None:
        return part
    held_out, notes = read_problems(config, config.held_out_source, part.prompter)
    if isinstance(config.held_out, int):
        held_out = held_out[: config.held_out]
    note = (
        f"held out: {len(held_out)} problems, {len(distinct(held_out))} distinct questions of {config.held_out_source}"
    )
    return replace(part, held_out=tuple(held_out), notes=(*part.notes, *notes, note))


def check_fields(config: TaskConfig) -> None:
    """Raise InputError for settings that say nothing about this kind of source, rather than pass over them."""
    if not is_family(config.source):
        if config.options:
            raise InputError(f"task.options: {config.source} is read, not made; only arithmetic and gym: have options")
        return
    idle = changed(config, ("columns", "answer_format", "split", "subset")) if config.held_out_source is None else []
    idle += changed(config, ("limit",))
    if idle:
        raise InputError(f"task.{idle[0]}: {config.source} makes its problems; only files and datasets have this")


def read_problems(
    config: TaskConfig, source: str, prompter: Prompter | None = None, limit: int | None = None
) -> tuple[list[Problem], list[str]]:
    """Return the problems of a file, folder or dataset in its order, and notes of what was guessed and dropped."""
    rows = read_rows(source, split=config.split, subset=config.subset)[:limit]
    columns, style = config.columns, config.answer_format
    if source != config.source:  # a second file need not have the first one's columns: what it lacks is guessed
        given = columns.model_dump(exclude_none=True)
        lacking = {role: None for role, name in given.items() if name.partition(".")[0] not in rows[0]}
        columns, style = columns.model_copy(update=lacking), "auto"
    mapped = map_rows(rows, columns, style, prompter or file_prompter(config), Path(source).stem)
    return mapped.problems, mapped.notes


def file_prompter(config: TaskConfig, examples: tuple[Example, ...] = ()) -> Prompter:
    """Return how the questions of a file are asked; examples given in the configuration are shown."""
    shots = config.prompt.few_shot
    shown = shots if isinstance(shots, tuple) else examples
    return Prompter(config.prompt, config.prompt.template or MATH_TEMPLATE, shown, config.chat)


def _held_out_count(config: TaskConfig, size: int, examples: int) -> int:
    if config.held_out_source is not None:
        count = 0
    else:
        count = min(AUTO_HELD_OUT, size // 10) if config.held_out == "auto" else config.held_out
    if count + examples >= size:
        raise InputError(
            f"task.held_out: {config.source} has {size} distinct questions; {count} held out and {examples} worked "
            "examples leave none to train on"
        )
    return count


def _texts(examples: Sequence[Example]) -> frozenset[str]:
    return frozenset(normalised(example.question) for example in examples)


def _arithmetic(config: TaskConfig, seed: int) -> Part:
    options = checked(ArithmeticOptions, config.options, "task.options")
    chat = config.chat is True
    template = config.prompt.template or (CHAT_TEMPLATE if chat else BARE_TEMPLATE)
    prompter = Prompter(config.prompt, template, (), chat)
    shots = config.prompt.few_shot
    shots = (0 if chat else BARE_EXAMPLES) if shots is None else shots
    asked = 0 if isinstance(shots, tuple) else shots
    pool, key = ArithmeticPool(options, prompter), split_key(config.split_seed)
    count = _held_out_count(config, pool.size, asked)
    examples, places = worked_examples(pool, asked, count, key)
    examples = shots if isinstance(shots, tuple) else examples
    shown = _texts(examples)
    prompter = replace(prompter, examples=examples)
    pool = ArithmeticPool(options, prompter)
    held_out = [pool.get(permuted(place, pool.size, key)) for place in range(count)]
    held_out = [problem for problem in held_out if normalised(problem.question) not in shown]
    rest = Slice(pool, key, count, pool.size - count - len(places), places)
    note = (
        f"arithmetic: {pool.size:,} distinct questions: {len(held_out)} held out, {len(examples)} worked examples, "
        f"{rest.size:,} to train on"
    )
    return Part(ShuffledStream(rest, seed, shown), tuple(held_out), prompter, (note,))


def _gym(config: TaskConfig, seed: int) -> Part:
    family = config.source.removeprefix("gym:")
    prompter = Prompter(config.prompt, config.prompt.template or gym.TEMPLATE, (), config.chat)

    def pool(number: int, purpose: str) -> gym.GymPool:
        return gym.GymPool(family, config.options, gym.pool_seed(number, purpose), prompter)

    shots = config.prompt.few_shot or ()
    if isinstance(shots, int):
        found, _ = gym.distinct_problems(pool(config.split_seed, "examples"), shots)
        shots = tuple(Example(question=item.question, answer=str(item.answer)) for item in found)
    prompter = replace(prompter, examples=shots)
    wanted = None if config.held_out == "auto" else config.held_out
    wanted = 0 if config.held_out_source is not None else wanted
    held_out, draws = gym.distinct_problems(pool(config.split_seed, "held-out"), wanted, _texts(shots))
    stream = ShuffledStream(pool(seed, "train"), seed, _texts(shots))
    note = f"gym:{family}: {len(held_out)} distinct questions held out ({draws} drawn); training draws without end"
    return Part(stream, tuple(held_out), prompter, (note,))


def _records(config: TaskConfig, seed: int) -> Part:
    problems, notes = read_problems(config, config.source, limit=config.limit)
    different = distinct(problems)
    shots = config.prompt.few_shot
    asked = shots if isinstance(shots, int) else 0
    count = _held_out_count(config, len(different), asked)
    key, size = split_key(config.split_seed), len(different)
    order = [different[permuted(place, size, key)] for place in range(size)]
    held_out, examples, train = order[:count], order[count : count + asked], order[count + asked :]
    prompter = file_prompter(config)
    if examples:
        shown = tuple(Example(question=item.question, answer=str(item.answer)) for item in examples)
        asker = replace(prompter, examples=shown)
        held_out = [_asked_anew(problem, prompter, asker) for problem in held_out]
        train = [_asked_anew(problem, prompter, asker) for problem in train]
        prompter = asker
    hidden = _texts(prompter.examples)
    held_out = [problem for problem in held_out if normalised(problem.question) not in hidden]
    train = [problem for problem in train if normalised(problem.question) not in hidden]
    note = (
        f"{config.source}: {len(problems):,} problems, {len(different):,} distinct questions: "
        f"{len(held_out):,} held out, {len(train):,} to train on"
    )
    return Part(ShuffledStream(ListPool(train), seed), tuple(held_out), prompter, (*notes, note))


def _asked_anew(problem: Problem, before: Prompter, now: Prompter) -> Problem:
    if problem.messages != before.messages(problem.question):
        return problem  # the data brought its messages ready-made
    return replace(problem, messages=now.messages(problem.question))
