"""Whole runs on the tiny model: what they write, learn, refuse, and how they go on."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tepo.core.errors import InputError, WorkError
from tepo.training.callbacks import Callback
from tepo.training.checkpoint import checkpoint_steps, load_checkpoint
from tepo.training.experience import Experience
from tepo.training.rundir import RunFolder, step_name
from tepo.training.trainer import train

from .conftest import MakeConfig

PER_RUN = ("time/", "speed/", "memory/")


class Recorder(Callback):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.experiences: list[Experience] = []
        self.steps: list[int] = []
        self.closed = False

    def on_message(self, text: str) -> None:
        self.messages.append(text)

    def on_experience(self, step: int, experience: Experience) -> None:
        self.experiences.append(experience)

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True


class StopAfter(Recorder):
    """Presses Ctrl-C while a given step is sampling."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.stop = step

    def on_experience(self, step: int, experience: Experience) -> None:
        super().on_experience(step, experience)
        if step == self.stop:
            signal.raise_signal(signal.SIGINT)


def metrics_of(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(PER_RUN)} for line in lines]


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path / "model" / "model.safetensors")


def assert_same_run(first: Path, second: Path) -> None:
    assert metrics_of(first) == metrics_of(second)
    one, other = weights_of(first), weights_of(second)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def assert_goes_on_as_if_nothing_happened(make: MakeConfig, **changes: Any) -> RunFolder:
    """Make a run of four steps in peace, and one that is stopped after two and resumed; they must be equal to the bit.

    Return the folder of the first.
    """
    whole = train(make(name="whole", **changes))
    config = make(name="parts", checkpoint={"every": 0}, **changes)
    stopped = train(config, callbacks=[StopAfter(2)])
    assert (stopped.steps, stopped.interrupted) == (2, True)
    assert checkpoint_steps(RunFolder(stopped.folder)) == [2]
    assert not stopped.model.exists()
    recorder = Recorder()
    resumed = train(config, resume=True, callbacks=[recorder])
    assert recorder.steps == [3, 4]
    assert not resumed.interrupted
    assert_same_run(whole.folder, resumed.folder)
    last = [load_checkpoint(run.folder / "checkpoints" / step_name(4)).tensors for run in (whole, resumed)]
    assert last[0].keys() == last[1].keys()
    for file, tensors in last[0].items():
        assert all(torch.equal(value, last[1][file][name]) for name, value in tensors.items()), file
    return RunFolder(whole.folder)


def test_a_run_writes_its_folder(tiny_config: MakeConfig) -> None:
    recorder = Recorder()
    result = train(tiny_config(train={"preflight": 2}), callbacks=[recorder])
    folder = RunFolder(result.folder)
    assert (result.steps, result.interrupted) == (3, False)
    assert [line["step"] for line in folder.read_metrics()] == [0, 1, 2, 3]
    assert recorder.steps == [0, 1, 2, 3]
    assert recorder.closed
    assert sorted(result.evaluations) == [0, 3]
    assert result.evaluations[0]["eval/questions"] == 4
    assert checkpoint_steps(folder) == [2, 3]
    assert sorted(file.name for file in folder.rollouts.iterdir()) == [f"step-00000{step}.jsonl" for step in (1, 2, 3)]
    assert (folder.path / "preflight.json").exists()
    assert any("pass rate" in text for text in recorder.messages)
    assert any(text.startswith("estimate: ") for text in recorder.messages)
    assert json.loads((folder.path / "preflight.json").read_text())["responses"] == 8


def test_metrics_of_a_step(tiny_config: MakeConfig) -> None:
    result = train(tiny_config(train={"steps": 1}, eval={"at_start": False, "at_end": False}))
    names = set(result.metrics)
    expected = {
        "reward/mean reward/pass_rate reward/timeouts group/signal group/kept entropy/old entropy/new entropy/change",
        "ratio/mean ratio/max clip/low clip/high kl/old mask/kl length/mean length/truncated length/max",
        "mismatch/logp mismatch/kl mismatch/max grad/norm lr loss loss/policy updates tokens draws micro_tokens",
        "time/step time/sample time/grade time/score time/update speed/sample speed/score speed/update memory/peak_mb",
    }
    assert {name for line in expected for name in line.split()} - names == set()
    assert result.metrics["mismatch/max"] < 1e-4
    assert result.metrics["draws"] == 4
    assert result.metrics["updates"] == 2


