"""Every method's values are frozen: a change of numbers is a decision, not an accident.

`python tests/objectives/golden.py --write` freezes new values.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from golden import FILE, KINDS, from_json, values

import tepo

GOLDEN = json.loads(FILE.read_text())


def flat(tree: Any, path: str = "") -> dict[str, float]:
    """Return {path: number} of nested dicts and lists."""
    if isinstance(tree, dict):
        return {key: value for name, each in tree.items() for key, value in flat(each, f"{path}/{name}").items()}
    if isinstance(tree, list):
        return {key: value for i, each in enumerate(tree) for key, value in flat(each, f"{path}/{i}").items()}
    return {path: tree}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [entry.name for entry in tepo.objectives()])
def test_values_are_the_frozen_ones(name: str, kind: str) -> None:
    assert name in GOLDEN["objectives"], f"no golden values for {name!r}: python tests/objectives/golden.py --write"
    now = flat(values(name, from_json(GOLDEN["batches"][kind])))
    assert now == pytest.approx(flat(GOLDEN["objectives"][name][kind]), rel=1e-12, abs=1e-15)


def test_no_method_was_lost() -> None:
    assert set(GOLDEN["objectives"]) <= {entry.name for entry in tepo.objectives()}
