"""The report's words and numbers: what it says of runs in every state, and where its figures come from."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from synthetic import evaluation, make_run, make_study

import tepo
from tepo.evaluation import Evaluation, QuestionResult, SampleResult
from tepo.lab.contrast import Side, at_k, contrast, flips
from tepo.lab.evidence import read_run
from tepo.lab.health import BAD, FAIR, GOOD, RULES, UNKNOWN, lights
from tepo.lab.objective_diff import frozen_batch, objective_diff
from tepo.lab.page import escape, pack
from tepo.lab.report import curves_data, write_report, write_run_report
from tepo.lab.view import choices, squeezed, write_view
from tepo.objectives import SequenceRatio


def text_of(path: Path) -> str:
    """Return the page's words without its markup, scripts and data."""
    text = path.read_text(encoding="utf-8")
    return re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style)\b.*?</\1>", " ", text, flags=re.DOTALL))


def questions(*passed: tuple[int, int]) -> Evaluation:
    """Return an evaluation with (right, all) samples of each question."""

    def sample(right: bool) -> SampleResult:
        return SampleResult("text", float(right), right, "4" if right else "5", 3, "eos")

    return Evaluation(
        tuple(
            QuestionResult(f"q{place}", f"question {place}", "4", tuple(sample(n < right) for n in range(total)))
            for place, (right, total) in enumerate(passed)
        ),
        {},
    )


# --- states of a run ---------------------------------------------------------------------------------------


def test_a_finished_run_is_judged_before_against_after(tmp_path: Path) -> None:
    words = text_of(write_run_report(make_run(tmp_path / "run")))
    assert re.search(r"after minus before: \+\d+\.\d points of accuracy, 95 % \[[+-]\d", words)
    assert "finished: 12 steps" in words
    assert "tepo train" in words