def test_kept_rollouts_align_with_tokens(tiny_config: MakeConfig) -> None:
    result = train(tiny_config(train={"steps": 1}, log={"rollouts": 6}))
    lines = (result.folder / "rollouts" / "step-000001.jsonl").read_text().splitlines()
    assert len(lines) == 6
    for line in lines:
        record = json.loads(line)
        size = len(record["token_ids"])
        fields = (
            "tokens",
            "rollout_logp",
            "rollout_entropy",
            "old_logp",
            "old_entropy",
            "logp",
            "entropy",
            "advantage",
        )
        assert [len(record[name]) for name in fields] == [size] * len(fields)
        assert record["rollout_logp"] == pytest.approx(record["old_logp"], abs=1e-4)


def test_final_model_loads_in_transformers(tiny_config: MakeConfig) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = train(tiny_config(train={"steps": 1}, eval={"at_start": False, "at_end": False}))
    model = AutoModelForCausalLM.from_pretrained(result.model)
    assert model.config.model_type == "llama"
    assert AutoTokenizer.from_pretrained(result.model).decode([4]) == "0"
    trained = load_checkpoint(result.folder / "checkpoints" / "step-000001").tensors["policy"]
    assert torch.equal(model.get_input_embeddings().weight, trained["model.embed_tokens.weight"])


def test_it_learns(tiny_config: MakeConfig) -> None:
    """Writing sevens is rewarded: the share of sevens rises from about 1 % to most of what is written."""
    config = tiny_config(
        train={"steps": 7, "prompts": 8, "group_size": 8, "mini_batches": 4},
        eval={"at_start": False, "at_end": False},
        checkpoint={"every": 0, "at_end": False},
    )
    rewards = [line["reward/mean"] for line in metrics_of(train(config).folder)]
    assert rewards[0] < 0.1
    assert rewards[-1] > 0.5


def test_the_same_seed_repeats_and_another_differs(tiny_config: MakeConfig) -> None:
    first = train(tiny_config(name="a", train={"steps": 2}))
    again = train(tiny_config(name="b", train={"steps": 2, "preflight": 2}))
    assert_same_run(first.folder, again.folder)
    other = train(tiny_config(name="c", train={"steps": 2, "seed": 1}))
    assert metrics_of(first.folder) != metrics_of(other.folder)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train": {"dynamic_sampling": True, "epochs": 2}, "objective": {"name": "dapo"}},
        {"objective": {"name": "grpo", "kl_coef": 0.1}, "optim": {"schedule": "cosine", "warmup_steps": 1}},
    ],
)
def test_an_interrupted_run_goes_on_as_if_nothing_happened(tiny_config: MakeConfig, changes: dict[str, Any]) -> None:
    assert_goes_on_as_if_nothing_happened(tiny_config, **{**changes, "train": {"steps": 4, **changes.get("train", {})}})


