from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tepo.core.errors import InputError, WorkError
from tepo.tasks import Grade, Grader, Problem, RewardConfig

Make = Callable[..., Problem]


@pytest.fixture
def function(tmp_path: Path) -> Callable[..., str]:
    """Write a reward function to a file and return its reference."""

    def write(body: str, name: str = "reward") -> str:
        path = tmp_path / "own.py"
        path.write_text(f"def {name}(problems, responses):\n" + textwrap.indent(textwrap.dedent(body), "    "))
        return f"{path}:{name}"

    return write


def grades(problems: list[Problem], responses: list[str], **config: Any) -> list[Grade]:
    with Grader(RewardConfig.model_validate({"timeout_s": 20.0, **config})) as grader:
        return grader.grade(problems, responses)


def test_auto_picks_the_scorer_that_suits_each_problem(problem: Make) -> None:
    sums = problem("17", scorer="numeric", number="first-line")
    maths = problem(r"\frac{1}{2}")
    first, second, third = grades([sums, maths, sums], [" 17\n18", r"\boxed{0.5}", "18\n17"])
    assert first == Grade(1.0, True, {"numeric": 1.0}, answer="17")
    assert second == Grade(1.0, True, {"math": 1.0}, answer="1/2")
    assert third == Grade(0.0, False, {"numeric": 0.0}, answer="18")


def test_cheap_rewards_start_no_process(problem: Make) -> None:
    with Grader(RewardConfig(kind="numeric")) as grader:
        grader.grade([problem()] * 3, ["4", "5", ""])
        assert not grader._pools


def test_nothing_to_grade_is_no_grade() -> None:
    assert grades([], []) == []
    assert grades([], [], parts=[{"kind": "numeric"}]) == []


def test_problems_and_responses_must_match(problem: Make) -> None:
    with Grader() as grader, pytest.raises(ValueError, match="1 problems for 2 responses"):
        grader.grade([problem()], ["a", "b"])


def test_a_problem_without_reference_is_not_scorable(problem: Make) -> None:
    assert grades([problem(None)], ["4"], kind="numeric") == [Grade(None, False, {"numeric": None})]
    assert grades([problem("4")], ["4"], kind="gym") == [Grade(None, False, {"gym": None})]


def test_only_what_follows_the_marker_is_judged(problem: Make) -> None:
    responses = ["<think>4</think> 5", "<think>5</think> 4", "4"]
    scores = [grade.score for grade in grades([problem()] * 3, responses, kind="numeric", answer_after="</think>")]
    assert scores == [0.0, 1.0, 0.0]


def test_format_matches_the_whole_response(problem: Make) -> None:
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    responses = ["<think>a\nb</think>\n<answer>4</answer>", "<answer>4</answer>", "x <think></think><answer></answer>"]
    found = grades([problem()] * 3, responses, kind="format", pattern=pattern)
    assert [grade.score for grade in found] == [1.0, 0.0, 0.0]


def test_exact_with_a_pattern_takes_its_last_group(problem: Make) -> None:
    responses = ["Answer: 3\nAnswer: 4", "Answer: 4\nAnswer: 3", "4"]
    found = grades([problem()] * 3, responses, kind="exact", pattern=r"Answer: (\w+)")
    assert [(grade.score, grade.answer) for grade in found] == [(1.0, "4"), (0.0, "3"), (0.0, None)]


def test_an_expression_that_backtracks_for_ever_is_cut(problem: Make) -> None:
    found = grades([problem()] * 2, ["a" * 60 + "!", "aaaa"], kind="format", pattern="(a|aa)+$", timeout_s=1.5)
    assert [grade.timed_out for grade in found] == [True, False]
    assert [grade.score for grade in found] == [0.0, 1.0]


def test_a_weighted_sum_adds_and_the_first_reward_decides_a_pass(problem: Make) -> None:
    parts = [
        {"kind": "numeric", "name": "right"},
        {"kind": "format", "pattern": r"<answer>.*</answer>", "weight": 0.25},
    ]
    found = grades([problem()] * 3, ["<answer>4</answer>", "4", "<answer>5</answer>"], parts=parts)
    assert [grade.score for grade in found] == [1.25, 1.0, 0.25]
    assert [grade.passed for grade in found] == [True, True, False]
    assert found[0].parts == {"right": 1.0, "format": 1.0}
    assert [grade.answer for grade in found] == ["4", "4", "5"]


def test_in_a_sum_a_reward_that_cannot_judge_adds_nothing(problem: Make) -> None:
    parts = [{"kind": "numeric"}, {"kind": "format", "pattern": ".*", "weight": 0.5}]
    found = grades([problem("no number")], ["4"], parts=parts)[0]
    assert (found.score, found.passed, found.parts) == (0.5, False, {"numeric": None, "format": 1.0})