def test_a_run_at_work_or_crashed_says_how_far_it_came(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", planned=40)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "reward/me')  # what a kill leaves behind
    (run / "eval" / "step-000012.jsonl").write_text('{"id": "q0", "ques')
    words = text_of(write_run_report(run))
    assert "not finished: step 12 of 40" in words
    assert "still running, stopped or crashed" in words
    assert "accuracy before (step 0)" in words


def test_a_run_that_wrote_nothing_yet_has_a_report(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=0, planned=5, evaluations=False)
    words = text_of(write_run_report(run))
    assert "step 0 of 5, no step is on record" in words
    assert "No evaluation is on record yet" in words
    with pytest.raises(tepo.InputError, match=r"log\.rollouts"):
        write_view(run)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for write in (write_run_report, write_view):
        with pytest.raises(tepo.InputError, match="is not a run"):
            write(tmp_path)
    with pytest.raises(tepo.InputError, match=r"no results\.json"):
        write_report(tmp_path)
    with pytest.raises(tepo.InputError, match="kept are steps 1 to 2"):
        write_view(make_run(tmp_path / "run", steps=2), step=7)


def test_a_study_shows_its_failures_and_verdicts(tmp_path: Path) -> None:
    study = make_study(tmp_path / "demo", seeds=2, failed="killed by signal 9\nlast words")
    words = text_of(write_report(study))
    results = json.loads((study / "results.json").read_text())
    assert escape(results["verdicts"][0]) in words
    assert "failed after step 12" in words
    assert "killed by signal 9\nlast words" in words
    for note in results["notes"]:
        assert escape(note) in words
    assert "tepo-seed2" in words
    effect = results["comparisons"][0]["accuracy"]
    assert f"{effect['questions_better']} better, {effect['questions_worse']} worse" in words


# --- numbers -----------------------------------------------------------------------------------------------


def test_flipped_questions_are_those_whose_share_changed() -> None:
    first, second = questions((0, 2), (2, 2), (1, 2), (2, 2)), questions((2, 2), (1, 2), (1, 2), (2, 2))
    found = contrast(Side("a", (first,), (0,)), Side("b", (second,), (0,)))
    assert found is not None
    assert (found.better, found.worse) == (1, 1)
    assert found.effect.value == pytest.approx((1 - 0.5) / 4)
    shown = flips(found)["questions"]
    assert [(one["id"], one["rates"]) for one in shown] == [("q0", [0.0, 1.0]), ("q1", [1.0, 0.5])]
    assert [one["passed"] for side in shown[0]["responses"] for one in side] == [False, True]
    assert [one["passed"] for side in shown[1]["responses"] for one in side] == [True, False]


def test_sides_with_other_questions_or_seeds_are_not_compared() -> None:
    one, other = questions((1, 2), (0, 2)), questions((1, 2))
    assert contrast(Side("a", (one,), (0,)), Side("b", (other,), (0,))) is None
    assert contrast(Side("a", (one,), (0,)), Side("b", (one,), (1,))) is None


def test_pass_at_k_of_the_report_is_that_of_the_evaluation() -> None:
    made = evaluation(random.Random(0), 0.4, ())
    found = at_k(Side("a", (made,), (0,)))
    assert found is not None
    summary = made.summary()
    assert [row[:2] for row in found["pass"]] == [[k, pytest.approx(one.value)] for k, one in summary.pass_at.items()]
    assert [row[:2] for row in found["maj"]] == [
        [k, pytest.approx(one.value)] for k, one in summary.majority_at.items()
    ]


def test_curves_hold_every_metric_at_every_step_over_three_axes(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run"))
    (variant,) = curves_data({"tepo": [run]})["variants"]
    (curves,) = variant["runs"]
    assert curves["steps"] == list(range(13))
    assert curves["tokens"][1:] == [1000 * step for step in range(1, 13)]
    assert curves["seconds"][-1] == pytest.approx(sum(line["time/step"] for line in run.lines), rel=1e-5)
    assert curves["values"]["reward/mean"][5] == pytest.approx(run.lines[5]["reward/mean"], rel=1e-4)
    assert curves["values"]["reward/mean"][0] is None


# --- health ------------------------------------------------------------------------------------------------

SICK: dict[str, tuple[str, Any, Any]] = {
    "entropy": ("entropy/rollout", [1.0] * 5 + [0.01] * 5, [1.0] * 5 + [0.4] * 5),
    "entropy under the mask": ("mask/kl", [0.0] * 10, [0.7] * 10),
    "KL to the sampling policy": ("kl/old", [0.5] * 10, [0.05] * 10),
    "ratio tails": ("ratio/max", [50.0] * 10, [8.0] * 10),
    "clipped": ("clip/low", [0.6] * 10, [0.3] * 10),
    "truncated": ("length/truncated", [0.5] * 10, [0.1] * 10),
    "groups with signal": ("group/signal", [0.02] * 10, [0.2] * 10),
    "sampler against scorer": ("mismatch/logp", [0.2] * 10, [0.03] * 10),
    "gradient norm": ("grad/norm", [1.0] * 9 + [30.0], [1.0] * 9 + [8.0]),
    "reward failures": ("reward/errors", [3] * 10, [0] * 9 + [1]),
}


def judged(tmp_path: Path, changes: dict[str, list[float]]) -> dict[str, str]:
    run = make_run(tmp_path / "run", steps=10)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for metric, values in changes.items():
        for line, value in zip(lines[1:], values, strict=True):
            line[metric] = value
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {rule.name: light.status for rule, light in lights([read_run(run)])}


def test_every_rule_is_tried() -> None:
    assert [rule.name for rule in RULES] == list(SICK)
    assert all("Good:" in rule.words and "fair:" in rule.words for rule in RULES)


@pytest.mark.parametrize("name", SICK)
@pytest.mark.parametrize(("place", "status"), [(1, BAD), (2, FAIR)])
def test_a_light_follows_its_rule(tmp_path: Path, name: str, place: int, status: str) -> None:
    metric, values = SICK[name][0], SICK[name][place]
    found = judged(tmp_path, {metric: values})
    assert found.pop(name) == status
    assert set(found.values()) <= {GOOD, FAIR}  # the made-up entropy falls, which is fair


def test_what_is_not_recorded_has_no_light(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=0, planned=3, evaluations=False)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    assert {light.status for _, light in lights([read_run(run)])} == {UNKNOWN}


# --- the objective diff ------------------------------------------------------------------------------------


def test_the_diff_puts_one_batch_through_the_whole_catalogue(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    found = objective_diff([run], ["tepo"])
    assert found is not None
    assert len(found.catalogue) == len(tepo.objectives())
    rows = {row.label: row for row in (*found.own, *found.catalogue)}
    assert rows["tepo (as run)"].agreement == pytest.approx(1.0)
    assert rows["tepo (as run)"].masked == rows["tepo"].masked
    assert rows["dapo"].masked == 0
    assert "reference" in rows["erpo"].why
    assert rows["em-ft"].up is None
    assert "entropy alone" in rows["em-ft"].why
    assert (rows["em-ft"].through_entropy or 0) > 0


def change(run: Path, step: int, **fields: Any) -> None:
    """Set fields of every kept response of a step; a name of another field stands for its value."""
    path = run / "rollouts" / f"step-{step:06d}.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    changed = [one | {name: one.get(value, value) for name, value in fields.items()} for one in records]
    path.write_text("".join(json.dumps(one) + "\n" for one in changed))


def test_the_frozen_batch_has_right_and_wrong_responses_and_ratios_that_moved(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=4)
    change(run, 4, passed=True)
    change(run, 3, logp="old_logp")
    found = frozen_batch(run)
    assert found is not None
    assert found[1] == 2
    for step in (1, 2, 4):
        change(run, step, passed=True)
    found = frozen_batch(run)
    assert found is not None
    assert found[1] == 3  # right and wrong count for more
    assert "all ratios are 1" in found[0]
    other = make_run(tmp_path / "other", steps=1)
    diff = objective_diff([run, other], ["one", "two"])
    assert diff is not None
    assert diff.where == "8 responses of other, step 1, as one mini-batch"


def test_methods_that_need_a_reference_go_without_it_where_they_can(tmp_path: Path) -> None:
    labels = [choice.label for choice in choices(make_run(tmp_path / "run"), ["grpo", "dapo"])]
    assert labels[0] == "tepo (as in the run)"
    assert set(labels[1:]) >= {"dapo"}
    assert any(label in ("grpo", "grpo (kl_coef = 0)") for label in labels)


def test_a_composed_objective_is_recognised(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "config.toml").write_text('[objective]\nbase = "dapo"\nratio = { part = "SequenceRatio" }\n')
    first = choices(run, ["dapo"])[0]
    assert first.label == "dapo-composed (as in the run)"
    assert first.objective.ratio == SequenceRatio()


def test_numbers_are_kept_to_four_digits_and_equal_ones_once() -> None:
    assert squeezed([1.23456, -0.000123456, 123456.7, 0.0, 3e-9]) == [1.235, -0.0001235, 123500.0, 0.0, 3e-9]
    assert squeezed([2.0, 2.0]) == 2.0
    assert squeezed([1.0, float("nan")]) == [1.0, None]
    assert squeezed([]) == []


def test_packing_is_the_same_for_the_same_and_holds_no_markup() -> None:
    value = {"text": "</script><b>", "number": float("nan"), "lone": "\ud800"}
    assert pack(value) == pack(value)
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", pack(value))


@pytest.mark.slow
def test_three_objectives_five_seeds_500_steps_fit_in_8_mb(tmp_path: Path) -> None:
    study = make_study(
        tmp_path / "large", variants=("grpo", "tepo", "dapo"), seeds=5, steps=500, rollouts_every=100, length=60
    )
    assert write_report(study).stat().st_size < 8e6
