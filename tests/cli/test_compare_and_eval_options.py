"""`tepo compare` before any work starts, and what `tepo eval` says beside its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ended import Tepo

from tepo.cli.compare import effect_text, show, split_words
from tepo.core.errors import InputError


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('base = "run.toml"\nvariants = []\n', "variants"),
        ('base = "run.toml"\nvariants = ["tepoo"]\n', "Did you mean 'tepo'"),
        ('base = "none.toml"\nvariants = ["tepo"]\n', "no such configuration file"),
        ('base = "run.toml"\nvariant = ["tepo"]\n', "Did you mean 'variants'"),
        ('base = "run.toml"\nvariants = [{ name = "a", train = { seed = 1 } }]\n', "changes train.seed"),
    ],
)
def test_a_wrong_study_is_told_before_anything_is_written(tepo_: Tepo, workplace: Path, text: str, said: str) -> None:
    (workplace / "study.toml").write_text(text)
    ended = tepo_("compare", "study.toml")
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err
    assert not (workplace / "studies").exists()


def test_what_is_missing_in_a_study_is_told_with_an_example(tepo_: Tepo, workplace: Path) -> None:
    (workplace / "study.toml").write_text('seeds = "three"\n')
    ended = tepo_("compare", "study.toml")
    assert ended.code == 2
    assert 'variants is missing: variants = ["dapo", "tepo"]' in ended.err
    assert "seeds: expected a number of seeds or a list of them, not 'three'" in ended.err


@pytest.mark.slow
def test_a_run_refused_before_it_begins_stops_the_study_as_wrong_input(tepo_: Tepo, workplace: Path) -> None:
    text = 'base = "run.toml"\nvariants = ["tepo", "dapo"]\nseeds = 1\nname = "s"\n'
    (workplace / "study.toml").write_text(text)
    for _ in range(2):  # it is not held against the run
        ended = tepo_("compare", "study.toml", "base.reward.kind=none.py:f")
        assert (ended.code, ended.out) == (2, "")
        assert "tepo-seed0: reward.kind: there is no file 'none.py'" in ended.err
    assert not list((workplace / "studies" / "s").glob("runs/*/config.toml"))


def test_report_only_needs_a_study(tepo_: Tepo, workplace: Path) -> None:
    (workplace / "study.toml").write_text('name = "s"\nbase = "run.toml"\nvariants = ["tepo"]\n')
    ended = tepo_("compare", "study.toml", "--report-only")
    assert ended.code == 2
    assert "run the study first" in ended.err


def test_words_of_compare(tmp_path: Path) -> None:
    assert split_words(["a.toml", "seeds=2"]) == (Path("a.toml"), ["seeds=2"])
    assert split_words([str(tmp_path)]) == (tmp_path / "study.toml", [])
    with pytest.raises(InputError, match="expected one study"):
        split_words(["seeds=2"])


def test_effects_as_text() -> None:
    effect = {"value": 0.5, "low": 0.25, "high": 0.75}
    assert effect_text(effect, scale=100, form=".0f") == "50 [25, 75]"
    assert effect_text(effect | {"low": None, "high": None}, form=".1f") == "0.5"
    assert effect_text(None, form=".1f") == "-"


def test_results_are_shown_with_failures_and_notes(capsys: pytest.CaptureFixture[str]) -> None:
    variant = {"finished": 1, "final_reward": None, "entropy_kept": None, "spikes": 2, "collapsed": 0}
    show(
        {
            "name": "s",
            "baseline": "a",
            "seeds": [0, 1],
            "variants": [variant | {"name": "a"}, variant | {"name": "b"}],
            "verdicts": ["b minus a: nothing"],
            "comparisons": [],
            "runs": [{"name": "b-seed1", "status": "failed", "error": "\x1b[2Jout of memory"}],
            "notes": ["mind the gap"],
        }
    )
    shown = capsys.readouterr().out
    assert "a (baseline)" in shown
    assert "b minus a: nothing" in shown
    assert "b-seed1 failed: " in shown
    assert "\x1b[2J" not in shown
    assert "note: mind the gap" in shown


def test_eval_with_everything_beside(tepo_: Tepo, workplace: Path) -> None:
    rows = [{"problem": f"What is {n} + 1?", "answer": str(n + 1), "level": str(n % 2)} for n in (0, 1, 2, 0)]
    (workplace / "math500.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("eval", "builtin:tiny", "math500.jsonl", "-n", "2", "--max-tokens", "2", "--out", "r.jsonl")
    first = tepo_(*words, "--greedy", "--grader-report", "--json")
    assert first.code == 0, first.err
    assert (first.json["questions"], first.json["distinct"], first.json["samples"]) == (4, 3, 2)
    assert first.json["pass_curve"].keys() == {"1", "2"}
    assert first.json["breakdown"]["level"].keys() == {"0", "1"}
    assert first.json["greedy"]["n"] == 3
    assert first.json["disagreements"] == []
    assert "MATH-500" in first.err
    assert not (workplace / "r.jsonl.partial").exists()
    assert (workplace / "r.greedy.jsonl").exists()
    again = tepo_(*words[:-2], "--against", "r.jsonl")
    assert again.code == 0, again.err
    assert "+0.0 points" in again.out
    assert "questions flipped: 0 to right, 0 to wrong" in again.out
    assert "4 rows repeat 3 questions" in again.out


def test_against_something_else_is_an_error(tepo_: Tepo, workplace: Path) -> None:
    ended = tepo_("eval", "builtin:tiny", "arithmetic", "--against", "run.toml")
    assert ended.code == 2
    assert "not results that `tepo eval --out` wrote" in ended.err
    ended = tepo_("eval", "builtin:tiny", "arithmetic", "--against", "none.jsonl")
    assert ended.code == 2
    assert "there is no such file" in ended.err


def test_against_other_questions_is_told_before_anything_is_sampled(tepo_: Tepo, workplace: Path) -> None:
    for name, text in (("one", "1 + 1?"), ("other", "2 + 2?")):
        (workplace / f"{name}.jsonl").write_text(json.dumps({"problem": text, "answer": "2"}) + "\n")
    words = ("eval", "builtin:tiny", "--max-tokens", "2")
    assert tepo_(*words, "one.jsonl", "--out", "r.jsonl").code == 0
    ended = tepo_(*words, "other.jsonl", "--against", "r.jsonl", "--out", "s.jsonl")
    assert ended.code == 2
    assert "r.jsonl has none of these 1 questions" in ended.err
    assert not list(workplace.glob("s.*"))