def test_resuming_makes_the_steps_that_are_left_in_the_same_order_of_data(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """64 problems in batches of 16, two passes: a run saved at step 4 makes steps 5 to 8 on the same data."""
    data = tmp_path / "problems.jsonl"
    data.write_text("".join(json.dumps({"question": f"q{i}", "answer": str(i)}) + "\n" for i in range(64)))
    changes: dict[str, Any] = {
        "task": {"source": str(data), "held_out": 0, "prompt": {"template": "{question}"}},
        "sampling": {"max_tokens": 2},
        "eval": {"at_start": False, "at_end": False},
        "checkpoint": {"every": 4},
    }
    size = {"prompts": 16, "group_size": 2, "mini_batches": 1}

    def questions(recorder: Recorder) -> list[list[str]]:
        return [[group.problem.question for group in experience.drawn] for experience in recorder.experiences]

    whole, first, second = Recorder(), Recorder(), Recorder()
    uninterrupted = train(tiny_config(name="whole", train={"steps": 8, **size}, **changes), callbacks=[whole])
    train(tiny_config(name="parts", train={"steps": 4, **size}, **changes), callbacks=[first])
    resumed = train(tiny_config(name="parts", train={"steps": 8, **size}, **changes), resume=True, callbacks=[second])
    assert second.steps == [5, 6, 7, 8]
    assert questions(first) + questions(second) == questions(whole)
    for part in (questions(whole)[:4], questions(whole)[4:]):
        assert sorted(question for batch in part for question in batch) == sorted(f"q{i}" for i in range(64))
    assert questions(whole)[:4] != questions(whole)[4:]
    assert_same_run(uninterrupted.folder, resumed.folder)


def test_changed_settings_are_shown_and_refused(tiny_config: MakeConfig) -> None:
    train(tiny_config())
    with pytest.raises(InputError) as caught:
        train(tiny_config(optim={"lr": 5e-4}, objective={"kl_coef": 0.1}, train={"steps": 2}), resume=True)
    text = str(caught.value)
    assert "optim.lr: 0.001 in the run, 0.0005 given" in text
    assert "objective.kl_coef: 1.0 in the run, 0.1 given" in text
    assert "train.steps: 3 in the run, 2 given" in text
    assert "train.seed" not in text


def test_resuming_a_finished_run_changes_nothing(tiny_config: MakeConfig) -> None:
    first = train(tiny_config())
    before = metrics_of(first.folder), weights_of(first.folder)
    again = train(tiny_config(), resume=first.folder)
    assert again.steps == 3
    assert metrics_of(first.folder) == before[0]
    assert all(torch.equal(value, before[1][name]) for name, value in weights_of(first.folder).items())


def test_resuming_without_a_checkpoint_starts_again(tiny_config: MakeConfig) -> None:
    first = train(tiny_config(checkpoint={"every": 0, "at_end": False}))
    before = metrics_of(first.folder)
    again = train(tiny_config(checkpoint={"every": 0, "at_end": False}), resume=True)
    assert metrics_of(again.folder) == before


def test_fork_starts_from_a_checkpoint(tiny_config: MakeConfig) -> None:
    parent = train(tiny_config(name="parent"))
    changes: dict[str, Any] = {"name": "child", "optim": {"lr": 1e-4}, "train": {"steps": 4}}
    recorder = Recorder()
    child = train(tiny_config(**changes), fork=f"{parent.folder}@2", callbacks=[recorder])
    assert recorder.steps == [2, 3, 4]  # the evaluation of its start, then its own steps
    assert metrics_of(child.folder)[1]["draws"] == metrics_of(parent.folder)[3]["draws"]
    assert metrics_of(child.folder)[1]["reward/mean"] == metrics_of(parent.folder)[3]["reward/mean"]
    assert metrics_of(child.folder)[1]["lr"] == 1e-4
    assert f'fork = "{parent.folder}@2"' in (child.folder / "config.toml").read_text()


@pytest.mark.parametrize(
    ("fork", "words"), [("{run}@7", "It has: 2, 3"), ("{run}", "RUN@STEP"), ("no/run@2", "no run")]
)
def test_fork_errors(tiny_config: MakeConfig, fork: str, words: str) -> None:
    parent = train(tiny_config(name="parent"))
    with pytest.raises(InputError, match=words):
        train(tiny_config(name="child"), fork=fork.format(run=parent.folder))


def test_dry_run_writes_nothing(tiny_config: MakeConfig, tmp_path: Path) -> None:
    recorder = Recorder()
    result = train(tiny_config(train={"preflight": 2}), dry_run=True, callbacks=[recorder])
    assert result.preflight is not None
    assert result.preflight.responses == 8
    assert result.preflight.step_seconds > 0
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampling": {"temperature": 0.0}}, "sampling.temperature"),
        ({"train": {"mini_batches": 100}}, "train.mini_batches"),
        ({"sampling": {"max_tokens": 5000}}, "positions"),
        ({"model": {"path": "no/such/folder"}}, "no/such/folder"),
        ({"task": {"source": "nowhere.jsonl"}}, "nowhere.jsonl"),
        ({"reward": {"kind": "nowhere.py:f"}}, "nowhere.py"),
        ({"checkpoint": {"every": 0, "best": "eval/avg"}}, "checkpoint.best"),
        ({"task": {"chat": True}}, "chat template"),
    ],
)
def test_wrong_input_is_found_before_anything_is_written(
    tiny_config: MakeConfig, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError) as caught:
        train(tiny_config(**changes))
    assert words in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_made_is_found_before_the_work(tiny_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file is no folder"):
        train(tiny_config(runs=str(tmp_path / "file")))
    with pytest.raises(InputError, match="cannot be made"):
        train(tiny_config(runs=str(tmp_path / ("a" * 300))))


def test_metrics_damaged_inside_are_named(tiny_config: MakeConfig) -> None:
    run = train(tiny_config()).folder
    first, *rest = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([first[:40], *rest]) + "\n")
    with pytest.raises(InputError, match=r"metrics.jsonl: damaged inside"):
        train(tiny_config(), resume=True)


