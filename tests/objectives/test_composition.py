"""Composing from parts: plain values and objects, what is refused, and objectives that the package does not know."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import pkgutil
import re
import typing
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tepo
from tepo.objectives import (
    KL,
    EntropyBonus,
    FallingEntropy,
    GroupNormalized,
    NotTruncated,
    Objective,
    PPOClip,
    SequenceMean,
    SequenceRatio,
    TokenRatio,
    compose,
)
from tepo.objectives.composition import PARTS, SLOTS, as_tree
from tepo.testing import check_objective, evaluate, random_batch

EXAMPLES = Path(__file__).parents[2] / "examples"
ROOM = importlib.import_module("tepo.objectives")


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("composed", EXAMPLES / "composed.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_parts_are_replaced_from_plain_values_and_from_objects() -> None:
    plain = compose(
        "dapo",
        {
            "clip_high": 0.3,
            "reducer": {"part": "SequenceMean"},
            "ratio": "SequenceRatio",
            "regularizers": [{"part": "KL", "coef": 0.1, "mask": {"part": "FallingEntropy"}}],
        },
        name="mine",
    )
    objects = compose(
        "dapo",
        {
            "clip_high": 0.3,
            "reducer": SequenceMean(),
            "ratio": SequenceRatio(),
            "regularizers": [KL(0.1, mask=FallingEntropy())],
        },
        name="mine",
    )
    whole = Objective(
        "mine",
        ratio=SequenceRatio(),
        surrogate=PPOClip(0.2, 0.3),
        regularizers=(KL(0.1, mask=FallingEntropy()),),
        reducer=SequenceMean(),
    )
    assert plain == objects == whole


def test_an_objective_is_a_base_too_and_the_name_follows_the_base() -> None:
    assert compose(tepo.objective("dapo"), {}).name == "dapo-composed"
    assert compose(tepo.objective("tepo"), {"regularizers": []}, name="tepo-markov") == tepo.objective("tepo-markov")


def test_a_name_that_is_setting_and_part_is_read_by_its_value() -> None:
    assert compose("tepo", {"ratio": "sequence-token"}).ratio != compose("tepo", {"ratio": TokenRatio()}).ratio
    assert compose("tepo", {"ratio": {"part": "TokenRatio"}}).ratio == TokenRatio()


def test_settings_apply_before_parts() -> None:
    both = compose("dapo", {"truncated": "drop", "regularizers": [EntropyBonus(0.1)]})
    assert both.selectors == (NotTruncated(),)
    assert both.regularizers == (EntropyBonus(0.1),)


def test_none_is_a_word() -> None:
    assert compose("ppo", {"regularizers": [{"part": "ValueLoss", "clip": "none"}]}).regularizers[0].clip is None  # type: ignore[attr-defined]
    assert tepo.objective("steer", clip_dual="none") == tepo.objective("steer", clip_dual=None)


@pytest.mark.parametrize("name", [entry.name for entry in tepo.objectives()])
def test_every_method_is_written_as_plain_values_and_read_back(name: str) -> None:
    method = tepo.objective(name)
    tree = {place: as_tree(getattr(method, place)) for place in SLOTS}
    rest = {field.name: getattr(method, field.name) for field in dataclasses.fields(method) if field.name not in SLOTS}
    assert compose(Objective(**rest), tree, name=name) == method


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("dap", {}, "objective 'dap' is not in the catalogue. Did you mean 'dapo'?"),
    ("dapo", {"ratoi": "TokenRatio"}, "'dapo' has no setting 'ratoi', and an objective no such part. Did you mean 'ra"),
    ("dapo", {"clip_hihg": 0.3}, "'dapo' has no setting 'clip_hihg', and an objective no such part. Did you mean 'cl"),
    ("dapo", {"ratio": "SequenceRato"}, "ratio: no part 'SequenceRato'. Did you mean 'SequenceRatio'?"),
    ("dapo", {"ratio": {"part": "TokenMean"}}, "ratio: no part 'TokenMean'. It does not belong here. Known: NoRatio, "),
    ("dapo", {"ratio": {"prat": "TokenRatio"}}, 'ratio: expected part = "NAME", one of: NoRatio, TokenRatio'),
    ("dapo", {"ratio": {"part": "TokenRatio", "p": 1}}, "ratio: part 'TokenRatio' has no field 'p'. It has none."),
    ("dapo", {"ratio": 3}, 'ratio: expected a part such as {part = "NoRatio"}, given 3'),
    ("dapo", {"regularizers": [{"part": "KL"}]}, "regularizers[0]: part 'KL' needs coef"),
    ("dapo", {"regularizers": [{"part": "KL", "coeff": 1}]}, "part 'KL' has no field 'coeff'. Did you mean 'coef'?"),
    ("dapo", {"regularizers": [{"part": "KL", "coef": "x"}]}, "regularizers[0]: coef='x', expected float"),
    (
        "dapo",
        {"regularizers": [{"part": "KL", "coef": 1, "mask": {"part": "Falling"}}]},
        "regularizers[0].mask: no part 'Falling'. Did you mean 'FallingEntropy'?",
    ),
    ("dapo", {"selectors": {"part": "NotTruncated"}}, "selectors: expected a list"),
    ("dapo", {"advantage": {"part": "GroupNormalized", "scale": "bach"}}, "advantage: scale='bach', expected one of"),
    ("dapo", {"clip_low": 0.1, "surrogate": PPOClip()}, "clip_low=0.1 of 'dapo' has no effect: surrogate replaces"),
    ("dapo", {"learnable": ["lambda"]}, "learnable names 'lambda', which no part keeps in its state"),
]


@pytest.mark.parametrize(("base", "changes", "words"), WRONG, ids=str)
def test_what_does_not_fit_is_named(base: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(tepo.InputError, match=re.escape(words)):
        compose(base, changes)


def test_an_unknown_place_of_an_objective_is_named() -> None:
    with pytest.raises(tepo.InputError, match=r"an objective has no part 'clip_low'"):
        compose(Objective("mine"), {"clip_low": 0.1})


# --- the vocabulary -------------------------------------------------------------------------------------------


def part_classes() -> dict[str, type]:
    """Return the dataclasses of the room that are built from plain fields and do something when called or asked."""
    found: dict[str, type] = {}
    for module in pkgutil.iter_modules(ROOM.__path__):
        if module.name == "papers":
            continue
        for name, value in vars(importlib.import_module(f"tepo.objectives.{module.name}")).items():
            if inspect.isclass(value) and dataclasses.is_dataclass(value) and value.__module__.endswith(module.name):
                acts = any({"__call__", "values"} & vars(kind).keys() for kind in value.__mro__)
                by_value = value.__dataclass_params__.eq  # type: ignore[attr-defined]  # data compares by identity
                if acts and by_value and value is not Objective:
                    found[name] = value
    return found


def test_every_part_of_the_room_has_its_place_and_is_public() -> None:
    placed = {kind.__name__ for kinds in PARTS.values() for kind in kinds}
    classes = part_classes()
    nested = {"AdaptiveCoefficient"}  # asked for by its own class, not by a place
    assert placed | nested == classes.keys(), "add the part to PARTS in composition.py"
    assert sorted(placed - set(ROOM.__all__)) == [], "add the part to tepo.objectives.__all__"


def test_every_place_of_an_objective_has_parts() -> None:
    for place, hint in SLOTS.items():
        if place in ("log_ratio_clamp", "learnable", "ptx_coef", "partner"):
            continue
        inner = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
        assert PARTS[inner], place


# --- objectives of one's own, from public names alone ------------------------------------------------------------


@pytest.mark.parametrize("make", ["lite_ppo", "least_prefix"])
def test_the_compositions_of_the_example_pass_the_matrix(make: str) -> None:
    check_objective(getattr(load_example(), make)())


def test_lite_ppo_divides_by_the_batch() -> None:
    objective: Objective = load_example().lite_ppo()
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.5])
    group = torch.tensor([0, 0, 0, 1, 1, 1])
    logp = torch.full((6, 2), -1.0)
    batch = tepo.TokenBatch(logp=logp, mask=torch.ones(6, 2, dtype=torch.bool), rewards=rewards, group=group)
    advantage = objective.prepare(batch).batch.advantage
    mean = torch.tensor([2 / 3] * 3 + [0.5] * 3)
    assert advantage is not None
    assert torch.allclose(advantage[:, 0], (rewards - mean) / (rewards.std() + 1e-6))
    assert objective.advantage == GroupNormalized(scale="batch")


def test_the_least_prefix_ratio_by_hand() -> None:
    """Log-ratios 0.1, -0.3, 0.2, -0.1 on four tokens with a hole: each token takes the smallest before it, if < 0."""
    make: Callable[[], Objective] = load_example().least_prefix
    ratio = make().ratio
    mask = torch.tensor([[True, True, False, True, True]])
    logp = torch.where(mask, torch.tensor([[0.1, -0.3, 0.0, 0.2, -0.1]]) - 1, 0.0)
    batch = tepo.TokenBatch(logp=logp, old_logp=torch.where(mask, -1.0, 0.0), mask=mask)
    assert torch.allclose(ratio(batch, 20.0).log, torch.tensor([[0.1, -0.3, 0.0, -0.1, -0.4]]), atol=1e-6)


def test_a_composition_computes_what_its_parts_do() -> None:
    """TEPO, put together from DAPO in plain values, is TEPO."""
    kl = {"part": "KL", "coef": 1.0, "mask": {"part": "FallingEntropy", "margin": 1e-3}}
    mine = compose("dapo", {"ratio": {"part": "SequenceRatio"}, "regularizers": [kl]}, name="tepo")
    assert mine == tepo.objective("tepo")
    batch = random_batch(3, fields=mine.needs.batch)
    assert float(evaluate(mine, batch).loss) == float(evaluate(tepo.objective("tepo"), batch).loss)
