"""An evaluation as it grows: one line a question, so that one that was killed goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tepo.core.errors import InputError
from tepo.core.files import append_line, read_lines, write_text
from tepo.evaluation.results import QuestionResult, question_from
from tepo.tasks.problem import Problem


@dataclass(frozen=True)
class Store:
    """A file whose first line has the settings and whose others have one question's result each.

    It belongs to one evaluation: other settings or questions are refused, since their results would be mixed.
    """

    path: Path

    def open(self, settings: Mapping[str, Any], problems: Sequence[Problem]) -> dict[int, QuestionResult]:
        """Return the results there are by place of their question, making the file where there is none."""
        head: dict[str, Any] = {"settings": dict(settings), "questions": [problem.id for problem in problems]}
        lines = read_lines(self.path) if self.path.exists() else []
        if not lines:
            self._write([head])
            return {}
        there: Mapping[str, Any] = lines[0].get("settings", {})
        differing = sorted(key for key in {*settings, *there} if settings.get(key) != there.get(key))
        if lines[0].get("questions") != head["questions"]:
            differing.append("questions")
        if differing:
            raise InputError(
                f"{self.path} holds the beginning of another evaluation ({', '.join(differing)} differ); continue "
                "that one with its own settings, or remove the file"
            )
        self._write(lines)  # without a line that a crash cut short, to which the next one would be glued
        return {int(line["place"]): question_from(line["result"]) for line in lines[1:]}

    def add(self, place: int, result: QuestionResult) -> None:
        """Append the result of the question at `place`."""
        append_line(self.path, {"place": place, "result": _plain(result)})

    def remove(self) -> None:
        """Remove the file, once the whole evaluation is written elsewhere."""
        self.path.unlink(missing_ok=True)

    def _write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        write_text(self.path, "".join(json.dumps(line, ensure_ascii=True) + "\n" for line in lines))


def _plain(result: QuestionResult) -> dict[str, Any]:
    """Return a result as plain values; a lone surrogate, which UTF-8 cannot hold, is written as its escape."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(result)))
    return plain
