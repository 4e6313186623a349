"""Mathematical equality through Math-Verify; in a worker, since some expressions never finish.

Which expression is judged is ours and stated: the content of the last complete \\boxed{}; without a box, in lenient
mode, what Math-Verify finds last in the response's end. Nothing never equals anything.
"""

from __future__ import annotations

import logging
from typing import Any

from tepo.tasks.rewards.extract import as_number, canonical_number, last_boxed, plain
from tepo.tasks.rewards.guard import guarded
from tepo.tasks.rewards.verdict import Verdict

TAIL = 4000  # characters at the end of a response in which an unboxed answer is looked for


def equal(response: str, answer: str, *, strict: bool = False) -> Verdict:
    """Score 1 when the response's answer equals the reference, 0 otherwise, None without a usable reference."""
    gold_text = plain(_content(answer))
    if not gold_text:
        return Verdict(None)
    box = last_boxed(response)
    if box is None and strict:
        return Verdict(0.0)
    if box is not None and not plain(box):
        return Verdict(0.0)
    if box is not None and plain(box) == gold_text:
        return Verdict(1.0, _canonical_text(box))
    given = _parse(rf"\boxed{{{box}}}" if box is not None else response[-TAIL:])
    if not given:
        return Verdict(0.0, plain(box) if box is not None else None)
    gold = _parse_reference(answer)
    right = bool(gold) and _verify(gold, given)
    return Verdict(float(right), _canonical(given, box))


def _content(answer: str) -> str:
    box = last_boxed(answer)
    return box if box is not None else answer


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    parsed: list[Any] = parse(text, parsing_timeout=None)
    return parsed


def _parse_reference(answer: str) -> list[Any]:
    if last_boxed(answer) is None and "$" not in answer:
        return _parse(rf"\boxed{{{answer}}}") or _parse(answer)
    return _parse(answer)


def _verify(gold: list[Any], given: list[Any]) -> bool:
    from math_verify import verify

    return bool(verify(gold, given, timeout_seconds=None))


def _canonical(given: list[Any], box: str | None) -> str:
    """Return one spelling for equal answers where that is cheap: numbers as fractions, expressions as parsed."""
    from sympy import Float, Rational  # type: ignore[import-untyped]

    expression = given[0]
    if isinstance(expression, Float):
        return str(Rational(str(expression)))
    if box is not None and (number := as_number(box)) is not None:
        return canonical_number(number)
    return str(expression)[:500]


def _canonical_text(box: str) -> str:
    number = as_number(box)
    return canonical_number(number) if number is not None else plain(box)


def load() -> Any:
    """Return the worker's scorer, with the libraries imported before the first clock runs."""
    import math_verify  # noqa: F401

    logging.disable(logging.CRITICAL)  # it warns, a line a call, that its own time limit is off: ours is on

    def score(payload: dict[str, Any]) -> dict[str, Any]:
        with guarded():
            verdict = equal(payload["response"], payload["answer"], strict=payload["strict"])
        return {"score": verdict.score, "answer": verdict.answer}

    return score
