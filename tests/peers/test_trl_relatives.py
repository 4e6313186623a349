"""GRPO's relatives against TRL's own code: the same random batches, equal losses and gradients."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if os.environ.get("TEPO_PEER") != "trl":  # `make test-trl` sets it: there, a missing TRL is a failure
    pytest.importorskip("trl", reason="TRL lives in its own environment: make test-trl")

from random_batches import Comparison, Draw, compare, ours, tiny
from trl_standin import GMPOStandIn, GRPOStandIn, loss_of

from tepo.objectives import Objective, TokenBatch, objective

pytestmark = pytest.mark.peer

# TRL multiplies the variance by a float32 n/(n-1), whatever the dtype of the rewards: no tighter than 1e-7.
FLOAT32_STD = 1e-7
# TRL holds SAPO's temperatures in float32: 1.05, as it has it.
FLOAT32_TAU = float(torch.tensor(1.05))
DRAW = Draw(equal_groups=True)
CLIPS = ("clip/low", "clip/high")
EPS = {"advantage_eps": 1e-4}
ROWS = {**EPS, "empty_rows": "count"}
SEQUENCE = {"importance_sampling_level": "sequence"}

# name: (our objective, TRL's settings, metrics that some batches must exercise)
METHODS: dict[str, tuple[Objective, dict[str, Any], tuple[str, ...]]] = {
    "ppo-clip": (objective("ppo-clip", **EPS), {"loss_type": "dapo"}, CLIPS),
    "ppo-clip, batch-scaled": (
        objective("ppo-clip", advantage="batch-scaled", **EPS),
        {"loss_type": "dapo", "scale_rewards": "batch"},
        CLIPS,
    ),
    "ppo-clip, sequence mean": (objective("ppo-clip", reducer="sequence-mean", **ROWS), {}, CLIPS),
    "ppo-clip, sequence sum": (
        objective("ppo-clip", reducer="sequence-sum", max_length=64, **ROWS),
        {"loss_type": "dr_grpo", "max_completion_length": 64},
        CLIPS,
    ),
    "cispo": (objective("cispo", **EPS), {"loss_type": "cispo", "epsilon_high": 5.0}, ("clip/high",)),
    "cispo, low cap": (
        objective("cispo", clip_high=1.2, **EPS),
        {"loss_type": "cispo", "epsilon_high": 1.2},
        ("clip/high",),
    ),
    "sapo": (
        objective("sapo", tau_negative=FLOAT32_TAU, **ROWS),
        {"loss_type": "sapo", "sapo_temperature_neg": FLOAT32_TAU},
        ("loss",),
    ),
    "sapo, sharper": (
        objective("sapo", tau_positive=2.0, tau_negative=4.0, **ROWS),
        {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 4.0},
        ("loss",),
    ),
    "luspo": (
        objective("luspo", **ROWS),
        {"loss_type": "luspo", "epsilon_low": 2e-3, "epsilon_high": 2.5e-3, **SEQUENCE},
        CLIPS,
    ),
    "vespo": (objective("vespo", **EPS), {"loss_type": "vespo"}, ("loss",)),
    "vespo, other shapes": (
        objective("vespo", k_positive=1.0, lam_positive=0.5, k_negative=0.5, lam_negative=1.0, **EPS),
        {
            "loss_type": "vespo",
            **{"vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5, "vespo_k_neg": 0.5, "vespo_lambda_neg": 1.0},
        },
        ("loss",),
    ),
    "dapo, drifted responses left out": (
        objective("dapo", off_policy_mask=0.05, **EPS),
        {"loss_type": "dapo", "epsilon_high": 0.28, "off_policy_mask_threshold": 0.05},
        (*CLIPS, "mask/off_policy"),
    ),
    "gspo, drifted responses left out": (
        objective("gspo", off_policy_mask=0.05, **ROWS),
        {"epsilon_low": 3e-4, "epsilon_high": 4e-4, "off_policy_mask_threshold": 0.05, **SEQUENCE},
        (*CLIPS, "mask/off_policy"),
    ),
    "sapo, token weights capped": (
        objective("sapo", tau_negative=FLOAT32_TAU, importance_weight="truncate", importance_cap=1.5, **ROWS),
        {
            **{"loss_type": "sapo", "sapo_temperature_neg": FLOAT32_TAU},
            **{"use_vllm": True, "vllm_importance_sampling_clip_max": 1.5},
        },
        ("loss",),
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_loss_and_gradient_equal_trl(name: str) -> None:
    mine, settings, exercised = METHODS[name]
    comparison = Comparison(tolerance=FLOAT32_STD)
    for batch in DRAW.batches():
        compare(comparison, ours(mine, batch), loss_of(GRPOStandIn(batch, **settings)))
    comparison.verdict(*exercised)


def spoken() -> Iterator[TokenBatch]:
    """Yield batches, with several rewards a response, in which every response has a token."""
    for batch in dataclasses.replace(DRAW, components=2).batches():
        mask = batch.mask.clone()
        mask[~mask.any(dim=1), 0] = True
        yield batch.replace(mask=mask)


@pytest.mark.parametrize("clip", [0.4, 0.05])
def test_gmpo_equals_trls_trainer(clip: float) -> None:
    """Without empty responses: each adds -A to TRL's loss."""
    mine = objective("gmpo", clip_low=clip, clip_high=clip, **EPS)
    comparison = Comparison(tolerance=FLOAT32_STD)
    for batch in spoken():
        theirs = loss_of(GMPOStandIn(batch, epsilon_low=clip, epsilon_high=clip))
        compare(comparison, ours(mine, batch), theirs)
    comparison.verdict(*CLIPS)


