"""Rows that can change nothing: which objectives have them, and that leaving them out changes no gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

import tepo
from tepo.objectives import Objective
from tepo.objectives.surrogates import QuadraticDrift
from tepo.testing import check_objective
from tepo.testing.batches import random_batch


@pytest.mark.parametrize("name", [entry.name for entry in tepo.objectives()])
def test_leaving_idle_rows_out_changes_no_gradient(name: str) -> None:
    check_objective(name, only={"idle-rows"}, kinds=("zero-variance", "group-of-one"))


@pytest.mark.parametrize(
    ("name", "settings", "has_idle"),
    [
        ("dapo", {}, True),
        ("tepo", {"kl_coef": 1.0}, True),  # its KL holds tokens of positive advantage alone
        ("gspo", {}, True),
        ("cispo", {}, True),
        ("grpo", {"kl_coef": 0.0}, True),
        ("grpo", {"kl_coef": 0.1}, False),
        ("dro", {}, False),  # its surrogate pulls back at an advantage of 0 too
        ("ppo", {}, False),  # the critic learns from every row
    ],
)
def test_rows_of_equal_rewards_are_idle_where_nothing_else_moves_them(
    name: str, settings: dict[str, Any], has_idle: bool
) -> None:
    objective = tepo.objective(name, **settings)
    batch = random_batch(0, fields=objective.needs.batch, kind="zero-variance")
    prepared = objective.prepare(batch).batch
    idle = objective.idle(objective.statistics(prepared))
    equal = (prepared.advantage == 0).all(dim=1)  # type: ignore[union-attr]
    assert bool(idle.any()) == has_idle
    assert (idle == (equal & has_idle)).all()


def test_a_part_that_wrongly_says_it_scales_is_found() -> None:
    @dataclass(frozen=True)
    class Wrong(QuadraticDrift):
        scales_with_advantage: ClassVar[bool] = True

    with pytest.raises(AssertionError, match="idle"):
        check_objective(Objective(name="wrong", surrogate=Wrong(0.5)), only={"idle-rows"}, kinds=("zero-variance",))
