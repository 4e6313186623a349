"""Scorers that run a regular expression of the user's; in a worker, since such an expression may never end."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from tepo.tasks.rewards.simple import exact
from tepo.tasks.rewards.verdict import Verdict


@lru_cache(maxsize=32)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


def matches(response: str, pattern: str) -> Verdict:
    """Score 1 when `pattern` matches the whole response."""
    return Verdict(float(_compiled(pattern).fullmatch(response.strip()) is not None))


def exact_within(response: str, answer: str, pattern: str, *, ignore_case: bool) -> Verdict:
    """Score 1 when the first group of the last match of `pattern` is the answer."""
    found = [match.group(1) if match.re.groups else match.group() for match in _compiled(pattern).finditer(response)]
    return exact(found[-1] or "", answer, ignore_case=ignore_case) if found else Verdict(0.0)


def load() -> Any:
    """Return the worker's scorer."""

    def score(payload: dict[str, Any]) -> dict[str, Any]:
        if payload["kind"] == "format":
            verdict = matches(payload["response"], payload["pattern"])
        else:
            verdict = exact_within(
                payload["response"], payload["answer"], payload["pattern"], ignore_case=payload["ignore_case"]
            )
        return {"score": verdict.score, "answer": verdict.answer}

    return score