def test_advantages_of_several_rewards_equal_trl() -> None:
    """With rewards that can't score a response (NaN), and responses that none can; whitened over responses."""
    mine = objective("gdpo", **EPS)
    comparison = Comparison(tolerance=1e-6)
    for batch in spoken():
        trainer = GRPOStandIn(batch, multi_objective_aggregation="normalize_then_sum")
        theirs = trainer.generate()["advantages"]
        prepared = mine.prepare(batch)
        assert prepared.batch.advantage is not None
        comparison.add("advantage", prepared.batch.advantage, theirs[:, None] * batch.mask, floor=1e-2)
        comparison.note(prepared.metrics.values())
    comparison.verdict("advantage/max")


def test_gdpo_equals_trl_from_rewards_to_loss() -> None:
    mine = objective("gdpo", **ROWS)
    comparison = Comparison(tolerance=1e-6)
    for batch in spoken():
        theirs = loss_of(GRPOStandIn(batch, multi_objective_aggregation="normalize_then_sum"))
        compare(comparison, ours(mine, batch), theirs)
    comparison.verdict(*CLIPS)


def test_gmpos_clip_fractions_equal_trl() -> None:
    comparison = Comparison(tolerance=1e-6)
    mine = objective("gmpo", **EPS)
    for batch in spoken():
        theirs = loss_of(GMPOStandIn(batch, epsilon_low=0.4, epsilon_high=0.4)).metrics
        metrics = ours(mine, batch).metrics
        for side in ("low", "high"):
            peer = torch.tensor(theirs[f"clip_ratio/{side}_mean"])
            comparison.add(side, torch.tensor(metrics[f"clip/{side}"]), peer, floor=1e-2)
        comparison.note(metrics)
    comparison.verdict(*CLIPS)


# --- differences on purpose ---------------------------------------------------------------------------------------


def test_difference_gmpo_of_a_response_without_tokens() -> None:
    """TRL adds -A for it, a constant; ours adds nothing."""
    batch = tiny([[0.3], [0.0]], [1.0, 0.0], mask=torch.tensor([[True], [False]]))
    given = batch.replace(advantage=torch.tensor([1.0, -0.5], dtype=torch.float64))
    mine = ours(objective("gmpo", **ROWS), given)
    trainer = GMPOStandIn(batch, epsilon_low=0.4, epsilon_high=0.4)
    theirs = trainer.loss({**trainer.generate(), "advantages": given.advantage})
    assert float(mine.loss) == pytest.approx(-math.exp(0.3) / 2)
    assert float(theirs.loss) == pytest.approx((-math.exp(0.3) + 0.5) / 2)
    assert torch.allclose(mine.logp, theirs.logp)


def test_difference_vespo_weighs_the_loss_and_not_the_ratio() -> None:
    """A sampler's mismatch of 0.1 nats goes into TRL's W, and beside the loss of ours; without one both agree."""
    settings = {"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_clip_max": 9.0}
    mine = objective("vespo", importance_weight="truncate", importance_cap=9.0, **EPS)
    for mismatch, same in ((0.0, True), (0.1, False)):
        batch = tiny([[0.1, 0.2], [0.0, 0.1]], [1.0, 0.0])
        assert batch.old_logp is not None
        batch = batch.replace(rollout_logp=(batch.old_logp - mismatch).float().double())
        own, theirs = ours(mine, batch), loss_of(GRPOStandIn(batch, **settings))
        assert torch.allclose(own.logp, theirs.logp, rtol=1e-5) is same


def test_difference_gdpo_whitens_over_responses_with_tokens() -> None:
    """TRL counts a response without a token in the mean and the deviation."""
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    mask = torch.tensor([[True], [True], [False]])
    batch = tiny([[0.0]] * 3, [0.0] * 3, mask=mask).replace(rewards=rewards)
    theirs = GRPOStandIn(batch, multi_objective_aggregation="normalize_then_sum").generate()["advantages"]
    mine = objective("gdpo", **EPS).prepare(batch).batch.advantage
    assert mine is not None
    assert float(theirs[0]) == pytest.approx(-0.577, abs=1e-3)
    assert mine.abs().max() == 0  # the two that have tokens are equal
