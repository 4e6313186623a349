"""Known benchmarks: recognised by their files, valid as configuration, and their own references grade as right."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tepo.core.errors import InputError
from tepo.evaluation import PRESETS
from tepo.evaluation.presets import preset, recognised
from tepo.tasks import Grader, RewardConfig, TaskConfig, load_problems


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("data/aime24.jsonl", "aime24"),
        ("AIME_2025.parquet", "aime25"),
        ("amc23.jsonl", "amc23"),
        ("math500.jsonl", "math500"),
        ("MATH-500.json", "math500"),
        ("minerva_math.jsonl", "minerva"),
        ("olympiadbench.jsonl", "olympiadbench"),
        ("omni-math.jsonl", "omnimath"),
        ("gsm8k.jsonl", "gsm8k"),
        ("hmmt_2024.jsonl", "hmmt"),
    ],
)
def test_benchmarks_are_known_by_the_names_of_their_files(file: str, name: str) -> None:
    found = recognised(file)
    assert found is not None
    assert found is preset(name)


def test_other_files_are_no_benchmark_and_unknown_names_are_errors() -> None:
    assert recognised("set.jsonl") is None
    assert recognised("arithmetic") is None
    with pytest.raises(InputError, match="Did you mean 'aime24'"):
        preset("aime2024")


@pytest.mark.parametrize("one", PRESETS, ids=lambda one: one.name)
def test_a_preset_is_valid_configuration_and_warns(one: Any) -> None:
    TaskConfig.model_validate({"source": "x.jsonl", **one.task()})
    RewardConfig.model_validate(one.reward)
    assert len(one.note) > 40


@pytest.mark.slow
@pytest.mark.skipif("TEPO_DATA" not in os.environ, reason="TEPO_DATA does not name the folder of shared data")
def test_references_of_the_benchmarks_at_hand_grade_as_right() -> None:
    files = sorted(Path(os.environ["TEPO_DATA"], "benchmarks").glob("*.jsonl"))
    assert len(files) >= 8
    for file in files:
        one = recognised(str(file))
        assert one is not None, file.name
        task = TaskConfig.model_validate({"source": str(file), **one.task()})
        problems = load_problems(task, limit=None, say=lambda text: None)
        # Some editions are subsets or leave the odd question out; none is another benchmark.
        assert 0.9 * one.questions <= len(problems) <= one.questions, file.name
        with Grader(RewardConfig.model_validate(dict(one.reward))) as grader:
            grades = grader.grade(problems, [rf"The answer is \boxed{{{problem.answer}}}." for problem in problems])
        refused = [problem.id for problem, grade in zip(problems, grades, strict=True) if not grade.passed]
        assert refused == [], file.name
