"""GRPO's relatives against verl's own functions: the same random batches, equal losses and gradients."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import pytest
import torch

if os.environ.get("TEPO_PEER") != "verl":  # `make test-verl` sets it: there, a missing verl is a failure
    pytest.importorskip("verl", reason="verl lives in its own environment: make test-verl")

from random_batches import Comparison, Draw, compare, ours, tiny
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl_composed import MEAN, NORM, SUM, Verl

from tepo.objectives import Objective, TokenBatch, objective

pytestmark = pytest.mark.peer

DRAW = Draw()
FULL = Draw(empty_rows=False)
CLIPS = ("clip/low", "clip/high")
# verl has 1e-8 beside a row's length, and computes GPG's alpha and whitening's n/(n-1) in float32.
ROUNDING = 1e-6


def possible(batch: TokenBatch) -> TokenBatch:
    """Return the batch with log-probs below 0: what bounds probabilities needs some."""
    return batch.replace(logp=batch.logp.clamp(max=-1e-3), old_logp=batch.old_logp.clamp(max=-1e-3))


# name: (our objective, how verl is asked, the batches, metrics that some batches must exercise)
METHODS: dict[str, tuple[Objective, Verl, Draw, tuple[str, ...]]] = {
    "ppo-clip": (objective("ppo-clip", clip_dual=3.0), Verl(), DRAW, (*CLIPS, "clip/dual")),
    "ppo-clip, centred, sequence mean": (
        objective("ppo-clip", clip_dual=3.0, advantage="centred", reducer="sequence-mean"),
        Verl(mode=MEAN, by_std=False),
        DRAW,
        CLIPS,
    ),
    "ppo-clip, leave-one-out, sequence sum": (
        objective("ppo-clip", clip_dual=3.0, advantage="leave-one-out", reducer="sequence-sum"),
        Verl(mode=SUM, estimator="rloo"),
        DRAW,
        CLIPS,
    ),
    "ppo-clip, sequence sum over a constant": (
        objective("ppo-clip", clip_dual=3.0, reducer="sequence-sum", max_length=64),
        Verl(mode=NORM, scale=64),
        DRAW,
        CLIPS,
    ),
    "opo": (objective("opo"), Verl("gpg", estimator="opo"), DRAW, ("loss",)),
    "opo, sequence sum": (objective("opo", reducer="sequence-sum"), Verl("gpg", SUM, "opo"), DRAW, ("loss",)),
    "grpo-passk": (
        objective("grpo-passk"),
        Verl(estimator="grpo_passk"),
        DRAW,
        ("clip/high",),
    ),
    "grpo-passk, not divided": (
        objective("grpo-passk", divide_by_std=False),
        Verl(estimator="grpo_passk", by_std=False),
        DRAW,
        ("clip/high",),
    ),
    "cispo": (
        objective("cispo", cap="relative", clip_low=10.0, clip_high=0.2),
        Verl("cispo", clip=(10.0, 0.2, 3.0)),
        DRAW,
        ("clip/high",),
    ),
    "cispo, bounded on both sides": (
        objective("cispo", cap="relative", clip_low=0.2, clip_high=0.28),
        Verl("cispo", clip=(0.2, 0.28, 3.0)),
        DRAW,
        CLIPS,
    ),
    "dro": (objective("dro", beta=0.3), Verl("dro", policy_loss={"dro_beta": 0.3}), DRAW, ("loss",)),
    "dppo, tv": (objective("dppo"), Verl("dppo_tv", clip=(0.15, 0.15, 20.0)), DRAW, CLIPS),
    "dppo, tv, verl's default cap": (
        objective("dppo", ratio_cap=3.0, threshold_low=0.02, threshold_high=0.3),
        Verl("dppo_tv", clip=(0.02, 0.3, 3.0)),
        DRAW,
        CLIPS,
    ),
    "dppo, kl": (objective("dppo", divergence="kl"), Verl("dppo_kl", clip=(0.05, 0.05, 20.0)), DRAW, CLIPS),
    "dppo, kl, sequence mean": (
        objective("dppo", divergence="kl", threshold_low=0.01, threshold_high=0.1, reducer="sequence-mean"),
        Verl("dppo_kl", MEAN, clip=(0.01, 0.1, 20.0)),
        DRAW,
        CLIPS,
    ),
}
ROUNDED: dict[str, tuple[Objective, Verl, Draw, tuple[str, ...]]] = {
    "reinforce++": (
        objective("reinforce++", clip_dual=3.0, kl_coef=0.05),
        Verl(estimator="reinforce_plus_plus", reward_kl=0.05),
        DRAW,
        CLIPS,
    ),
    "reinforce++, discounted": (
        objective("reinforce++", clip_dual=3.0, kl_coef=0.05, gamma=0.9),
        Verl(estimator="reinforce_plus_plus", reward_kl=0.05, gamma=0.9),
        DRAW,
        CLIPS,
    ),
    "reinforce++-baseline": (
        objective("reinforce++-baseline", clip_dual=3.0, kl_coef=0.01),
        Verl(estimator="reinforce_plus_plus_baseline", kl=(0.01, "mse")),
        DRAW,
        (*CLIPS, "loss/kl"),
    ),
    "gpg": (objective("gpg", alpha="rewards"), Verl("gpg", estimator="gpg"), DRAW, ("loss",)),
    "gpg, sequence mean": (
        objective("gpg", alpha="rewards", reducer="sequence-mean"),
        Verl("gpg", MEAN, "gpg"),
        DRAW,
        ("loss",),
    ),
    "sapo": (objective("sapo"), Verl("sapo", MEAN), DRAW, ("loss",)),
    "gmpo": (objective("gmpo", empty_rows="count"), Verl("geo_mean", clip=(0.4, 0.4, 3.0)), DRAW, CLIPS),
    "gmpo, narrow": (
        objective("gmpo", empty_rows="count", clip_low=0.05, clip_high=0.1),
        Verl("geo_mean", clip=(0.05, 0.1, 3.0)),
        DRAW,
        CLIPS,
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_loss_and_gradient_equal_verl(name: str) -> None:
    mine, peer, draw, exercised = METHODS[name]
    comparison = Comparison()
    for batch in map(possible, draw.batches()):
        compare(comparison, ours(mine, batch), peer.result(batch))
    comparison.verdict(*exercised)


@pytest.mark.parametrize("name", ROUNDED)
def test_loss_and_gradient_equal_verl_up_to_its_rounding(name: str) -> None:
    mine, peer, draw, exercised = ROUNDED[name]
    comparison = Comparison(tolerance=ROUNDING)
    for batch in map(possible, draw.batches()):
        compare(comparison, ours(mine, batch), peer.result(batch))
    comparison.verdict(*exercised)


def gdpo_of_verl(batch: TokenBatch, weights: tuple[float, ...] | None) -> Tensor:
    """Return verl's GDPO advantages [B, T]: it reads the rewards by name, and puts them on the last token."""
    assert batch.rewards is not None
    assert batch.group is not None
    names = [f"reward_{k}" for k in range(batch.rewards.shape[1])]
    config: dict[str, Any] = {"gdpo_reward_keys": names, "gdpo_reward_weights": weights}
    last = (batch.mask * torch.arange(1, batch.mask.shape[1] + 1)).amax(dim=1)
    attention = torch.cat([torch.ones(len(last), 1), torch.arange(batch.mask.shape[1])[None] < last[:, None]], dim=1)
    advantages: Tensor = core_algos.compute_gdpo_outcome_advantage(
        torch.zeros_like(batch.logp),
        batch.mask,
        batch.group.numpy(),
        config=config,  # type: ignore[arg-type]
        non_tensor_batch=dict(zip(names, batch.rewards.T.numpy(), strict=True)),
        batch={"prompts": torch.ones(len(last), 1), "attention_mask": attention.long()},
    )[0]
    return advantages


