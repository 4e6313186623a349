"""Scorers that only look at text: cheap, linear, run in the main process."""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from tepo.tasks.rewards.extract import as_number, canonical_number, last_boxed, numbers
from tepo.tasks.rewards.verdict import Verdict


def exact(response: str, answer: str, *, ignore_case: bool = False) -> Verdict:
    """Score 1 when the response is the answer, spaces at the ends and between words aside."""
    given, right = " ".join(response.split()), " ".join(answer.split())
    if ignore_case:
        given, right = given.casefold(), right.casefold()
    return Verdict(float(bool(given) and given == right), given or None)


def numeric(
    response: str, answer: str, *, number: Literal["first-line", "first", "last"] = "last", tolerance: float = 0.0
) -> Verdict:
    """Score 1 when the response's number equals the answer's, compared exactly or within a relative `tolerance`.

    `number` says which number of the response counts. With "first" and "last" a number in the last \\boxed{}
    comes before the others. An answer that is not one number cannot be judged: score None.
    """
    right = as_number(answer)
    if right is None:
        return Verdict(None)
    given = _number(response, number)
    if given is None:
        return Verdict(0.0)
    close = abs(given - right) <= Fraction(tolerance) * abs(right)
    return Verdict(float(close), canonical_number(given))


def _number(response: str, which: Literal["first-line", "first", "last"]) -> Fraction | None:
    if which == "first-line":
        found = numbers(response.partition("\n")[0])
        return found[0] if found else None
    box = last_boxed(response)
    found = numbers(box if box is not None else response)
    return (found[0] if which == "first" else found[-1]) if found else None
