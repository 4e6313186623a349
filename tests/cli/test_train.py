"""`tepo train` from configuration to result: what is asked, what is refused, what is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ended import Tepo

from tepo.cli.outcome import accuracy_lines, command_name, next_commands
from tepo.cli.train import request
from tepo.core.errors import InputError
from tepo.training import RunResult

EXAMPLES = Path(__file__).parents[2] / "examples"


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], ["nothing to train"]),
        (["missing.toml"], ["missing.toml", "no such"]),
        (["run.toml", "other"], ["other: no such file", "section.key=value"]),
        (["run.toml", "optim.lrr=1"], ["command line", "optim.lrr", "Did you mean 'optim.lr'"]),
        (["run.toml", "train.steps=many"], ["train.steps", "integer", "many"]),
        (["run.toml", "objective.name=gspoo"], ["gspoo", "Did you mean 'gspo'"]),
        (["run.toml", "objective.kl_coeff=1"], ["kl_coeff", "Did you mean 'kl_coef'"]),
        (["run.toml", "task.source=nowhere.jsonl"], ["nowhere.jsonl"]),
        (["run.toml", "task.source=empty.jsonl"], ["empty.jsonl", "empty"]),
        (["run.toml", "task.source=broken.jsonl"], ["broken.jsonl, line 2"]),
        (["run.toml", "task.source=columns.jsonl", "task.columns.question=q"], ["no column 'q'", "question, answer"]),
        (["run.toml", "model.path=hollow"], ["hollow", "weights"]),
        (["run.toml", "reward.kind=reward.py:digit"], ["digit", "Did you mean 'digits'"]),
        (["run.toml", "broken.toml"], ["one configuration file"]),
        (["run.toml", "--name", ""], ["--name is empty"]),
        (["run.toml", "--name", "../up"], ["name", "'../up'"]),
        (["run.toml", "--name", "two\nlines"], ["name", "newline"]),
        (["--resume", "taken"], ["config.toml", "damaged"]),
        (["broken.toml"], ["broken.toml", "not valid TOML", "line 1"]),
        (["--resume", "runs/none"], ["runs/none", "not a run"]),
        (["--fork", "runs/none"], ["RUN@STEP"]),
        (["run.toml", "--resume", "--fork", "a@1"], ["--resume", "--fork"]),
        (["taken"], ["taken is a run", "--resume taken"]),
        (["run.toml", "runs=.", "name=taken"], ["taken", "exists"]),
    ],
)
def test_wrong_input_exits_with_2_and_writes_nothing(
    arguments: list[str], said: list[str], tepo_: Tepo, workplace: Path
) -> None:
    (workplace / "empty.jsonl").write_text("")
    (workplace / "broken.jsonl").write_text('{"question": "1", "answer": "1"}\n{"question": "2", \n')
    (workplace / "columns.jsonl").write_text('{"question": "1", "answer": "1"}\n' * 20)
    (workplace / "broken.toml").write_text("a = = 1")
    (workplace / "hollow").mkdir()
    (workplace / "hollow" / "config.json").write_text('{"model_type": "llama"}')
    (workplace / "taken").mkdir()
    (workplace / "taken" / "config.toml").write_text("")
    before = files_in(workplace)
    ended = tepo_("train", *arguments)
    assert (ended.code, ended.out) == (2, ""), ended.err
    assert all(text in ended.err for text in said), ended.err
    assert "Traceback" not in ended.err
    assert files_in(workplace) == before


def test_a_run_ends_with_its_result_and_what_to_type_next(tepo_: Tepo, workplace: Path) -> None:
    ended = tepo_("train", "run.toml", "--name", "first")
    assert ended.code == 0, ended.err
    assert "4 distinct held-out questions" in ended.out
    assert "before" in ended.out
    assert "after" in ended.out
    assert "tepo eval runs/first --samples 8" in ended.out
    assert "step 1/1" in ended.err
    assert (workplace / "runs/first/model/config.json").is_file()

    again = tepo_("train", "run.toml", "name=first")
    assert again.code == 2
    assert "tepo train --resume runs/first" in again.err

    fewer = tepo_("train", "--resume", "runs/first", "optim.lr=1")
    assert fewer.code == 2
    assert "optim.lr" in fewer.err

    more = tepo_("train", "--resume", "runs/first", "train.steps=2", "--json")
    assert more.code == 0, more.err
    assert more.json["steps"] == 2
    assert set(more.json["evaluations"]) == {"0", "1", "2"}

    forked = tepo_("train", "--fork", "runs/first@2", "train.steps=3", "optim.lr=1e-4", "--json")
    assert forked.code == 0, forked.err
    assert forked.json["run"] == "runs/first-fork2"

    missing = tepo_("train", "--fork", "runs/first@7")
    assert missing.code == 2
    assert "It has: 1, 2." in missing.err

    evaluated = tepo_("eval", "runs/first", "-n", "2", "--json")
    assert evaluated.code == 0, evaluated.err
    assert evaluated.json["questions"] == 4
    assert evaluated.json["samples"] == 2

    sampled = tepo_("sample", "runs/first@1", "1 + 2 =", "--max-tokens", "2", "--json")
    assert sampled.code == 0, sampled.err
    assert len(sampled.json[0]["token_ids"]) <= 2
    asked = tepo_("sample", "runs/first", "1 + 2", "--ask", "--json")
    assert asked.code == 0, asked.err
    assert len(asked.json[0]["token_ids"]) <= 3
    unknown = tepo_("sample", "runs/first@9", "1 + 2 =")
    assert unknown.code == 2
    assert "It has: 1, 2." in unknown.err


def test_a_dry_run_reports_and_writes_nothing(tepo_: Tepo, workplace: Path) -> None:
    before = files_in(workplace)
    ended = tepo_("train", "run.toml", "--dry-run", "--json")
    assert ended.code == 0, ended.err
    assert ended.json["preflight"]["responses"] == 2
    assert "pre-flight" in ended.err
    assert files_in(workplace) == before


def test_a_failure_during_the_work_says_what_is_safe(tepo_: Tepo, workplace: Path) -> None:
    ended = tepo_("train", "run.toml", "name=short", "reward.kind=reward.py:one_short", "train.preflight=0")
    assert ended.code == 1
    assert "one_short" in ended.err
    assert " 3 values for 4 responses" in ended.err
    assert "runs/short; no checkpoint was made yet" in ended.err
    assert "Traceback" not in ended.err


def test_an_unexpected_failure_says_what_is_safe(tepo_: Tepo, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr("tepo.tasks.Grader.grade", fail)
    ended = tepo_("train", "run.toml", "name=odd", "train.preflight=0")
    assert ended.code == 1
    assert "unexpected ZeroDivisionError: a mistake of ours" in ended.err
    assert "runs/odd; no checkpoint was made yet" in ended.err


def test_an_interrupted_run_exits_with_1_and_says_how_to_go_on(
    tepo_: Tepo, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tepo.training import interrupt

    class Asked(interrupt.Interrupt):
        asked = True

        def __init__(self) -> None:
            """A stop was asked for from the start."""

    monkeypatch.setattr(interrupt, "Interrupt", Asked)
    ended = tepo_("train", "run.toml", "name=stopped")
    assert ended.code == 1
    assert "interrupted: 0 steps" in ended.out
    assert "tepo train --resume runs/stopped" in ended.out


def test_words_are_sorted_into_file_run_and_overrides(workplace: Path) -> None:
    (workplace / "runs/a").mkdir(parents=True)
    (workplace / "runs/a/config.toml").write_text("")
    asked = request(["optim.lr=1", "run.toml", "name=x=y"], resume=True, fork=None, name=None)
    assert (asked.path, asked.overrides, asked.resume) == (Path("run.toml"), ("optim.lr=1", "name=x=y"), True)
    asked = request(["runs/a", "train.steps=3"], resume=True, fork=None, name=None)
    assert (asked.path, asked.resume) == (Path("runs/a/config.toml"), Path("runs/a"))
    asked = request(["run.toml"], resume=False, fork=None, name='a "b"')
    assert asked.overrides == ('name="a \\"b\\""',)
    long = "task.prompt.system=" + "think " * 100  # longer than a file's name may be
    assert request(["run.toml", long], resume=False, fork=None, name=None).overrides == (long,)
    with pytest.raises(InputError, match="one configuration file"):
        request(["run.toml", "other.toml"], resume=False, fork=None, name=None)


def result(**evaluations: tuple[float, float, float]) -> RunResult:
    names = ("eval/avg", "eval/avg_low", "eval/avg_high", "eval/distinct")
    measured = {
        int(step.removeprefix("at")): dict(zip(names, (*values, 9.0), strict=True))
        for step, values in evaluations.items()
    }
    return RunResult(Path("runs/x"), 40, False, {}, measured)


def test_the_report_says_whether_the_intervals_overlap() -> None:
    better = accuracy_lines(result(at0=(0.2, 0.1, 0.3), at20=(0.9, 0.9, 0.9), at40=(0.5, 0.4, 0.6)))
    assert better[1:3] == ["  before        20.0%  (10.0% to 30.0%)", "  after         50.0%  (40.0% to 60.0%)"]
    assert better[0].startswith("accuracy on 9 distinct held-out questions")
    assert "do not overlap" in better[-1]
    assert better[-1].strip().startswith("better")
    worse = accuracy_lines(result(at0=(0.5, 0.4, 0.6), at40=(0.2, 0.1, 0.3)))
    assert worse[-1].strip().startswith("worse")
    assert "no difference is shown" in accuracy_lines(result(at0=(0.2, 0.1, 0.4), at40=(0.5, 0.4, 0.6)))[-1]
    assert accuracy_lines(result()) == []
    assert len(accuracy_lines(result(at40=(0.2, 0.1, 0.3)))) == 2
    assert next_commands(result())[2][0] == "train --resume runs/x train.steps=80"


def test_commands_are_printed_as_they_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [".venv/bin/tepo", "train"])
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert command_name() == ".venv/bin/tepo"
    monkeypatch.setattr("shutil.which", lambda name: "/bin/tepo")
    assert command_name() == "tepo"


RUNS = [path for path in sorted(EXAMPLES.glob("*.toml")) if path.stem != "study"]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_example_is_a_valid_configuration(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tepo.training import load_config

    monkeypatch.chdir(EXAMPLES.parent)
    assert load_config(path).objective.build().name


def test_the_example_study_is_a_valid_study(monkeypatch: pytest.MonkeyPatch) -> None:
    from tepo.lab.config import load_study

    monkeypatch.chdir(EXAMPLES.parent)
    assert load_study(EXAMPLES / "study.toml").seeds


def test_the_example_with_its_own_reward_runs(tepo_: Tepo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    small = ["train.steps=1", "train.prompts=2", "train.preflight=0", "eval.questions=2", "model.threads=1"]
    ended = tepo_("train", "examples/own_reward.toml", f"runs={json.dumps(str(tmp_path))}", *small, "--json")
    assert ended.code == 0, ended.err
    metrics: dict[str, Any] = ended.json["metrics"]
    assert 0 < metrics["reward/part/digits"] <= 0.2
    assert metrics["reward/part/right"] == metrics["reward/pass_rate"]
