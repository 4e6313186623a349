"""The catalogue: names, settings, errors and needs."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from typing import Any

import pytest

import tepo
from tepo.objectives import KL, GroupNormalized, Objective, OnPolicyRows, PPOClip, SequenceKLPenalty, entry
from tepo.objectives.catalogue import METHODS

NINE = ["tepo", "tepo-markov", "grpo", "dapo", "dr-grpo", "gspo", "gspo-token", "reinforce", "rloo"]


def test_the_nine_methods_are_there_and_the_catalogue_is_callable_by_both_names() -> None:
    names = [item.name for item in tepo.objectives()]
    assert set(NINE) <= set(names)
    assert names == [item.name for item in tepo.objectives.objectives()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("item", tepo.objectives(), ids=lambda item: item.name)
def test_every_entry_says_what_it_is(item: Any) -> None:
    assert item.formula
    assert item.summary.endswith(".")
    assert item.status in ("confirmed", "inferred", "experimental")
    assert item.paper.title
    assert 1990 < item.paper.year < 2100
    assert not item.paper.arxiv or re.fullmatch(r"\d{4}\.\d{4,5}", item.paper.arxiv)
    assert item.objective.name == item.name
    assert item.needs == item.objective.needs
    for setting in item.settings:
        assert setting.help, setting.name
        assert setting.source, setting.name
        assert setting.type, setting.name
        assert setting.status in ("confirmed", "inferred", "experimental")


WITHOUT_ARXIV = {"reinforce": "Williams 1992"}
"""Papers older than arXiv, and how their docstrings name them."""


@pytest.mark.parametrize("item", tepo.objectives(), ids=lambda item: item.name)
def test_every_docstring_names_its_paper_its_equation_and_how_sure_it_is(item: Any) -> None:
    text = sys.modules[METHODS[item.name].__module__].__doc__ or ""
    assert (item.paper.arxiv or WITHOUT_ARXIV[item.name]) in text
    assert re.search(r"^    .*=", text, re.MULTILINE), "no displayed equation"
    assert item.status in text.lower(), f"says nowhere what is {item.status}"
    for setting in item.settings:
        assert setting.source not in ("confirmed", "inferred", "experimental"), f"{setting.name}: from where?"


@pytest.mark.parametrize("item", tepo.objectives(), ids=lambda item: item.name)
def test_defaults_are_the_defaults(item: Any) -> None:
    explicit = tepo.objective(item.name, **{setting.name: setting.default for setting in item.settings})
    assert explicit == tepo.objective(item.name) == item.objective
    assert hash(explicit) == hash(item.objective)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("tpeo", {}, "objective 'tpeo' is not in the catalogue. Did you mean 'tepo'?"),
    ("drgrpo", {}, "objective 'drgrpo' is not in the catalogue. Did you mean 'dr-grpo'?"),
    (
        "em-inf",
        {},
        "'em-inf' has no loss to train with: it is an option of decoding. Switch it on with sampling.",
    ),
    ("em-ing", {}, "objective 'em-ing' is not in the catalogue. Did you mean 'em-inf'?"),
    ("zzz", {}, "objective 'zzz' is not in the catalogue. Known: "),
    ("tepo", {"kl_coeff": 1.0}, "objective 'tepo' has no setting 'kl_coeff'. Did you mean 'kl_coef'?"),
    ("tepo", {"beta": 1.0}, "objective 'tepo' has no setting 'beta'."),
    ("dapo", {"kl_coef": 1.0}, "objective 'dapo' has no setting 'kl_coef'."),
    ("tepo", {"kl_coef": "1"}, "objective 'tepo': kl_coef='1', expected float"),
    ("tepo", {"kl_coef": True}, "objective 'tepo': kl_coef=True, expected float"),
    ("tepo", {"kl_coef": float("nan")}, "objective 'tepo': kl_coef=nan, expected float"),
    ("tepo", {"kl_coef": None}, "objective 'tepo': kl_coef=None, expected float"),
    ("tepo", {"clip_dual": "3"}, "objective 'tepo': clip_dual='3', expected float | None"),
    ("tepo", {"kl_target": "referense"}, "kl_target='referense', expected one of 'old', 'reference'. Did you mean"),
    ("tepo", {"kl_estimator": 3}, "kl_estimator=3, expected one of 'k1', 'abs', 'k2', 'k3', 'k3-old', 'full'"),
    ("tepo", {"kl_estimator": "full"}, "the old policy's distribution is not kept; use kl_target='reference'"),
    ("dr-grpo", {"max_length": 8.5}, "max_length=8.5, expected int"),
    ("dr-grpo", {"max_length": 0}, "objective 'dr-grpo': max_length=0, expected a finite number >= 1"),
    ("dapo", {"clip_low": -0.1}, "objective 'dapo': clip_low=-0.1, expected a finite number >= 0"),
    ("tepo", {"kl_coef": -1.0}, "objective 'tepo': kl_coef=-1.0, expected a finite number >= 0"),
    ("gdpo", {"reward_weights": (1.0, float("inf"))}, "reward_weights=(1.0, inf), expected a finite number"),
    ("dapo", {"clip_dual": 1.0}, "clip_dual=1.0: expected a number > 1, or None"),
    ("dapo", {"log_ratio_clamp": 0.0}, "log_ratio_clamp=0.0: expected a number > 0"),
    ("dapo", {"importance_weight": "mask", "importance_cap": 0.5}, "importance_cap=0.5, expected a finite number >= 1"),
    ("dapo", {"advantage_eps": -1e-6}, "advantage_eps=-1e-06, expected a finite number >= 0"),
    ("grpo", {"kl_adapt_to": 0.0}, "kl_adapt_to=0.0: expected a number of nats > 0, or none"),
]


@pytest.mark.parametrize(("name", "settings", "words"), WRONG, ids=str)
def test_wrong_input_is_an_error_that_names_it(name: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(tepo.InputError, match=re.escape(words)):
        tepo.objective(name, **settings)


MAY_BE_NEGATIVE = {
    *(
        "covariance_low",
        "covariance_high",
        "gate",
        "length_preference",
        "missing_eos",
        "p",
        "p_end",
        "reward_weights",
        "seed",
    ),
}


@pytest.mark.parametrize("item", tepo.objectives(), ids=lambda item: item.name)
def test_numbers_that_no_formula_means_are_refused_by_the_setting_s_name(item: Any) -> None:
    for setting in item.settings:
        if not re.search(r"float|int", setting.type):
            continue
        wrong = [math.nan, math.inf, -math.inf] if "float" in setting.type else []
        wrong += [] if setting.name in MAY_BE_NEGATIVE else [-1]
        for value in wrong:
            given = (1.0, value) if setting.type.startswith("list") else value
            with pytest.raises(
                tepo.InputError, match=rf"^objective '{re.escape(item.name)}': {setting.name}=.*expected"
            ):
                tepo.objective(item.name, **{setting.name: given})


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"regularizers": (KL(-1.0),)}, "objective 'mine': KL: coef=-1.0, expected a number >= 0"),
        ({"regularizers": (KL(math.nan),)}, "objective 'mine': KL: coef=nan, expected a number"),
        ({"surrogate": OnPolicyRows(PPOClip(math.nan), 1.0)}, "OnPolicyRows: PPOClip: low=nan, expected a number"),
        ({"shaping": (SequenceKLPenalty(-0.1),)}, "SequenceKLPenalty: coef=-0.1, expected a number >= 0"),
        ({"advantage": GroupNormalized(eps=-1.0)}, "GroupNormalized: eps=-1.0, expected a number >= 0"),
        ({"ptx_coef": -1.0}, "objective 'mine': ptx_coef=-1.0, expected a number >= 0"),
    ],
    ids=str,
)
def test_composed_parts_are_held_to_the_same(parts: dict[str, Any], words: str) -> None:
    with pytest.raises(tepo.InputError, match=re.escape(words)):
        Objective("mine", **parts)


def test_an_integer_is_a_float_and_a_setting_reaches_the_composition() -> None:
    assert tepo.objective("tepo", kl_coef=2).regularizers[0].coef == 2  # type: ignore[attr-defined]
    assert tepo.objective("dapo", clip_dual=3).surrogate.dual == 3  # type: ignore[attr-defined]
    assert tepo.objective("dapo") != tepo.objective("dapo", clip_high=0.3)


def test_objectives_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        tepo.objective("tepo").name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "batch", "reference", "old_logp", "fine"),
    [
        ("tepo", {"entropy", "old_entropy"}, False, False, False),
        ("tepo-markov", set(), False, False, False),
        ("grpo", {"ref_logp"}, True, False, False),
        ("dapo", set(), False, False, False),
        ("dr-grpo", set(), False, False, False),
        ("gspo", set(), False, False, True),
        ("gspo-token", set(), False, False, True),
        ("reinforce", set(), False, False, False),
        ("rloo", {"ref_logp"}, True, True, False),
    ],
)
def test_needs_of_the_nine(name: str, batch: set[str], reference: bool, old_logp: bool, fine: bool) -> None:
    needs = entry(name).needs
    assert needs.batch - {"rewards", "group", "old_logp"} == batch
    assert (needs.reference, needs.old_logp, needs.fine_clip) == (reference, old_logp, fine)
    assert needs.old_entropy == (name == "tepo")
    assert not needs.mini_statistics


def test_shared_settings_add_their_needs() -> None:
    needs = tepo.objective(
        "dapo", truncated="drop", zero_variance="drop", importance_weight="truncate", scope="group", entropy_coef=0.1
    ).needs
    assert needs.batch == {"truncated", "rewards", "group", "rollout_logp", "entropy"}
    assert needs.scores == {"entropy", "entropy_grad"}


def test_an_objective_is_composed_without_the_catalogue() -> None:
    assert Objective("mine") == Objective("mine")
    assert Objective("mine").needs.batch == {"rewards", "group"}
