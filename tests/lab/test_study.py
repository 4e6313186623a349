"""Studies: what is refused, what is planned, what is kept, and what the figures rest on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tepo.core.errors import InputError, WorkError
from tepo.core.files import write_text
from tepo.evaluation import Evaluation, QuestionResult, SampleResult
from tepo.lab.config import StudyConfig, load_study
from tepo.lab.folder import DONE, FAILED, HALF, WAITING, StudyFolder
from tepo.lab.plan import differing, plan_runs, plan_tuning, refuse_changed, threads_each
from tepo.lab.processes import Job, last_words, run_jobs
from tepo.lab.results import analyse
from tepo.lab.study import choose
from tepo.objectives import SequenceRatio
from tepo.training.rundir import write_config

BASE = {
    "model": {"path": "builtin:tiny", "device": "cpu"},
    "train": {"steps": 20, "prompts": 2, "group_size": 2},
    "eval": {"questions": 8},
}
Make = Callable[..., StudyConfig]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def study(**changes: Any) -> StudyConfig:
        tree = {
            "name": "s",
            "studies": str(tmp_path),
            "base": BASE,
            "variants": ["dapo", "tepo"],
            "cores": 2,
            **changes,
        }
        return StudyConfig.model_validate(tree)

    return study


def folder_of(study: StudyConfig) -> StudyFolder:
    return StudyFolder(Path(study.studies) / study.name)


def test_a_study_is_read_from_toml_with_its_base_run_beside_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[optim]\nlr = 1e-3\n[objective]\nname = 'tepo'\nkl_coef = 0.5\n")
    (tmp_path / "study.toml").write_text(
        'base = "run.toml"\nseeds = 4\nvariants = ["dapo", { objective = "grpo" }, '
        '{ name = "strong", objective = { kl_coef = 2.0 } }]\n'
    )
    study = load_study(tmp_path / "study.toml", ["base.train.steps=7", "at_once=2"])
    assert (study.name, study.seeds, study.at_once) == (tmp_path.name, (0, 1, 2, 3), 2)
    assert [variant.name for variant in study.variants] == ["dapo", "grpo", "strong"]
    objectives = {run.variant: run.config.objective for run in plan_runs(study, folder_of(study), {})}
    # Another objective takes nothing of the base's; the same one keeps what it does not change.
    assert objectives["dapo"].overrides == {}
    assert (objectives["strong"].name, objectives["strong"].overrides) == ("tepo", {"kl_coef": 2.0})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"variants": [{"name": "a", "train": {"seed": 3}}]}, "changes train.seed"),
        ({"variants": [{"name": "a", "eval": {"questions": 3}}]}, "changes eval"),
        ({"variants": [{"name": "a", "task": {"source": "x"}}]}, "changes task"),
        ({"variants": [{"name": "a", "train": {"steps": 3}}]}, "changes train.steps"),
        ({"variants": ["a", "a"]}, "two variants have one name"),
        ({"variants": [{"name": "../x"}]}, "names a folder"),
        ({"baseline": "grpo"}, "is not a variant"),
        ({"seeds": [1, 1]}, "must be different"),
        ({"tuning": {"grid": [1e-3], "seeds": [0]}}, "tuned on and compared"),
        ({"steps": 3, "tokens": 4}, "steps or tokens"),
    ],
)
def test_what_would_not_be_fair_is_refused(make: Make, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(**changes)


def test_all_variants_of_a_seed_come_before_the_next_seed_and_differ_in_the_objective_alone(make: Make) -> None:
    study = make(seeds=2, at_once=2)
    runs = plan_runs(study, folder_of(study), {})
    assert [run.name for run in runs] == ["dapo-seed0", "tepo-seed0", "dapo-seed1", "tepo-seed1"]
    assert [run.config.train.seed for run in runs] == [0, 0, 1, 1]
    first, second = (run.config.model_dump() for run in runs[:2])
    assert {key.split(".")[0] for key in differing(first, second)} == {"name", "objective"}
    assert {run.config.model.threads for run in runs} == {threads_each(study)} == {1}


def test_a_budget_in_tokens_ends_runs_by_tokens(make: Make) -> None:
    base = {**BASE, "train": {"prompts": 2}}
    runs = plan_runs(make(tokens=5000, base=base), StudyFolder(Path("x")), {})
    assert {(run.config.train.tokens, run.config.train.steps) for run in runs} == {(5000, 1_000_000)}
    with pytest.raises(InputError, match="schedule"):
        plan_runs(make(tokens=5000, base={**base, "optim": {"schedule": "cosine"}}), StudyFolder(Path("x")), {})


@pytest.mark.parametrize("key", ["seed", "tokens"])
def test_what_the_study_sets_is_not_set_in_the_base(make: Make, key: str) -> None:
    with pytest.raises(InputError, match=f"base.train.{key} is set"):
        plan_runs(make(base={"train": {key: 3}}), StudyFolder(Path("x")), {})


def test_a_composed_variant_takes_nothing_from_the_base_objective(make: Make) -> None:
    composed = {"name": "mine", "objective": {"base": "dapo", "ratio": {"part": "SequenceRatio"}}}
    base = {**BASE, "objective": {"name": "tepo", "kl_coef": 0.5}}
    runs = plan_runs(make(base=base, variants=["tepo", composed]), StudyFolder(Path("x")), {})
    built = {run.name: run.config.objective.build() for run in runs}
    assert built["mine-seed0"].ratio == SequenceRatio()
    assert built["mine-seed0"].regularizers == ()
    assert built["tepo-seed0"].regularizers[0].coefficient({}) == 0.5


def test_faults_of_a_variant_name_it(make: Make) -> None:
    with pytest.raises(InputError, match=r"variant 'dapo': unknown key 'optim\.ll'"):
        plan_runs(make(variants=[{"name": "dapo", "optim": {"ll": 1}}]), StudyFolder(Path("x")), {})


def put(study: StudyConfig, run: Any, rewards: list[float], status: str = DONE, **more: Any) -> None:
    """Write what a run of a study leaves."""
    folder = folder_of(study)
    place = folder.run(run.name, run.kind)
    place.path.mkdir(parents=True)
    write_config(place, run.config, {})
    place.eval.mkdir()
    for step, reward in enumerate(rewards, start=1):
        line = {"reward/mean": reward, "entropy/rollout": 1.0, "grad/norm": 1.0, "tokens": 10 * step, "time/step": 1.0}
        place.append_metrics(step, line)
    if "passed" in more:
        results = tuple(
            QuestionResult(f"q{n}", f"q{n}", "1", (SampleResult("", float(right), right, None, 2, "eos"),))
            for n, right in enumerate(more["passed"])
        )
        Evaluation(results, {}).write(place.eval / "step-000020.jsonl")
    if status != HALF:
        folder.write_state(run.name, status, more.get("error"))


def test_a_grid_is_tuned_on_its_own_seeds_and_each_variant_gets_its_best(make: Make) -> None:
    study = make(tuning={"grid": [1e-4, 1e-3, 1e-2], "seeds": [7], "steps": 5})
    runs = plan_tuning(study, folder_of(study))
    assert runs[0].name == "dapo-lr0.0001-seed7"
    assert {(run.kind, run.seed, run.config.train.steps) for run in runs} == {("tuning", 7, 5)}
    best = {"dapo": 1e-3, "tepo": 1e-2}
    for run in runs[:-1]:
        put(study, run, [0.9] * 15 + [0.8 if run.value == best[run.variant] else 0.5] * 5)
    assert choose(study, folder_of(study), runs, partial=True).keys() == {"dapo"}
    put(study, runs[-1], [0.1] * 15 + [0.8] * 5)
    chosen = choose(study, folder_of(study), runs)
    assert {name: record["value"] for name, record in chosen.items()} == best
    assert (chosen["dapo"]["edge"], chosen["tepo"]["edge"]) == (False, True)
    tuned = plan_runs(study, folder_of(study), {name: record["value"] for name, record in chosen.items()})
    assert {run.variant: run.config.optim.lr for run in tuned} == best


def test_a_grid_whose_runs_all_failed_is_a_failure(make: Make) -> None:
    study = make(tuning={"grid": [1.0], "seeds": [7]})
    runs = plan_tuning(study, folder_of(study))
    for run in runs:
        put(study, run, [0.5], FAILED, error="no")
    with pytest.raises(WorkError, match="no tuning run has reward/mean"):
        choose(study, folder_of(study), runs)


def test_runs_that_were_begun_with_other_settings_are_refused(make: Make) -> None:
    study = make()
    runs = plan_runs(study, folder_of(study), {})
    put(study, runs[0], [0.5])
    refuse_changed(folder_of(study), runs)
    other = make(base={**BASE, "optim": {"lr": 0.5}})
    with pytest.raises(InputError, match=r"dapo-seed0 was begun with other settings.*optim\.lr"):
        refuse_changed(folder_of(other), plan_runs(other, folder_of(other), {}))
    threads = make(base={**BASE, "model": {**BASE["model"], "threads": 9}})
    refuse_changed(folder_of(threads), plan_runs(threads, folder_of(threads), {}))


@pytest.fixture
def analysed(make: Make) -> Mapping[str, Any]:
    """A study of four seeds: tepo is better by 0.2, one of its runs failed and one is not finished."""
    study = make(seeds=5)
    runs = plan_runs(study, folder_of(study), {})
    for run in runs:
        gain = 0.2 if run.variant == "tepo" else 0.0
        rewards = [0.1 + (0.5 + gain) * step / 20 + 0.01 * (run.seed % 3) for step in range(1, 21)]
        if (run.variant, run.seed) == ("tepo", 1):
            put(study, run, rewards[:3], FAILED, error="ran out\nof memory")
        elif (run.variant, run.seed) == ("tepo", 4):
            put(study, run, rewards[:9], HALF)
        else:
            put(study, run, rewards, passed=[n % 4 < (3 if gain else 1) or n == run.seed for n in range(40)])
    return analyse(study, folder_of(study), runs, {})


def test_failed_and_half_runs_are_shown_and_left_out(analysed: Mapping[str, Any]) -> None:
    states = {run["name"]: (run["status"], run["error"], run["steps"]) for run in analysed["runs"]}
    assert states["tepo-seed1"] == ("failed", "ran out\nof memory", 3)
    assert states["tepo-seed4"] == ("half", None, 9)
    assert states["dapo-seed0"] == ("done", None, 20)
    assert [one["finished"] for one in analysed["variants"]] == [5, 3]
    (comparison,) = analysed["comparisons"]
    assert comparison["seeds"] == [0, 2, 3]
    notes = " ".join(analysed["notes"])
    assert "failed, and left out of every figure: tepo-seed1" in notes
    assert "not finished, and left out of every figure: tepo-seed4" in notes
    json.dumps(analysed, allow_nan=False)


def test_the_figures_are_those_of_the_runs(analysed: Mapping[str, Any]) -> None:
    (comparison,) = analysed["comparisons"]
    assert comparison["accuracy"]["value"] == pytest.approx(0.5, abs=0.03)
    assert comparison["accuracy"]["questions"] == 40
    assert comparison["accuracy"]["questions_better"] == 20
    assert comparison["accuracy"]["questions_worse"] == 0
    assert comparison["final_reward"]["value"] == pytest.approx(0.2 * 19.5 / 20)
    assert comparison["entropy_kept"]["value"] == 0
    assert comparison["improvement"]["value"] == 1
    (steps,) = [one for one in comparison["times"] if one["axis"] == "steps"]
    start, end = 0.1 + 0.008 + 0.5 * 1.5 / 20, 0.1 + 0.008 + 0.5 * 19.5 / 20  # 0.008: the seeds' mean offset
    assert analysed["thresholds"] == {"reward/mean": pytest.approx(start + 0.8 * (end - start), abs=1e-4)}
    assert steps["reached"] == [3, 3]
    assert steps["ratio"]["value"] < 1
    assert analysed["verdicts"][0].startswith("tepo minus dapo: +49.2 points of accuracy, 95 % [")
    assert "3 seeds, paired over 40 questions: better (3 seeds" in analysed["verdicts"][0]
    assert any("chosen after seeing it" in note for note in analysed["notes"])


def test_a_threshold_that_no_run_recorded_is_told_with_the_nearest_name(make: Make) -> None:
    study = make(thresholds={"reward/men": 0.5}, seeds=1)
    runs = plan_runs(study, folder_of(study), {})
    put(study, runs[0], [0.1, 0.2])
    notes = " ".join(analyse(study, folder_of(study), runs, {})["notes"])
    assert "no run recorded 'reward/men', so nothing is said of its threshold. Did you mean 'reward/mean'?" in notes


def test_nothing_finished_is_said_and_no_crash(make: Make) -> None:
    study = make()
    results = analyse(study, folder_of(study), plan_runs(study, folder_of(study), {}), {})
    assert {run["status"] for run in results["runs"]} == {WAITING}
    assert results["verdicts"] == ["tepo against dapo: no finished run of dapo or tepo, nothing to compare"]


def test_one_seed_has_no_interval_over_seeds(make: Make) -> None:
    study = make(seeds=1)
    runs = plan_runs(study, folder_of(study), {})
    for run in runs:
        put(study, run, [0.1, 0.5, 0.6 if run.variant == "tepo" else 0.5])
    (comparison,) = analyse(study, folder_of(study), runs, {})["comparisons"]
    assert comparison["final_reward"]["low"] is None
    assert any(said.endswith("1 seed: nothing can be said about other seeds") for said in comparison["verdicts"])


def test_two_studies_at_once_on_one_folder_are_refused(make: Make) -> None:
    folder = folder_of(make())
    with folder.locked(), pytest.raises(InputError, match="another `tepo compare`"), folder.locked():
        pass
    with folder.locked():
        pass


def test_jobs_run_at_most_so_many_at_once_and_tell_how_they_ended(tmp_path: Path) -> None:
    script = "import os, sys, time; print(os.environ['OMP_NUM_THREADS'], flush=True); time.sleep(0.2); sys.exit({})"
    commands = {code: (sys.executable, "-S", "-c", script.format(code)) for code in (0, 1, 2)}
    jobs = [Job(f"j{code}", command, tmp_path / f"{code}.log") for code, command in commands.items()]
    alive, most, codes = 0, 0, {}

    def started(name: str) -> None:
        nonlocal alive, most
        alive += 1
        most = max(most, alive)

    def ended(name: str, code: int, seconds: float) -> None:
        nonlocal alive
        alive -= 1
        codes[name] = code

    assert run_jobs(jobs, at_once=2, threads=3, started=started, ended=ended, stopping=pytest.fail)
    assert (most, codes) == (2, {"j0": 0, "j1": 1, "j2": 2})
    assert last_words(tmp_path / "0.log") == "3"
    assert last_words(tmp_path / "none.log") == ""


def test_last_words_skip_blank_lines(tmp_path: Path) -> None:
    write_text(tmp_path / "log", "a\n\n  \nb\nc\n\n")
    assert last_words(tmp_path / "log", lines=2) == "b\nc"