@pytest.mark.parametrize("weights", [None, (0.5, 2.0)])
def test_advantages_of_several_rewards_equal_verl(weights: tuple[float, ...] | None) -> None:
    """verl's are float32, whatever the batch's; it knows no reward that can't score a response."""
    mine = objective("gdpo", whiten="tokens", reward_weights=weights)
    comparison = Comparison(tolerance=1e-4)
    for batch in dataclasses.replace(FULL, components=2).batches():
        assert batch.rewards is not None
        scored = batch.replace(rewards=batch.rewards.nan_to_num(0.25))
        prepared = mine.prepare(scored)
        assert prepared.batch.advantage is not None
        comparison.add("advantage", prepared.batch.advantage, gdpo_of_verl(scored, weights).double(), floor=1e-2)
        comparison.note(prepared.metrics.values())
    comparison.verdict("advantage/max")


# --- differences on purpose ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("estimator", "name"), [("opo", "opo"), ("gpg", "gpg")])
def test_difference_group_of_one(estimator: str, name: str) -> None:
    """Nothing to compare with: verl takes the reward itself, ours has no signal."""
    batch = tiny([[0.0], [0.0], [0.0]], [0.7, 1.0, 0.0], group=torch.tensor([0, 1, 1]))
    theirs = Verl(estimator=estimator).advantages(batch)
    mine = objective(name).prepare(batch).batch.advantage
    assert mine is not None
    assert float(theirs[0, 0]) >= 0.7
    assert float(mine[0, 0]) == 0


