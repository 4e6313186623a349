"""Our objectives against TRL's own code: the same random batches, equal losses and gradients.

`trl_standin` runs the real trainer methods on given tensors. Where we differ on purpose, the random batches leave the
case out and a test of its own shows both sides; docs/differences.md has the reasons.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch

if os.environ.get("TEPO_PEER") != "trl":  # `make test-trl` sets it: there, a missing TRL is a failure
    pytest.importorskip("trl", reason="TRL lives in its own environment: make test-trl")

from random_batches import FEWER, Comparison, Draw, compare, ours
from torch import Tensor
from trl_standin import GRPOStandIn, RLOOStandIn, accumulated, loss_of

from tepo.objectives import (
    KL,
    GroupNormalized,
    LeaveOneOut,
    Objective,
    PPOClip,
    SequenceKLPenalty,
    SequenceRatio,
    SequenceSum,
    TokenBatch,
    TokenMean,
    objective,
)

pytestmark = pytest.mark.peer

# TRL multiplies the variance by a float32 n/(n-1), whatever the dtype of the rewards: no tighter than 1e-7.
FLOAT32_STD = 1e-7
DRAW = Draw(equal_groups=True)
RLOO_DRAW = Draw(equal_groups=True, holes=False, empty_rows=False, spread=(0.01, 0.1, 0.3))

CLIPS = ("clip/low", "clip/high")
HIGHER = {"loss_type": "dapo", "epsilon_high": 0.28}
SEQUENCE = {**HIGHER, "importance_sampling_level": "sequence"}
FINE = {"epsilon_low": 3e-4, "epsilon_high": 4e-4, "importance_sampling_level": "sequence"}


def normalized(composed: Objective, scale: Any = "group") -> Objective:
    """Return the objective with TRL's epsilon beside the standard deviation, for those without such a setting."""
    return dataclasses.replace(composed, advantage=GroupNormalized(scale, eps=1e-4))


GRPO = {"advantage_eps": 1e-4, "empty_rows": "count"}
COMPOSED = Objective(
    name="composed",
    ratio=SequenceRatio(),
    surrogate=PPOClip(0.2, 0.28),
    regularizers=(KL(0.1, "reference"),),
    reducer=TokenMean(),
)

# name: (our objective, TRL's settings, metrics that some batches must exercise)
METHODS: dict[str, tuple[Objective, dict[str, Any], tuple[str, ...]]] = {
    "grpo": (objective("grpo", kl_coef=0.0, **GRPO), {}, CLIPS),
    "grpo with KL": (objective("grpo", kl_coef=0.04, **GRPO), {"beta": 0.04}, (*CLIPS, "loss/kl")),
    "grpo, truncated dropped": (
        objective("grpo", kl_coef=0.0, truncated="drop", **GRPO),
        {"mask_truncated_completions": True},
        CLIPS,
    ),
    "dapo": (objective("dapo", advantage_eps=1e-4), HIGHER, CLIPS),
    "bnpo": (objective("dapo", advantage_eps=1e-4), {**HIGHER, "loss_type": "bnpo"}, CLIPS),
    "dapo, two-sided clip": (
        objective("dapo", advantage_eps=1e-4, clip_dual=2.0),
        {**HIGHER, "delta": 2.0},
        ("clip/dual",),
    ),
    "dapo, batch-scaled advantage": (
        normalized(objective("dapo"), "batch"),
        {**HIGHER, "scale_rewards": "batch"},
        CLIPS,
    ),
    "dapo, entropy bonus": (
        objective("dapo", advantage_eps=1e-4, entropy_coef=0.01),
        {**HIGHER, "entropy_coef": 0.01},
        ("loss/entropy_bonus",),
    ),
    "dapo, truncated dropped": (
        objective("dapo", advantage_eps=1e-4, truncated="drop"),
        {**HIGHER, "mask_truncated_completions": True},
        CLIPS,
    ),
    "dr-grpo": (
        dataclasses.replace(objective("dr-grpo"), reducer=SequenceSum(64, empty_rows="count")),
        {"loss_type": "dr_grpo", "scale_rewards": "none", "max_completion_length": 64},
        CLIPS,
    ),
    "gspo": (objective("gspo", **GRPO), FINE, CLIPS),
    "gspo-token": (objective("gspo-token", **GRPO), FINE, CLIPS),
    "tepo-markov": (normalized(objective("tepo-markov")), SEQUENCE, CLIPS),
    "tepo-markov, sequence-token": (normalized(objective("tepo-markov", ratio="sequence-token")), SEQUENCE, CLIPS),
    "tepo without KL": (normalized(objective("tepo", kl_coef=0.0)), SEQUENCE, CLIPS),
    "tepo's policy term, KL to the reference": (normalized(COMPOSED), {**SEQUENCE, "beta": 0.1}, ("loss/kl",)),
    "dapo, token weights capped": (
        objective("dapo", advantage_eps=1e-4, importance_weight="truncate", importance_cap=1.5),
        {**HIGHER, "use_vllm": True, "vllm_importance_sampling_clip_max": 1.5},
        CLIPS,
    ),
    "dapo, token weights masked": (
        objective("dapo", advantage_eps=1e-4, importance_weight="mask", importance_cap=1.5),
        {
            **HIGHER,
            "use_vllm": True,
            "vllm_importance_sampling_mode": "token_mask",
            "vllm_importance_sampling_clip_min": 1 / 1.5,
            "vllm_importance_sampling_clip_max": 1.5,
        },
        CLIPS,
    ),
    "dapo, sequence weights masked": (
        objective("dapo", advantage_eps=1e-4, importance_weight="sequence-mask", importance_cap=3.0),
        {
            **HIGHER,
            "use_vllm": True,
            "vllm_importance_sampling_mode": "sequence_mask",
            "vllm_importance_sampling_clip_max": 3.0,
        },
        CLIPS,
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_loss_and_gradient_equal_trl(name: str) -> None:
    mine, settings, exercised = METHODS[name]
    comparison = Comparison(tolerance=FLOAT32_STD)
    for batch in DRAW.batches():
        compare(comparison, ours(mine, batch), loss_of(GRPOStandIn(batch, **settings)))
    comparison.verdict(*exercised)


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "tepo-markov"])
def test_first_update_without_old_log_probs_equals_trl(name: str) -> None:
    mine, settings, _ = METHODS[name]
    comparison = Comparison(tolerance=FLOAT32_STD)
    for batch in DRAW.batches(FEWER):
        theirs = loss_of(GRPOStandIn(batch, num_iterations=1, **settings))
        compare(comparison, ours(mine, batch.replace(old_logp=None, old_entropy=None)), theirs)
    comparison.verdict(batches=FEWER)


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "tepo-markov"])
def test_float32_equals_trl(name: str) -> None:
    mine, settings, exercised = METHODS[name]
    comparison = Comparison(tolerance=2e-5)
    for batch in dataclasses.replace(DRAW, dtype=torch.float32).batches(FEWER):
        compare(comparison, ours(mine, batch), loss_of(GRPOStandIn(batch, **settings)))
    comparison.verdict(*exercised, batches=FEWER)


