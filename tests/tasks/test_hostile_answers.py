"""Pairs written to deceive a grader, over every type of answer, and a public record graded again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tepo.tasks import Grader, Problem, RewardConfig
from tepo.tasks.rewards.forms import as_interval, decide, tidy

HOSTILE = Path(__file__).with_name("hostile.jsonl")
Make = Callable[..., Problem]


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(RewardConfig(kind="math", workers=1)) as made:
        yield made


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def test_the_hostile_set_is_large_balanced_and_free_of_repeats() -> None:
    rows = read(HOSTILE)
    pairs = {(row["reference"], row.get("answer", row.get("text"))) for row in rows}
    assert len(pairs) == len(rows) >= 150
    assert 0.4 < sum(row["equal"] for row in rows) / len(rows) < 0.5
    assert len({row["kind"] for row in rows}) >= 25


def test_no_hostile_answer_is_accepted_and_at_most_two_are_rejected(grader: Grader, problem: Make) -> None:
    rows = read(HOSTILE)
    texts = [row["text"] if "text" in row else rf"\boxed{{{row['answer']}}}" for row in rows]
    grades = grader.grade([problem(row["reference"]) for row in rows], texts)
    told = [(row["reference"], text, row["equal"], grade) for row, text, grade in zip(rows, texts, grades, strict=True)]
    false_accepts = [(reference, text) for reference, text, equal, grade in told if grade.passed and not equal]
    false_rejects = [(reference, text) for reference, text, equal, grade in told if equal and not grade.passed]
    print(f"{len(rows)} pairs: {len(false_accepts)} false accepts, {len(false_rejects)} false rejects")
    assert false_accepts == []
    assert len(false_rejects) <= 2, false_rejects
    assert not any(grade.error for *_, grade in told)


@pytest.mark.skipif("TEPO_DATA" not in os.environ, reason="TEPO_DATA does not name the folder of shared data")
def test_400_recorded_scores_are_graded_alike_and_every_disagreement_is_named(grader: Grader, problem: Make) -> None:
    rows = read(Path(os.environ["TEPO_DATA"], "grading", "qwen_math_cot_50.jsonl"))
    cases = [(row["gt"], text, score) for row in rows for text, score in zip(row["code"], row["score"], strict=True)]
    grades = grader.grade([problem(reference) for reference, _, _ in cases], [text for _, text, _ in cases])
    disagreements = [
        f"reference {reference!r}, found {grade.answer!r}: recorded {score}, graded {grade.passed}"
        for (reference, _, score), grade in zip(cases, grades, strict=True)
        if grade.passed != score
    ]
    assert len(cases) == 400
    # None is known; one that appears is to be judged by hand and written here with who is right.
    assert disagreements == []


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("1 < x < 2", "(1, 2)"),
        (r"1 \le x < 2", "[1, 2)"),
        (r"0\leqslant k\leqslant 4", "[0, 4]"),
        ("x<3", r"(-\infty, 3)"),
        (r"x \geq -2", r"[-2, \infty)"),
        ("x = 3", "x = 3"),
        ("5", "5"),
    ],
)
def test_inequalities_in_one_letter_are_intervals(text: str, interval: str) -> None:
    assert as_interval(text) == interval


@pytest.mark.parametrize(
    ("reference", "answer", "told"),
    [
        ("50", r"50\%", True),
        ("0.5", r"50\%", False),
        ("0.333", "1/3", False),
        ("1011_2", "1011_{3}", False),
        ("ABC", "CAB", False),
        (r"\text{even}", "Even", True),
        (r"10\text{ minutes}", r"10\text{ hours}", False),
        (r"10\text{ minutes}", r"10\text{ min}", None),
        (r"10\text{ apples}", r"10\text{ pears}", None),
        ("ab", "ba", None),
        ("x+1", "1+x", None),
        (r"\{1,2\}", "(1,2)", False),
        ("(1,2)", "1,2", None),
    ],
)
def test_what_text_alone_decides(reference: str, answer: str, told: bool | None) -> None:
    assert decide(tidy(reference), tidy(answer)) is told
