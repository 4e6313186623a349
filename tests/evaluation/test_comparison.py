from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tepo.core.errors import InputError
from tepo.evaluation import Evaluation, QuestionResult, SampleResult, compare, difference, estimates


def question(name: str, passed: int, samples: int = 4, text: str | None = None, **labels: str) -> QuestionResult:
    results = tuple(
        SampleResult("", float(n < passed), n < passed, "1" if n < passed else "2", 3, "eos") for n in range(samples)
    )
    return QuestionResult(name, text or name, "1", results, labels)


def evaluation(*passed: int, temperature: float = 1.0) -> Evaluation:
    questions = tuple(question(f"q{place}", count) for place, count in enumerate(passed))
    return Evaluation(questions, {"chat": False, "sampling": {"temperature": temperature, "rows": len(passed)}})


def test_gap_and_flipped_questions_by_hand() -> None:
    found = compare(evaluation(4, 0, 3, 2, 1), evaluation(4, 3, 1, 2, 2))
    assert found.gap.value == pytest.approx((0 + 3 - 2 + 0 + 1) / 20)
    assert (found.gained, found.lost, found.better, found.worse) == (("q1",), ("q2",), 2, 1)
    assert (found.first, found.second, found.alone, found.unequal) == (pytest.approx(0.5), pytest.approx(0.6), 0, ())
    assert str(found).startswith("60.0 % against 50.0 %: +10.0 points, 95 % [")
    assert str(found).endswith("paired over 5 questions: not distinguishable")
    json.dumps(found.to_json())


def test_a_clear_gain_is_called_better_and_its_reverse_worse() -> None:
    first, second = evaluation(*[1] * 30), evaluation(*[2, 3] * 15)
    assert str(compare(first, second)).endswith(": better")
    assert str(compare(second, first)).endswith(": worse")


def test_questions_of_one_side_alone_are_left_out_and_unfair_settings_named() -> None:
    found = compare(evaluation(4, 0), evaluation(4, 0, 4, temperature=0.5))
    assert (found.gap.value, found.gap.n, found.alone, found.unequal) == (0.0, 2, 1, ("sampling",))
    other = Evaluation((question("other", 1),), {})
    with pytest.raises(InputError, match="no question in common"):
        compare(evaluation(1), other)


def test_pairing_narrows_the_interval_on_correlated_answers() -> None:
    draws = np.random.default_rng(0)
    ability = draws.random(200)
    first = (draws.random(200) < ability).astype(float)
    second = np.where(draws.random(200) < 0.9, first, draws.random(200) < ability).astype(float)
    paired = difference(first.tolist(), second.tolist())
    one, two = estimates([first.tolist(), second.tolist()])
    unpaired = np.hypot(one.high - one.low, two.high - two.low)
    assert paired.high - paired.low < 0.6 * unpaired


def test_repeated_rows_are_samples_of_one_question() -> None:
    rows = tuple(question(f"r{n}-{q}", int(n < 8), 1, text=f"q{q}") for n in range(32) for q in range(3))
    summary = Evaluation(rows).summary()
    assert (summary.questions, summary.distinct, summary.samples) == (96, 3, 32)
    assert summary.average.n == 3
    assert summary.average.value == pytest.approx(0.25)
    assert summary.pass_at[32].value == 1.0
    single = Evaluation(tuple(question(f"q{q}", 8, 32) for q in range(3))).summary()
    assert summary.pass_at == single.pass_at


def test_pass_at_k_for_every_k_equals_enumeration() -> None:
    from itertools import combinations

    curve = evaluation(1, 3).pass_curve()
    for k in range(1, 5):
        right = [[any(place < passed for place in chosen) for chosen in combinations(range(4), k)] for passed in (1, 3)]
        assert curve[k].value == pytest.approx(np.mean([np.mean(one) for one in right]))
    assert list(curve) == [1, 2, 3, 4]


def test_breakdown_by_label() -> None:
    questions = (
        question("a", 4, subject="algebra", level="1"),
        question("b", 0, subject="algebra", level="1"),
        question("c", 1, subject="geometry", level="1"),
        question("d", 3, level="1"),
    )
    found = Evaluation(questions).breakdown()
    assert list(found) == ["subject"]
    assert {value: (one.value, one.n) for value, one in found["subject"].items()} == {
        "": (0.75, 1),
        "algebra": (0.5, 2),
        "geometry": (0.25, 1),
    }


def test_labels_survive_and_files_without_them_are_read(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    Evaluation((question("a", 1, level="5"),), {}).write(path)
    assert Evaluation.read(path).questions[0].labels == {"level": "5"}
    record = json.loads(path.read_text())
    del record["labels"]
    path.write_text(json.dumps(record) + "\n")
    assert Evaluation.read(path).questions[0].labels == {}


@pytest.mark.parametrize(("questions", "least"), [(100, 0.92), (500, 0.93)])
def test_intervals_cover_the_truth_about_as_often_as_they_say(questions: int, least: float) -> None:
    draws = np.random.default_rng(questions)
    for p in (0.1, 0.5):
        rows = (draws.random((300, questions)) < p).astype(float)
        covered = np.mean([one.low <= p <= one.high for one in estimates(rows.tolist())])
        assert least <= covered <= 0.99


@pytest.mark.parametrize(
    ("answers", "value"),
    [
        ("4 4 4 4 4 5 5 6", 1.0),
        ("4 4 4 5 5 5 5 6", 0.0),
        ("4 4 4 5 5 5 6 7", 1 / 2),
        ("4 4 5 5 6 6 7 7", 1 / 4),
        ("4 - - - - - - -", 1.0),
        ("- - - - - - - -", 0.0),
        ("4 5 6 7 8 9 10 11", 1 / 8),
        ("4 4 - - - - - 5", 1.0),
        ("5 5 5 5 5 5 5 5", 0.0),
    ],
)
def test_maj_at_8_is_the_vote_counted_by_hand(answers: str, value: float) -> None:
    samples = tuple(
        SampleResult("", float(text == "4"), text == "4", None if text == "-" else text, 1, "eos")
        for text in answers.split()
    )
    assert QuestionResult("q", "2 + 2", "4", samples).majority_at(8) == pytest.approx(value)
