"""Mathematical equality through Math-Verify; in a worker, since some expressions never finish.

Which expression is judged is ours and stated: the content of the last complete \\boxed{}; without a box, in lenient
mode, what Math-Verify finds last in the response's end. Nothing never equals anything.
"""

from __future__ import annotations

import logging
from typing import Any

from tepo.tasks.rewards.extract import as_number, canonical_number, last_boxed, plain
from tepo.tasks.rewards.forms import as_interval, decide, is_choice, is_interval, stated_choice, tidy
from tepo.tasks.rewards.guard import guarded
from tepo.tasks.rewards.verdict import Verdict

TAIL = 4000  # characters at the end of a response in which an unboxed answer is looked for


def equal(response: str, answer: str, *, strict: bool = False) -> Verdict:
    """Score 1 when the response's answer equals the reference, 0 otherwise, None without a usable reference."""
    if not plain(_content(answer)):
        return Verdict(None)
    box = last_boxed(response)
    if box is not None:
        return _judge_box(box, answer)
    return Verdict(0.0) if strict else _judge_text(response, answer)


def _judge_box(box: str, answer: str) -> Verdict:
    """Compare what stands in a box with the reference: as text, by the rules of `forms`, then as mathematics."""
    reference, bare = tidy(_content(answer)), tidy(box)
    if not plain(box):
        return Verdict(0.0)
    if plain(box) == plain(_content(answer)):
        return Verdict(1.0, _canonical_text(box))
    told = decide(reference, bare)
    if told is not None and as_number(bare) is not None:
        return Verdict(float(told), _canonical_text(bare))
    given = _parse(rf"\boxed{{{bare}}}")
    found = _canonical(given, box) if given else plain(box)
    if told is not None or not given:
        return Verdict(float(bool(told)), found)
    gold = _parse_reference(answer)
    right = (bool(gold) and _verify(gold, given)) or _same_interval(reference, bare)
    return Verdict(float(right), found)


def _judge_text(response: str, answer: str) -> Verdict:
    """Compare what Math-Verify finds last in the response's end; a choice of letters must be stated as the answer."""
    letter, chosen = is_choice(_content(answer)), stated_choice(response)
    if letter is not None and chosen is not None:
        return Verdict(float(chosen == letter), plain(chosen))
    given = _parse(response[-TAIL:])
    if not given:
        return Verdict(0.0)
    gold = _parse_reference(answer)
    return Verdict(float(bool(gold) and _verify(gold, given)), _canonical(given, None))


def _same_interval(reference: str, answer: str) -> bool:
    """Return whether an interval on one side equals an inequality on the other, ends and their kind alike."""
    sides = [as_interval(text) for text in (reference, answer)]
    if [*sides] == [reference, answer] or not all(is_interval(side) for side in sides):
        return False
    shapes = [side.replace("\\left", "").replace("\\right", "").strip() for side in sides]
    if any(shapes[0][place] != shapes[1][place] for place in (0, -1)):
        return False
    ends = [[_parse(rf"\boxed{{{end}}}") for end in shape[1:-1].split(",")] for shape in shapes]
    return all(gold and given and _verify(gold, given) for gold, given in zip(*ends, strict=True))


def _content(answer: str) -> str:
    box = last_boxed(answer)
    return box if box is not None else answer


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    parsed: list[Any] = parse(text, parsing_timeout=None)
    return parsed


def _parse_reference(answer: str) -> list[Any]:
    content = tidy(_content(answer))
    return _parse(rf"\boxed{{{content}}}") or _parse(answer)


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
