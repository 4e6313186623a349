"""From rows to problems: which column is the question, which the answer, and where in it the answer stands."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tepo.core.errors import InputError, nearest
from tepo.tasks.config import ColumnsConfig
from tepo.tasks.problem import Problem
from tepo.tasks.prompts import Prompter
from tepo.tasks.rewards.extract import last_boxed
from tepo.tasks.sources import Row

# Guessed in this order; the first that the rows have wins.
QUESTION = ("question", "problem", "prompt", "query", "input", "instruction")
ANSWER = (
    "reward_model.ground_truth",
    "answer",
    "final_answer",
    "expected_answer",
    "ground_truth",
    "gt",
    "target",
    "label",
    "solution",
)
ID = ("id", "unique_id", "idx", "index", "extra_info.index")

Format = Literal["auto", "plain", "gsm8k", "boxed"]


@dataclass(frozen=True)
class Mapped:
    """Problems made of rows, and what is to be said about it."""

    problems: list[Problem]
    notes: list[str]


def map_rows(rows: Sequence[Row], columns: ColumnsConfig, style: Format, prompter: Prompter, name: str) -> Mapped:
    """Turn rows into problems; rows without a question or a reference answer are dropped and counted."""
    question = _column("question", columns.question, QUESTION, rows, name)
    answer = _column("answer", columns.answer, ANSWER, rows, name)
    named = _column("id", columns.id, ID, rows, name, required=False)
    style = style if style != "auto" else _style(rows, str(answer))
    ids = _ids(rows, named, name)
    problems, without = [], 0
    for row, identity in zip(rows, ids, strict=True):
        asked, reference = _value(row, str(question)), _reference(_value(row, str(answer)), style)
        if reference is None or asked is None or not str(asked).strip():
            without += 1
            continue
        metadata = {key: value for key, value in row.items() if key not in {question, answer}}
        problems.append(_problem(identity, asked, reference, {"source": name, **metadata}, prompter))
    notes = []
    if columns.question is None or columns.answer is None:
        place = {"gsm8k": " after ####", "boxed": " in its last \\boxed{}", "plain": ""}[style]
        notes.append(f"{name}: question in column {question!r}, reference answer in {answer!r}{place} (guessed)")
    if without:
        notes.append(f"{name}: {without} of {len(rows)} rows dropped: no question or no reference answer")
    if not problems:
        raise InputError(
            f"{name}: none of the {len(rows)} rows has a question in {question!r} and an answer in {answer!r}"
            + (f" in the format {style!r}; set task.answer_format" if style != "plain" else "")
        )
    return Mapped(problems, notes)


def _problem(identity: str, asked: Any, reference: str, metadata: Mapping[str, object], prompter: Prompter) -> Problem:
    if _is_messages(asked):
        asks = [str(message["content"]) for message in asked if message["role"] == "user"]
        question = asks[-1] if asks else str(asked[-1]["content"])
        return Problem(identity, prompter.continued(asked), question, reference, metadata)
    question = str(asked).strip()
    return Problem(identity, prompter.messages(question), question, reference, metadata)


def _is_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) and {"role", "content"} <= item.keys() for item in value)
    )


def _names(rows: Sequence[Row]) -> list[str]:
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row))
        for key, value in row.items():
            if isinstance(value, dict):
                names.update(dict.fromkeys(f"{key}.{inner}" for inner in value))
    return list(names)


def _column(
    role: str, given: str | None, guesses: Sequence[str], rows: Sequence[Row], name: str, *, required: bool = True
) -> str | None:
    names = _names(rows)
    top = [known for known in names if "." not in known or known in rows[0]]
    if given is not None:
        if given not in names:
            raise InputError(
                f"task.columns.{role}: {name} has no column {given!r}; it has {', '.join(top)}."
                + (hint if (hint := nearest(given, names)).startswith(" Did") else "")
            )
        return given
    for guess in guesses:
        if guess in names:
            return guess
    if not required:
        return None
    raise InputError(
        f"{name}: no column looks like the {role} (looked for {', '.join(guesses)}); it has {', '.join(top)}. "
        f"Say which: task.columns.{role}=NAME"
    )


def _value(row: Row, name: str) -> Any:
    if name in row:
        return row[name]
    outer, _, inner = name.partition(".")
    nested = row.get(outer)
    return nested.get(inner) if isinstance(nested, dict) else None


def _style(rows: Sequence[Row], answer: str) -> Format:
    texts = [value for row in rows[:200] if isinstance(value := _value(row, answer), str)]
    if texts and all(re.search(r"^\s*####", text, re.MULTILINE) for text in texts):
        return "gsm8k"
    if texts and answer == "solution" and any(last_boxed(text) is not None for text in texts):
        return "boxed"
    return "plain"


def _reference(value: Any, style: Format) -> str | None:
    """Return the reference answer as text; None when there is none."""
    if isinstance(value, list):
        parts = [_reference(item, style) for item in value]
        return ", ".join(part for part in parts if part is not None) or None
    if value is None:
        return None
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = str(value).strip()
    if style == "gsm8k":
        text = text.rpartition("####")[2].strip() if "####" in text else ""
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    elif style == "boxed":
        text = (last_boxed(text) or "").strip()
    return text or None


def _ids(rows: Sequence[Row], named: str | None, name: str) -> list[str]:
    values = [str(_value(row, named)) if named else str(number) for number, row in enumerate(rows)]
    if len(set(values)) != len(values):  # names that are not unique name nothing
        values = [str(number) for number in range(len(rows))]
    return [f"{name}/{value}" for value in values]
