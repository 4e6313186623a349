from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tepo.tasks.rewards.extract import after, as_number, canonical_number, last_boxed, numbers, plain
from tepo.tasks.rewards.simple import exact, numeric


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{17}.", "17"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {x} and \fbox{y}", "y"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{a\}b}", r"a\}b"),
        (r"\boxed{}", ""),
        (r"\boxed{", None),
        ("boxed{3}", None),
        ("", None),
        (r"} \boxed{1} {", "1"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{ {1 }", None),
        (r"\boxed{\boxed{1} + 2}", "1"),
        (r"\boxed{" * 100_000, None),
    ],
)
def test_the_last_complete_box_counts(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" 17\n12 + 5", [17, 12, 5]),
        ("-7 and +3 and \N{MINUS SIGN}2", [-7, 3, -2]),
        ("12-5=7", [12, 5, 7]),
        ("1,234 and 1,23 and 12,345,678", [1234, 1, 23, 12345678]),
        ("3.5 .5 4. $2.50", [Fraction(7, 2), Fraction(1, 2), 4, Fraction(5, 2)]),
        ("1/2 and 6 / 4", [Fraction(1, 2), Fraction(3, 2)]),
        ("5/0", [5, 0]),
        ("2e3 1E-2 3em", [2000, Fraction(1, 100), 3]),
        ("x2 v1.2 a_3", []),
        ("17abc", [17]),
        ("9" * 70 + " 8", [8]),
        ("1e9999", []),
        ("", []),
    ],
)
def test_numbers_are_read_as_people_write_them(text: str, expected: list[Fraction | int]) -> None:
    assert numbers(text) == expected


@given(st.text(max_size=200))
def test_no_text_breaks_the_extraction(text: str) -> None:
    assert all(isinstance(value, Fraction) for value in numbers(text))
    last_boxed(text)
    as_number(text)
    plain(text)


@given(st.fractions(max_denominator=10**6))
def test_a_number_survives_its_canonical_spelling(value: Fraction) -> None:
    assert as_number(canonical_number(value)) == value


@pytest.mark.parametrize(("text", "value"), [(" $18. ", 18), ("1,000", 1000), ("2 3", None), ("x", None), ("", None)])
def test_as_number_wants_exactly_one(text: str, value: int | None) -> None:
    assert as_number(text) == value


def test_after_a_marker_that_is_absent_there_is_nothing() -> None:
    assert after("a</think>b</think>c", "</think>") == "c"
    assert after("abc", "</think>") == ""
    assert after("abc", None) == "abc"


def test_plain_text_has_no_latex_dress() -> None:
    assert plain(r"$\text{ (A) }$.") == plain("(a)")
    assert plain(r"\mathrm{Tuesday}") == "tuesday"


@pytest.mark.parametrize(
    ("response", "which", "score"),
    [
        (" 17\n12 + 5 = 18", "first-line", 1.0),
        ("\n17", "first-line", 0.0),
        ("18 no, 17", "first-line", 0.0),
        ("17.0", "first-line", 1.0),
        ("34/2", "first-line", 1.0),
        ("It is 3, so 17", "last", 1.0),
        ("It is 17, not 3", "first", 1.0),
        (r"It is \boxed{17}, as 3 < 5", "last", 1.0),
        ("none", "last", 0.0),
        ("", "first-line", 0.0),
    ],
)
def test_numeric_reads_the_number_it_is_told_to(response: str, which: str, score: float) -> None:
    assert numeric(response, "17", number=which).score == score  # type: ignore[arg-type]


def test_numeric_is_exact_unless_a_tolerance_is_given() -> None:
    assert numeric("0.3333", "1/3").score == 0.0
    assert numeric("0.3333", "1/3", tolerance=1e-3).score == 1.0
    assert numeric("0.1", "1/10").score == 1.0
    assert numeric("5", "no number").score is None
    assert numeric("5,000", "5000").answer == "5000"


def test_exact_compares_text_without_outer_and_double_spaces() -> None:
    assert exact("  to  be ", "to be").score == 1.0
    assert exact("To be", "to be").score == 0.0
    assert exact("To be", "to be", ignore_case=True).score == 1.0
    assert exact("", "").score == 0.0
