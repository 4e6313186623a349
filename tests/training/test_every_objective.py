"""Every method of the catalogue trains: three steps on the tiny model, two updates each, with a reward of chance."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import tepo
from tepo.training.loading import check_config
from tepo.training.rundir import RunFolder
from tepo.training.trainer import train

REWARD = """
def parity(problems, responses):
    return [float(sum(map(ord, response)) % 2) for response in responses]
"""


@pytest.mark.parametrize("name", [entry.name for entry in tepo.objectives()])
def test_a_method_trains_three_steps(name: str, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    config = check_config(
        {
            "name": "run",
            "runs": str(tmp_path),
            "model": {"path": "builtin:tiny", "device": "cpu", "threads": 1},
            "task": {"source": "arithmetic", "prompt": {"few_shot": 0}, "held_out": 1},
            "reward": {"kind": f"{reward}:parity"},
            "sampling": {"max_tokens": 4, "stop": list("0123456789abcdefghijklm")},  # some end, some are cut
            "objective": {"name": name},
            "optim": {"lr": 1e-3},
            "train": {"steps": 3, "prompts": 2, "group_size": 4, "mini_batches": 2, "preflight": 0},
            "eval": {"at_start": False, "at_end": False},
            "checkpoint": {"every": 0, "at_end": False},
            "log": {"rollouts": 0},
        }
    )
    result = train(config)
    assert result.steps == 3
    lines = RunFolder(result.folder).read_metrics()
    assert [line["step"] for line in lines] == [1, 2, 3]
    # A metric that is no finite number is written as None; lengths are where all responses were cut.
    undefined = {key for line in lines for key, value in line.items() if value is None and key != "length/terminated"}
    assert undefined == set()
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert not any(line["update/skipped"] for line in lines)
    assert max(line["grad/norm"] for line in lines) > 0, "nothing was learned from"