def test_a_function_gets_all_problems_and_responses_at_once(problem: Make, function: Callable[..., str]) -> None:
    kind = function(
        """
        assert [p.answer for p in problems] == ["4", "5", "6"] and problems[0].metadata["level"] == 3
        return [1.0, None, {"right": 0.5, "short": 0.25}]
        """
    )
    problems = [problem("4", level=3), problem("5"), problem("6")]
    found = grades(problems, ["a", "b", "c"], kind=kind)
    assert [grade.error for grade in found] == [None, None, None]
    assert [grade.score for grade in found] == [1.0, None, 0.75]
    assert [grade.passed for grade in found] == [True, False, False]
    assert found[0].parts == {"reward": 1.0}
    assert found[2].parts == {"right": 0.5, "short": 0.25}


def test_a_dict_may_name_its_total(problem: Make, function: Callable[..., str]) -> None:
    kind = function('return [{"length": 7, "score": 1.0}, {"length": 1.0, "score": 0.0}]')
    first, second = grades([problem()] * 2, ["a", "b"], kind=kind)
    assert (first.score, first.passed, second.score, second.passed) == (1.0, True, 0.0, False)


def test_numpy_and_bool_scores_are_numbers(problem: Make, function: Callable[..., str]) -> None:
    kind = function("import numpy\nreturn numpy.array([1, 0], dtype=bool)")
    assert [grade.score for grade in grades([problem()] * 2, ["a", "b"], kind=kind, timeout_s=20)] == [1.0, 0.0]


def test_a_wrong_number_of_values_names_the_function_and_both_numbers(
    problem: Make, function: Callable[..., str]
) -> None:
    kind = function("return [1.0, 0.0, 1.0]")
    with pytest.raises(WorkError, match=r"own\.py:reward returned 3 values for 4 responses"):
        grades([problem()] * 4, ["a"] * 4, kind=kind)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("None", "returned a NoneType, expected a list of one score a response"),
        ("['1.0', 1.0]", "returned '1.0' for response 0: expected a number, None or a dict"),
        ("[1.0, {}]", r"returned \{\} for response 1"),
        ("[1.0, {'a': 'b'}]", r"returned \{'a': 'b'\} for response 1"),
    ],
)
def test_values_that_are_no_scores_are_named(
    problem: Make, function: Callable[..., str], value: str, message: str
) -> None:
    with pytest.raises(WorkError, match=message):
        grades([problem()] * 2, ["a", "b"], kind=function(f"return {value}"))


def test_an_exception_is_kept_with_its_own_response(problem: Make, function: Callable[..., str]) -> None:
    kind = function("return [float(response) for response in responses]")
    found = grades([problem()] * 3, ["1", "x", "0.5"], kind=kind)
    assert [grade.score for grade in found] == [1.0, 0.0, 0.5]
    assert found[1].error == "ValueError: could not convert string to float: 'x'"
    assert [grade.error for grade in (found[0], found[2])] == [None, None]


def test_an_overrun_of_a_function_is_found_and_the_rest_is_scored(problem: Make, function: Callable[..., str]) -> None:
    kind = function(
        """
        while "loop" in responses:
            pass
        return [1.0] * len(responses)
        """
    )
    found = grades([problem()] * 3, ["a", "loop", "b"], kind=kind, timeout_s=1.5)
    assert [grade.score for grade in found] == [1.0, 0.0, 1.0]
    assert [grade.timed_out for grade in found] == [False, True, False]


@pytest.mark.parametrize("value", ["float('nan')", "float('inf')"])
def test_a_score_that_is_no_finite_number_is_an_error(problem: Make, function: Callable[..., str], value: str) -> None:
    first, second = grades([problem()] * 2, ["a", "b"], kind=function(f"return [{value}, {{'x': {value}, 'y': 1}}]"))
    assert (first.score, first.passed, second.score, second.parts) == (0.0, False, 0.0, {"x": 0.0, "y": 1.0})
    assert str(first.error).startswith("the score is ")
    assert second.error is not None


@pytest.mark.parametrize("body", ["return [float('nan')]", "raise RuntimeError('no')", "while True: pass"])
def test_on_error_raise_stops_with_the_response(problem: Make, function: Callable[..., str], body: str) -> None:
    with pytest.raises(WorkError, match=r"reward reward failed on a response to p: .*\nresponse: 'the text'"):
        grades([problem()], ["the text"], kind=function(body), on_error="raise", timeout_s=1.5)


