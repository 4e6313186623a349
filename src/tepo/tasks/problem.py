"""The problem: what is asked, what is right, and where it came from."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Problem:
    """One question as the policy sees it and as a reward judges it.

    `messages` are chat messages (`role`, `content`); a task that is not a chat has one `user` message with the
    whole text. `question` is the bare question, without template or worked examples: two problems with the same
    question are the same problem. `answer` is the reference; None where only the family's own scorer can judge.
    """

    id: str
    messages: tuple[Mapping[str, str], ...]
    question: str
    answer: str | None
    metadata: Mapping[str, object] = field(default_factory=dict)


def normalised(question: str) -> str:
    """Return the text by which questions are compared: case, width and spacing of characters do not count."""
    return " ".join(unicodedata.normalize("NFKC", question).casefold().split())


def distinct(problems: Iterable[Problem]) -> list[Problem]:
    """Return the first problem of every normalised question, in order."""
    first: dict[str, Problem] = {}
    for problem in problems:
        first.setdefault(normalised(problem.question), problem)
    return list(first.values())