def test_difference_pass_at_k_of_a_group_of_one() -> None:
    """verl refuses it; ours has no signal."""
    batch = tiny([[0.0]], [0.7])
    with pytest.raises(ValueError, match="at least 2 samples"):
        Verl(estimator="grpo_passk").advantages(batch)
    assert float(ours(objective("grpo-passk"), batch).loss) == 0


def test_difference_whitening_of_one_token() -> None:
    """verl refuses it; ours has no signal."""
    batch = tiny([[0.0]], [0.7])
    with pytest.raises(ValueError, match="division by zero"):
        Verl(estimator="reinforce_plus_plus").advantages(batch)
    assert float(ours(objective("reinforce++", kl_coef=0.0), batch).loss) == 0


def test_difference_gpgs_alpha() -> None:
    """Rewards of +1 and -1, one of two prompts silent: the paper's alpha is 2, verl's 1."""
    batch = tiny([[0.0]] * 4, [1.0, -1.0, 1.0, 1.0], group=torch.tensor([0, 0, 1, 1]))
    assert Verl(estimator="gpg").advantages(batch)[:, 0].tolist() == [1.0, -1.0, 0.0, 0.0]
    mine = objective("gpg").prepare(batch).batch.advantage
    assert mine is not None
    assert mine[:, 0].tolist() == [2.0, -2.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "peer", "mine", "theirs"),
    [
        # verl's GMPO and DRO clamp nothing: e^30 and a pull of 30
        ("gmpo", Verl("geo_mean", clip=(100.0, 100.0, 3.0)), 20.0, 30.0),
        ("dro", Verl("dro", policy_loss={"dro_beta": 2.0}), 20.0, 30.0),
    ],
)
def test_difference_log_ratio_clamp(name: str, peer: Verl, mine: float, theirs: float) -> None:
    settings = {"clip_low": 100.0, "clip_high": 100.0} if name == "gmpo" else {"beta": 2.0}
    batch = tiny([[30.0], [0.0]], [0.0, 0.0])
    given = batch.replace(advantage=torch.tensor([-1.0, 0.0], dtype=torch.float64))
    own = ours(objective(name, **settings), given)
    loss, _ = core_algos.get_policy_loss_fn(peer.loss)(
        batch.old_logp, batch.logp, given.advantage[:, None], batch.mask, peer.mode, config=peer.config()
    )
    if name == "gmpo":
        assert (float(own.loss), float(loss)) == pytest.approx((math.exp(mine) / 2, math.exp(theirs) / 2))
    else:  # -(A log pi) is 29 at log pi = 29
        assert (float(own.loss), float(loss)) == pytest.approx(((29 + mine**2) / 2, (29 + theirs**2) / 2))
    assert float(own.logp[0, 0]) == (0 if name == "gmpo" else 0.5)
