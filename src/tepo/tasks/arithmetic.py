"""The built-in arithmetic family: sums, differences and products of whole numbers, in any number.

Expressions are numbered: every index below `ArithmeticPool.size` is one expression and no two are the same text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tepo.tasks.config import Example
from tepo.tasks.problem import Problem
from tepo.tasks.prompts import Prompter
from tepo.tasks.stream import permuted

BARE_TEMPLATE = "{question} ="
CHAT_TEMPLATE = "What is {question}? Answer with the number only."
BARE_EXAMPLES = 4

Digits = int | tuple[int, int]


class ArithmeticOptions(BaseModel):
    """Size and kind of the expressions."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    terms: int | None = Field(default=None, ge=2, le=20)
    """Numbers in an expression; by default as many as `digits` lists, else 2."""
    digits: int | tuple[Digits, ...] = (2, 1)
    """Digits of every number, or of each: `2`, `[2, 1]`, `[[1, 3], 1]` (from 1 to 3)."""
    operators: tuple[Literal["+", "-", "*"], ...] = ("+", "-", "*")
    """Operators drawn between the numbers; products bind first."""

    @model_validator(mode="after")
    def _sizes(self) -> ArithmeticOptions:
        listed = None if isinstance(self.digits, int) else len(self.digits)
        if self.terms and listed and listed != self.terms:
            raise ValueError(f"digits lists {listed} numbers, terms says {self.terms}")
        if listed is not None and listed < 2:
            raise ValueError("digits needs a number for each of at least two terms")
        if not self.operators or len(set(self.operators)) != len(self.operators):
            raise ValueError("operators must name at least one, none twice")
        spans = [self.digits] if isinstance(self.digits, int) else self.digits
        for low, high in ((span, span) if isinstance(span, int) else span for span in spans):
            if not 1 <= low <= high <= 18:
                raise ValueError("a number has between 1 and 18 digits, a range runs from low to high")
        return self

    def ranges(self) -> list[tuple[int, int]]:
        """Return the lowest and highest value of each number; one digit means 1 to 9."""
        each: list[Digits] = [self.digits] * (self.terms or 2) if isinstance(self.digits, int) else list(self.digits)
        spans = [(size, size) if isinstance(size, int) else size for size in each]
        return [(10 ** (low - 1), 10**high - 1) for low, high in spans]


@dataclass(frozen=True)
class ArithmeticPool:
    """All expressions of one kind, numbered, as problems."""

    options: ArithmeticOptions
    prompter: Prompter

    @property
    def size(self) -> int:
        """Number of distinct expressions."""
        ranges = self.options.ranges()
        operands = math.prod(high - low + 1 for low, high in ranges)
        choices: int = len(self.options.operators) ** (len(ranges) - 1)
        return operands * choices

    def get(self, index: int) -> Problem:
        """Return the problem of expression number `index`."""
        expression, value = self.expression(index)
        return Problem(
            id=f"arithmetic/{expression.replace(' ', '')}",
            messages=self.prompter.messages(expression),
            question=expression,
            answer=str(value),
            metadata={
                "source": "arithmetic",
                "scorer": "numeric",
                "number": "last" if self.prompter.chat is True else "first-line",
            },
        )

    def expression(self, index: int) -> tuple[str, int]:
        """Return expression number `index` and its value."""
        ranges, operators = self.options.ranges(), self.options.operators
        numbers, chosen, rest = [], [], index
        for low, high in ranges:
            rest, offset = divmod(rest, high - low + 1)
            numbers.append(low + offset)
        for _ in ranges[1:]:
            rest, offset = divmod(rest, len(operators))
            chosen.append(operators[offset])
        text = str(numbers[0])
        for operator, number in zip(chosen, numbers[1:], strict=True):
            text += f" {operator} {number}"
        return text, value_of(numbers, chosen)


def value_of(numbers: Sequence[int], operators: Sequence[str]) -> int:
    """Return the value of numbers joined by operators, products first."""
    total, product = 0, numbers[0]
    for operator, number in zip(operators, numbers[1:], strict=True):
        if operator == "*":
            product *= number
        else:
            total, product = total + product, number if operator == "+" else -number
    return total + product


def worked_examples(
    pool: ArithmeticPool, count: int, start: int, key: int
) -> tuple[tuple[Example, ...], tuple[int, ...]]:
    """Choose `count` expressions at or after place `start` of the permutation `key`, one operator after another.

    Return them with their places, which training then skips. A place is passed over while its first operator is
    not the one whose turn it is, so that every operator is shown when there are examples enough.
    """
    operators = pool.options.operators
    examples: list[Example] = []
    places: list[int] = []
    for number in range(count):
        free = [place for place in range(start, min(pool.size, start + 64 * (count + 1))) if place not in places]
        wanted = operators[number % len(operators)]
        turns = (place for place in free if _first_operator(pool, permuted(place, pool.size, key)) == wanted)
        place = next(turns, free[0])
        text, value = pool.expression(permuted(place, pool.size, key))
        places.append(place)
        examples.append(Example(question=text, answer=str(value)))
    return tuple(examples), tuple(sorted(places))


def _first_operator(pool: ArithmeticPool, index: int) -> str:
    return pool.expression(index)[0].split()[1]
