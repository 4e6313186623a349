"""What a method learns or tunes on the way is saved and gone on with."""

from __future__ import annotations

import pytest

from tepo.training.trainer import train

from .conftest import MakeConfig
from .test_trainer import assert_same_run, metrics_of

QUICK = {"eval": {"at_start": False, "at_end": False}}


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
