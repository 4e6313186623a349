"""What a run refuses or says so that nothing is lost: one process a folder, damaged settings, weights, rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tepo.core.errors import InputError, WorkError
from tepo.core.lock import hold
from tepo.policy import Policy
from tepo.training.callbacks import Callback, RunInfo
from tepo.training.checkpoint import checkpoint_steps
from tepo.training.experience import Experience
from tepo.training.rundir import RunFolder
from tepo.training.trainer import train

from .conftest import MakeConfig

QUIET: dict[str, Any] = {"at_start": False, "at_end": False}


class Listener(Callback):
    """Keeps what was said."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def on_message(self, text: str) -> None:
        self.messages.append(text)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a model is loaded."""

    def fail(*arguments: object, **options: object) -> Policy:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("tepo.training.setup.load_policy", fail)


def unborn(config: Any) -> RunFolder:
    """Make the folder of a run that has begun and done nothing."""
    from tepo.training.rundir import create, provenance

    folder = RunFolder(Path(config.runs) / config.name)
    folder.path.mkdir(parents=True)
    create(folder.path, config, provenance(device="cpu"))
    return folder


@pytest.mark.usefixtures("no_model")
def test_a_run_that_is_in_use_is_not_continued(tiny_config: MakeConfig) -> None:
    folder = unborn(tiny_config())
    with hold(folder.path), pytest.raises(InputError, match="in use by process"):
        train(tiny_config(), resume=True)


def test_a_new_run_holds_its_folder_and_cutting_back_keeps_the_lock(tiny_config: MakeConfig) -> None:
    found: list[str] = []

    class Second(Listener):
        def on_experience(self, step: int, experience: Experience) -> None:
            with pytest.raises(InputError, match="in use by process"), hold(Path(config.runs) / config.name):
                found.append("held by two")
            found.append("refused")

    config = tiny_config(train={"steps": 1}, eval=QUIET)
    folder = train(config, callbacks=[Second()]).folder
    train(tiny_config(train={"steps": 2}, eval=QUIET), resume=folder, callbacks=[Second()])
    assert found == ["refused", "refused"]


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("end", ["name", "[train]", "[provenance]"])
def test_settings_that_are_cut_short_are_found_before_a_model_is_loaded(tiny_config: MakeConfig, end: str) -> None:
    folder = unborn(tiny_config())
    text = folder.config.read_text()
    folder.config.write_text(text[: text.index(end)])
    with pytest.raises(InputError, match=r"config\.toml: damaged"):
        train(tiny_config(), resume=True)


def test_a_folder_in_which_nothing_was_begun_is_taken(tiny_config: MakeConfig) -> None:
    config = tiny_config(train={"steps": 1}, eval=QUIET)
    path = Path(config.runs) / config.name
    path.mkdir(parents=True)
    for name in (".lock", ".config.toml.ab12"):
        (path / name).write_text("")
    assert train(config).steps == 1


def spoil(policy: Policy) -> None:
    """Make a weight infinite."""
    with torch.no_grad():
        next(policy.model.parameters()).view(-1)[:] = torch.inf


def test_a_disk_that_is_full_at_the_start_is_said(tiny_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tepo.training.rundir.write_text", full)
    with pytest.raises(WorkError, match=r"run folder .* cannot be written to: No space left on device"):
        train(tiny_config())


class SpoilAfter(Listener):
    """Makes a weight of the policy infinite after a step was saved."""

    def __init__(self, step: int, loaded: list[Policy]) -> None:
        super().__init__()
        self.step = step
        self.loaded = loaded

    def on_checkpoint(self, step: int, path: Path) -> None:
        if step == self.step:
            spoil(self.loaded[0])


class SpoilReference(Listener):
    """Makes a weight of the model that was loaded second infinite."""

    def __init__(self, loaded: list[Policy]) -> None:
        super().__init__()
        self.loaded = loaded

    def on_start(self, info: RunInfo) -> None:
        spoil(self.loaded[1])


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Policy]:
    """Return the policies that are loaded, as they are."""
    from tepo.training import setup

    seen: list[Policy] = []
    load = setup.load_policy

    def keep(*arguments: Any, **options: Any) -> Policy:
        seen.append(load(*arguments, **options))
        return seen[-1]

    monkeypatch.setattr(setup, "load_policy", keep)
    return seen


def test_a_policy_that_diverged_is_not_learned_from_nor_saved(tiny_config: MakeConfig, loaded: list[Policy]) -> None:
    config = tiny_config(eval=QUIET, train={"steps": 4})
    with pytest.raises(WorkError, match="not finite") as caught:
        train(config, callbacks=[SpoilAfter(2, loaded)])
    assert "Safe on disk" in str(caught.value)
    assert "step-000002" in str(caught.value)
    assert checkpoint_steps(RunFolder(Path(config.runs) / config.name)) == [1, 2]


def test_a_reference_without_finite_values_is_not_learned_from(tiny_config: MakeConfig, loaded: list[Policy]) -> None:
    objective = {"name": "grpo", "kl_coef": 0.1}
    config = tiny_config(objective=objective, train={"steps": 1, "reference": "builtin:tiny"}, eval=QUIET)
    with pytest.raises(WorkError, match=r"weights of a model are damaged: ref_logp\[0, 0\] is nan"):
        train(config, callbacks=[SpoilReference(loaded)])


def test_a_final_model_that_diverged_is_not_saved(tiny_config: MakeConfig, loaded: list[Policy]) -> None:
    config = tiny_config(eval=QUIET, train={"steps": 2})
    with pytest.raises(WorkError, match=r"the final policy was not saved: .* not finite"):
        train(config, callbacks=[SpoilAfter(2, loaded)])
    assert not (Path(config.runs) / config.name / "model").exists()


@pytest.mark.parametrize(
    ("best", "near", "eval_settings"),
    [("reward/mea", "'reward/mean'", QUIET), ("eval/avgg", "'eval/avg'", {"every": 1})],
)
def test_a_best_metric_that_does_not_exist_is_said_once(
    tiny_config: MakeConfig, best: str, near: str, eval_settings: dict[str, Any]
) -> None:
    listener = Listener()
    train(tiny_config(eval=eval_settings, checkpoint={"every": 1, "best": best}), callbacks=[listener])
    said = [text for text in listener.messages if "checkpoint.best" in text]
    assert len(said) == 1
    assert f"Did you mean {near}?" in said[0]


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("changes", "words"),
    [({"eval": {"at_end": False}}, "needs eval.every"), ({"task": {"held_out": 0}}, "needs task.held_out")],
)
def test_a_best_metric_that_is_never_measured_is_refused(
    tiny_config: MakeConfig, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        train(tiny_config(checkpoint={"every": 1, "best": "eval/avg"}, **changes))


def test_rewards_that_are_missing_are_counted_and_said_once(tiny_config: MakeConfig, tmp_path: Path) -> None:
    reward = tmp_path / "silent.py"
    reward.write_text("def none(problems, responses):\n    return [None] * len(responses)\n")
    listener = Listener()
    config = tiny_config(reward={"kind": f"{reward}:none"}, train={"steps": 2, "preflight": 1}, eval=QUIET)
    result = train(config, callbacks=[listener])
    assert result.metrics["reward/unscored"] == 16
    assert result.metrics["reward/mean"] is None
    said = [text for text in listener.messages if "no reward" in text]
    assert said[0].startswith("warning: no reward: none of 4 responses")
    assert said[1:] == [text for text in said if text.startswith("step 1: no reward: 16 of 16 responses")]


def test_saving_shows_no_bar_of_the_libraries(tiny_config: MakeConfig, capfd: pytest.CaptureFixture[str]) -> None:
    train(tiny_config(train={"steps": 1}, eval=QUIET))
    assert "%|" not in capfd.readouterr().err