@pytest.mark.parametrize(
    ("kl_coef", "exercised"), [(0.0, CLIPS), (0.05, CLIPS)], ids=["without KL", "with KL in the reward"]
)
def test_rloo_equals_trl(kl_coef: float, exercised: tuple[str, ...]) -> None:
    mine = objective("rloo", ratio="sequence-sum", kl_coef=kl_coef, empty_rows="count")
    comparison = Comparison()
    for batch in RLOO_DRAW.batches():
        compare(comparison, ours(mine, batch), loss_of(RLOOStandIn(batch, beta=kl_coef)))
    comparison.verdict(*exercised)


def test_rloo_without_a_ratio_has_the_gradient_of_trls_first_update() -> None:
    comparison = Comparison()
    for batch in RLOO_DRAW.batches(FEWER):
        first = batch.replace(logp=batch.old_logp)
        mine, theirs = ours(objective("rloo", kl_coef=0.05), first), loss_of(RLOOStandIn(first, beta=0.05))
        comparison.add("d loss / d logp", mine.logp, theirs.logp)
        comparison.note(mine.metrics)
    comparison.verdict(batches=FEWER)


# --- advantages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_normalised_advantages_equal_trl(scale: Any) -> None:
    """With unscorable rewards (NaN) among the components: they leave the group's statistics and get 0."""
    mine = dataclasses.replace(objective("dapo"), advantage=GroupNormalized(scale, eps=1e-4))
    comparison = Comparison(tolerance=1e-12 if scale == "none" else FLOAT32_STD)
    for batch in dataclasses.replace(DRAW, components=2).batches():
        theirs = GRPOStandIn(batch, scale_rewards=scale).generate()["advantages"]
        add_advantages(comparison, mine, batch, theirs)
    comparison.verdict("group/zero_std")


def test_leave_one_out_advantages_equal_trl() -> None:
    """With a KL in the reward and unscorable rewards."""
    mine = Objective("rloo", shaping=(SequenceKLPenalty(0.05),), advantage=LeaveOneOut())
    comparison = Comparison()
    for batch in dataclasses.replace(RLOO_DRAW, components=2).batches():
        add_advantages(comparison, mine, batch, RLOOStandIn(batch, beta=0.05).generate()["advantages"])
    comparison.verdict("group/zero_std")


def add_advantages(comparison: Comparison, mine: Objective, batch: TokenBatch, theirs: Tensor) -> None:
    prepared = mine.prepare(batch)
    assert prepared.batch.advantage is not None
    comparison.add("advantage", prepared.batch.advantage, theirs[:, None] * batch.mask)
    comparison.note(prepared.metrics.values())


# --- metrics and accumulation -----------------------------------------------------------------------------


def test_metrics_equal_trl() -> None:
    comparison = Comparison(tolerance=1e-6)  # TRL sums its indicators in float32
    pairs = {
        "clip/low": "clip_ratio/low_mean",
        "clip/high": "clip_ratio/high_mean",
        "kl/ref": "kl",
        "entropy/new": "entropy",
        "group/zero_std": "frac_reward_zero_std",
    }
    mine = objective("grpo", advantage_eps=1e-4, empty_rows="count")
    for batch in dataclasses.replace(DRAW, empty_rows=False).batches(FEWER):
        result, theirs = ours(mine, batch), loss_of(GRPOStandIn(batch, beta=0.04))
        for name, peer in pairs.items():
            comparison.add(name, torch.tensor(result.metrics[name]), torch.tensor(theirs.metrics[peer]), floor=1e-2)
        comparison.note(result.metrics)
    comparison.verdict(*CLIPS, "group/zero_std", batches=FEWER)


@pytest.mark.parametrize("name", ["dapo", "tepo-markov"])
def test_accumulated_token_mean_equals_trl(name: str) -> None:
    mine, settings, _ = METHODS[name]
    comparison = Comparison(tolerance=FLOAT32_STD)
    for batch in DRAW.batches(FEWER):
        theirs = accumulated(batch, split=1 + len(batch.mask) // 3, **settings)
        compare(comparison, ours(mine, batch), theirs)
    comparison.verdict(batches=FEWER)
