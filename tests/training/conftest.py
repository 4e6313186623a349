"""A tiny run that learns in seconds: random character model, a reward that counts sevens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tepo.training.config import RunConfig
from tepo.training.loading import check_config

REWARD = """
def sevens(problems, responses):
    return [response.count("7") / max(1, len(response)) for response in responses]


def three_values(problems, responses):
    return [0.0] * (len(responses) - 1)
"""


def tiny_tree(folder: Path) -> dict[str, Any]:
    """Return the configuration of a small run on builtin:tiny, as plain values."""
    reward = folder / "reward.py"
    reward.write_text(REWARD)
    return {
        "name": "run",
        "runs": str(folder / "runs"),
        "model": {"path": "builtin:tiny", "device": "cpu", "threads": 1},
        "task": {"source": "arithmetic", "prompt": {"few_shot": 0}, "held_out": 8},
        "reward": {"kind": f"{reward}:sevens"},
        "sampling": {"max_tokens": 6},
        "optim": {"lr": 1e-3},
        "train": {"steps": 3, "prompts": 4, "group_size": 4, "mini_batches": 2, "preflight": 0},
        "eval": {"questions": 4},
        "checkpoint": {"every": 1},
    }


MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def tiny_config(tmp_path: Path) -> MakeConfig:
    """Return a maker of configurations: tiny_config(train={"steps": 5}) changes keys of sections."""
    tree = tiny_tree(tmp_path)

    def make(**changes: Any) -> RunConfig:
        merged = dict(tree)
        for section, values in changes.items():
            merged[section] = {**merged.get(section, {}), **values} if isinstance(values, dict) else values
        return check_config(merged)

    return make
