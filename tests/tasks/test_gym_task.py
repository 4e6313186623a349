from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tepo.core.errors import InputError
from tepo.tasks import Grader, Problem, RewardConfig, TaskConfig, load_problems, load_task
from tepo.tasks.gym import family_size
from tepo.tasks.problem import normalised
from tepo.tasks.rewards.gym import answer_of, harmless

pytest.importorskip("reasoning_gym", reason="the extra 'gym' is not installed")

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
WRITERS = (
    "n_queens",
    "binary_matrix",
    "string_insertion",
    "spiral_matrix",
    "countdown",
    "puzzle24",
    "polynomial_multiplication",
    "simple_integration",
    "intermediate_integration",
)


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(RewardConfig(workers=1, timeout_s=3)) as ready:
        yield ready


def task(family: str, **fields: Any) -> Any:
    return load_task(TaskConfig.model_validate({"source": f"gym:{family}", "held_out": 3, **fields}))


def gym_problem(family: str, **fields: Any) -> Problem:
    problem: Problem = task(family, **fields).train.problem(0)
    return problem


def test_items_are_addressed_by_seed_and_draw() -> None:
    config = TaskConfig.model_validate({"source": "gym:chain_sum", "held_out": 20})
    first, again, other = (load_task(config, seed=seed) for seed in (1, 1, 2))
    assert first.train.size is None
    assert first.train.problem(7) == again.train.problem(7)
    assert [first.train.problem(draw).question for draw in (700, 701)] == [
        again.train.problem(draw).question for draw in (700, 701)
    ]
    assert first.held_out == other.held_out
    assert first.train.problem(7) != other.train.problem(7)


def test_held_out_questions_are_distinct_and_never_drawn() -> None:
    loaded = task("chain_sum", options=SUMS, held_out=60)
    held_out = {normalised(problem.question) for problem in loaded.held_out}
    drawn = {normalised(loaded.train.problem(draw).question) for draw in range(500)}
    assert len(held_out) == 60
    assert not held_out & drawn
    assert "gym:chain_sum: 60 distinct questions held out" in loaded.report


def test_a_small_family_says_how_small_it_is() -> None:
    with pytest.raises(InputError, match=r"only about \d+ distinct questions .* not 5000 to set apart"):
        task("chain_sum", options=SUMS, held_out=5000)


def test_by_default_about_a_tenth_at_most_200_is_held_out() -> None:
    few = load_task(TaskConfig.model_validate({"source": "gym:chain_sum", "options": SUMS}))  # has 200 questions
    assert 15 <= len(few.held_out) <= 25
    assert len(load_task(TaskConfig.model_validate({"source": "gym:chain_sum"})).held_out) == 200


@pytest.mark.parametrize(("distinct", "draws", "size"), [(200, 211, 1990), (100, 1000, 100), (63, 100, 99.6)])
def test_the_size_of_a_family_is_estimated_from_repeats(distinct: int, draws: int, size: float) -> None:
    assert family_size(distinct, draws) == pytest.approx(size, rel=0.05)
    assert family_size(distinct, distinct) == math.inf


def test_evaluation_takes_the_held_out_questions() -> None:
    config = TaskConfig.model_validate({"source": "gym:gcd", "held_out": 4})
    assert load_problems(config) == list(load_task(config).held_out)