def test_an_existing_run_is_refused(tiny_config: MakeConfig) -> None:
    train(tiny_config(train={"steps": 1}))
    with pytest.raises(InputError, match="exists"):
        train(tiny_config(train={"steps": 1}))


def test_a_failing_reward_says_what_is_safe(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config(reward={"kind": f"{tmp_path / 'reward.py'}:three_values"}, eval={"at_start": False})
    recorder = Recorder()
    with pytest.raises(WorkError) as caught:
        train(config, callbacks=[recorder])
    text = str(caught.value)
    assert "three_values returned 3 values for 4 responses" in text  # a group is graded as soon as it has ended
    assert "Safe on disk" in text
    assert recorder.closed


def test_a_full_disk_leaves_the_last_checkpoint(tiny_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    whole = train(tiny_config(name="whole"))
    save = safetensors.torch.save_file

    def full(tensors: Any, path: Path) -> None:
        if "step-000003" in str(path):
            raise OSError(28, "No space left on device")
        save(tensors, path)

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(WorkError, match=r"No space left.*step-000002"):
        train(tiny_config(name="full"))
    monkeypatch.undo()
    resumed = train(tiny_config(name="full"), resume=True)
    assert_same_run(whole.folder, resumed.folder)


def test_dynamic_sampling_draws_until_there_is_signal(tiny_config: MakeConfig) -> None:
    recorder = Recorder()
    config = tiny_config(
        train={"steps": 2, "dynamic_sampling": True, "max_draws": 3.0}, eval={"at_start": False, "at_end": False}
    )
    result = train(config, callbacks=[recorder])
    for experience in recorder.experiences:
        assert all(group.has_signal for group in experience.groups)
        assert len(experience.groups) <= 4
        assert len(experience.drawn) <= 12
        assert [group.draw for group in experience.groups] == sorted(group.draw for group in experience.groups)
    assert result.metrics["draws"] == sum(len(experience.drawn) for experience in recorder.experiences)
    draws = [group.draw for experience in recorder.experiences for group in experience.drawn]
    assert draws == list(range(len(draws)))


def test_a_step_without_signal_makes_no_update(tiny_config: MakeConfig) -> None:
    config = tiny_config(
        reward={"kind": "exact"},
        train={"steps": 1, "dynamic_sampling": True, "max_draws": 2.0},
        eval={"at_start": False, "at_end": False},
    )
    result = train(config)
    assert result.metrics["group/drawn"] == 8
    assert (result.metrics["group/kept"], result.metrics["updates"]) == (0, 0)


def test_it_runs_outside_the_main_thread(tiny_config: MakeConfig) -> None:
    results: list[int] = []
    config = tiny_config(train={"steps": 1}, eval={"at_start": False, "at_end": False})
    thread = threading.Thread(target=lambda: results.append(train(config).steps))
    thread.start()
    thread.join()
    assert results == [1]


def test_tensorboard_gets_every_number(tiny_config: MakeConfig) -> None:
    pytest.importorskip("tensorboard")
    result = train(tiny_config(train={"steps": 1}, log={"trackers": ["tensorboard"]}))
    assert list((result.folder / "tensorboard").glob("events*"))


def test_a_tracker_that_is_not_installed_is_named(tiny_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"tepo\[track\]"):
        train(tiny_config(log={"trackers": ["wandb"]}))
