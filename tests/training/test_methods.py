"""Every method of the catalogue trains; what a method learns or tunes on the way is saved and gone on with."""

from __future__ import annotations

import math

import pytest

import tepo
from tepo.training.trainer import train

from .conftest import MakeConfig
from .test_trainer import assert_same_run, metrics_of

QUICK = {"eval": {"at_start": False, "at_end": False}}
# Where three steps of a few short responses say nothing at the defaults: lengths of this run, rewards it has.
SETTINGS = {
    "dapo-overlong": {"overlong_length": 6, "overlong_cache": 3, "truncated": "keep"},
    "dr-grpo": {"max_length": 6},
    "high-entropy": {"entropy_fraction": 0.5},
}


@pytest.mark.parametrize("name", [entry.name for entry in tepo.objectives()])
def test_every_method_trains_three_steps(name: str, tiny_config: MakeConfig) -> None:
    result = train(tiny_config(objective={"name": name, **SETTINGS.get(name, {})}, **QUICK))
    lines = metrics_of(result.folder)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    for line in lines:
        numbers = {key: value for key, value in line.items() if isinstance(value, float)}
        assert all(math.isfinite(value) for value in numbers.values()), numbers
        assert line.get("update/skipped", 0.0) == 0
    assert any(line.get("grad/norm", 0.0) > 0 for line in lines)


@pytest.mark.parametrize(
    ("name", "settings", "state"),
    [
        ("lambda-grpo", {}, "state/lambda"),
        ("max-entropy", {"target_entropy": 9.0}, "state/temperature"),
        ("max-entropy", {"target_entropy": 9.0, "tuning": "steps", "temperature_rate": 1e-3}, "state/temperature"),
    ],
    ids=["lambda", "dual", "steps"],
)
def test_what_is_learned_on_the_way_moves_and_is_gone_on_with(
    name: str, settings: dict[str, object], state: str, tiny_config: MakeConfig
) -> None:
    changes = {
        "objective": {"name": name, **settings},
        "optim": {"lr": 1e-3, "state_lr": 0.05},
        "sampling": {"max_tokens": 24},  # some responses end before that, so lengths differ
        **QUICK,
    }
    whole = train(tiny_config(name="whole", **changes))
    values = [line[state] for line in metrics_of(whole.folder) if state in line]
    assert len(set(values)) == 3
    stopped = train(tiny_config(name="parts", train={"steps": 2}, **changes))
    assert_same_run(whole.folder, train(tiny_config(name="parts", **changes), resume=stopped.folder).folder)


def test_a_fixed_lambda_stays(tiny_config: MakeConfig) -> None:
    config = tiny_config(objective={"name": "lambda-grpo", "learn": False, "length_preference": 0.5}, **QUICK)
    assert {line["state/lambda"] for line in metrics_of(train(config).folder) if "state/lambda" in line} == {0.5}