def test_memory_of_a_function_is_limited(problem: Make, function: Callable[..., str]) -> None:
    kind = function("return [float(len(bytearray(int(r) * 2 ** 20)) > 0) for r in responses]")
    found = grades([problem()] * 2, ["1", "4096"], kind=kind, memory_mb=128)
    assert [grade.score for grade in found] == [1.0, 0.0]
    assert found[1].error == "out of memory: more than 128 MB"


def test_a_function_of_an_importable_module(problem: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "my_rewards"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "length.py").write_text("def short(problems, responses): return [1 / len(r) for r in responses]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert grades([problem()], ["ab"], kind="my_rewards.length:short")[0].score == 0.5


def test_a_module_in_the_current_folder_is_found(
    problem: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_the_run.py").write_text("def half(problems, responses): return [0.5 for _ in responses]\n")
    monkeypatch.chdir(tmp_path)
    assert grades([problem()], ["a"], kind="beside_the_run:half")[0].score == 0.5


def test_several_rewards_of_which_one_is_a_function(problem: Make, function: Callable[..., str]) -> None:
    kind = function("return [{'a': 0.5, 'b': 0.25} for _ in responses]")
    parts = [{"kind": "numeric"}, {"kind": kind, "name": "own", "weight": 2.0}]
    found = grades([problem()], ["4"], parts=parts)[0]
    assert (found.score, found.passed) == (2.5, True)
    assert found.parts == {"numeric": 1.0, "own/a": 0.5, "own/b": 0.25, "own": 0.75}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "maths"}, r"reward\.kind: there is no reward 'maths'\. Did you mean 'math'\?"),
        ({"kind": "format"}, r"reward\.pattern: the format reward needs"),
        ({"kind": "format", "pattern": "("}, r"reward\.pattern: '\(' is not a regular expression"),
        ({"kind": ":f"}, "is not module:function or file.py:function"),
        ({"kind": "a:b c"}, "is not module:function or file.py:function"),
        ({"kind": "no/such/file.py:f"}, r"there is no file 'no/such/file\.py'"),
        ({"kind": "dir/file:f"}, r"a file needs its \.py: dir/file\.py:f"),
        ({"kind": "no_such_module_here:f"}, "cannot be loaded: ModuleNotFoundError"),
        ({"kind": "math:no_function"}, "math has no function 'no_function'"),
        ({"kind": "math:pi"}, "math:pi is a float, not a function"),
        ({"parts": [{"kind": "numeric"}, {"kind": "exakt"}]}, r"Did you mean 'exact'\?"),
    ],
)
def test_faults_of_the_configuration_are_found_before_work(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Grader(RewardConfig.model_validate(fields))


def test_a_function_file_that_is_missing_names_its_neighbour(function: Callable[..., str]) -> None:
    kind = function("return []")
    with pytest.raises(InputError, match=r"Did you mean 'own\.py'\?"):
        Grader(RewardConfig(kind=kind.replace("own.py", "won.py")))
    with pytest.raises(InputError, match=r"has no function 'rewards'\. Did you mean 'reward'\?"):
        Grader(RewardConfig(kind=kind + "s"))


def test_a_function_file_that_does_not_run_shows_where(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = 1\ny = x / 0\n")
    with pytest.raises(InputError, match=r"(?s)broken\.py:f cannot be loaded: ZeroDivisionError.*line 2"):
        Grader(RewardConfig(kind=f"{tmp_path / 'broken.py'}:f"))


def test_one_or_many_but_not_both() -> None:
    with pytest.raises(ValueError, match="a sum of parts is described by its parts: move kind there"):
        RewardConfig.model_validate({"kind": "math", "parts": [{"kind": "math"}]})


def test_the_guard_refuses_dangerous_events_only_while_judging(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = textwrap.dedent(f"""
        import os, pathlib, socket, subprocess, sys
        from tepo.tasks.rewards.guard import guarded
        target = pathlib.Path({str(tmp_path / "written")!r})
        attempts = [
            lambda: target.write_text("x"), lambda: os.open(target, os.O_CREAT | os.O_WRONLY),
            lambda: os.system("true"), lambda: subprocess.run(["true"]), lambda: os.fork(),
            lambda: os.kill(os.getppid(), 0), lambda: socket.create_connection(("127.0.0.1", 9)),
            lambda: os.remove(__file__ if "__file__" in globals() else "x"), lambda: os.mkdir(str(target)),
        ]
        for number, attempt in enumerate(attempts):
            with guarded():
                try:
                    attempt()
                except PermissionError:
                    continue
                print("allowed", number)
        with guarded():
            open(os.__file__).read()
            import colorsys
        target.write_text("now it may")
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
    assert (tmp_path / "written").read_text() == "now it may"