def test_worked_examples_are_questions_of_their_own() -> None:
    loaded = task("chain_sum", options=SUMS, prompt={"few_shot": 3, "template": "{question}"}, chat=False)
    shown = loaded.held_out[0].messages[0]["content"].split("\n")
    assert len(shown) == 4
    drawn = {loaded.train.problem(draw).question for draw in range(500)}
    assert not any(line.startswith(question) for line in shown[:3] for question in drawn)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("chain_sums", {}, r"reasoning-gym has no family 'chain_sums'\. Did you mean 'chain_sum'\?"),
        ("chain_sum", {"options": {"max_term": 3}}, r"task\.options\.max_term: .* Did you mean 'max_terms'\?"),
        ("chain_sum", {"options": {"min_terms": -3}}, r"gym:chain_sum refuses \{'min_terms': -3\}"),
        ("chain_sum", {"options": {"seed": 3}}, r"task\.options\.seed"),
        ("composite", {}, r"list its families under task\.mixture"),
    ],
)
def test_wrong_families_and_options_are_named(family: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        task(family, **fields)


def test_only_a_full_score_passes(grader: Grader) -> None:
    problem = gym_problem("chain_sum", options=SUMS)
    right, wordy, tagged, empty = grader.grade(
        [problem] * 4, [problem.answer or "", f"It is {problem.answer}", f"<answer> {problem.answer} </answer>", ""]
    )
    assert (right.score, right.passed, tagged.score, tagged.passed) == (1.0, True, 1.0, True)
    assert wordy.score is not None
    assert 0 < wordy.score < 1
    assert not wordy.passed
    assert (empty.score, empty.passed, empty.answer) == (0.0, False, None)


@pytest.mark.parametrize("family", WRITERS)
def test_a_text_that_would_write_a_file_writes_none(grader: Grader, family: str, tmp_path: Path) -> None:
    problem = gym_problem(family)
    target = tmp_path / "written"
    attempts = [
        f"open({str(target)!r}, 'w').write('x')",
        f"__import__('os').system('touch {target}')",
        f"[open({str(target)!r}, 'w')]",
        f"sin.__class__.__base__.__subclasses__() or open({str(target)!r}, 'w')",
    ]
    grades = grader.grade([problem] * len(attempts), attempts)
    assert not target.exists()
    assert not any(grade.passed for grade in grades)


@pytest.mark.parametrize("family", WRITERS)
def test_what_these_families_want_is_still_judged(grader: Grader, family: str) -> None:
    problem = gym_problem(family)
    assert harmless(family, str(problem.answer))
    assert grader.grade([problem], [str(problem.answer)])[0].passed


def test_equal_expressions_pass_where_the_family_evaluates(grader: Grader) -> None:
    problem = gym_problem("countdown")
    answer = str(problem.answer)
    assert grader.grade([problem], [f"0*0+({answer})".removeprefix("0*0+")])[0].passed
    product = gym_problem("polynomial_multiplication")
    assert grader.grade([product], [f"({product.answer}) + 0*x"])[0].passed


def test_an_answer_that_never_ends_is_cut_and_scored_zero() -> None:
    endless, fine = gym_problem("countdown"), gym_problem("chain_sum")
    with Grader(RewardConfig(workers=2, timeout_s=1)) as short:
        grades = short.grade([fine, endless, fine], [str(fine.answer), "9**9**9**9", str(fine.answer)])
    assert [grade.score for grade in grades] == [1.0, 0.0, 1.0]
    assert [grade.timed_out for grade in grades] == [False, True, False]


def test_a_scorer_that_raises_is_an_error_with_its_response(grader: Grader) -> None:
    problem = gym_problem("prime_factorization")
    grade = grader.grade([problem], ["seven times nine"])[0]
    assert (grade.score, grade.passed) == (0.0, False)
    assert str(grade.error).startswith("ValueError: invalid literal for int()")


def test_a_scorer_that_passes_any_text_is_not_used(grader: Grader) -> None:
    problem = gym_problem("game_of_life_halting")
    wrong, right = grader.grade([problem] * 2, ["any text at all", str(problem.answer)])
    assert (wrong.passed, right.passed) == (False, True)


def test_the_text_in_the_last_answer_tags_is_judged() -> None:
    assert answer_of("<answer>1</answer> no <answer>\n2 </answer>") == "2"
    assert answer_of("  just text ") == "just text"


@pytest.mark.parametrize(
    ("family", "text", "allowed"),
    [
        ("chain_sum", "__import__('os')", True),  # never evaluated by its scorer
        ("countdown", "(3 + 4)*2/7 - 1", True),
        ("countdown", "3.5*2", True),
        ("countdown", "exit()", False),
        ("countdown", "(1).real", False),
        ("countdown", "'3'", False),
        ("countdown", "a := 3", False),
        ("spiral_matrix", "[1, 2, 3]", True),
        ("spiral_matrix", "[i for i in (1, 2)]", False),
        ("binary_matrix", "1 0\n0 1", True),
        ("string_insertion", "['A', 'B']", True),
        ("string_insertion", "ABCDE", True),
        ("n_queens", "[['_', 'Q']]", True),
        ("simple_integration", "x**2*sin(x) + C", True),
        ("simple_integration", "eval(x)", False),
        ("simple_integration", "x" * 5000, False),
    ],
)
def test_evaluating_families_see_only_what_their_answers_need(family: str, text: str, allowed: bool) -> None:
    assert harmless(family, text) is allowed


@pytest.mark.slow
def test_every_family_makes_problems_and_survives_odd_answers() -> None:
    from reasoning_gym.factory import DATASETS

    families = sorted(set(DATASETS) - {"composite", "acre"})  # acre takes seconds to make its first item
    problems = [gym_problem(family, held_out=0) for family in families]
    with Grader(RewardConfig(workers=2, timeout_s=20)) as ready:
        for text in ("", "[]", "0", "None", "\\boxed{}", "a b c"):
            grades = ready.grade(problems, [text] * len(problems))
            assert not any(grade.timed_out for grade in grades)
            assert all(grade.score is not None and 0 <= grade.score <= 1 for grade in grades)
        answered = [problem for problem in problems if problem.answer is not None]
        golds = ready.grade(answered, [str(problem.answer) for problem in answered])
    assert all(grade.passed for grade in golds)
