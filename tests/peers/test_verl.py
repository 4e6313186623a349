"""Our objectives against verl's own functions: the same random batches, equal losses and gradients.

verl's side is always from rewards to loss: its advantage estimator, its policy loss, its KL and entropy terms
aggregated by its `agg_loss`, put together as its `ppo_loss` does. Where we differ on purpose, the random batches leave
the case out and a test of its own shows both sides; docs/differences.md has the reasons.
"""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

if os.environ.get("TEPO_PEER") != "verl":  # `make test-verl` sets it: there, a missing verl is a failure
    pytest.importorskip("verl", reason="verl lives in its own environment: make test-verl")

from random_batches import FEWER, Comparison, Draw, compare, leaf, ours
from verl.trainer.ppo import core_algos
from verl_composed import MEAN, NORM, SUM, Verl

from tepo.objectives import (
    AdaptiveCoefficient,
    FallingEntropy,
    GroupNormalized,
    LeaveOneOut,
    Objective,
    SequenceMean,
    SequenceSum,
    TokenMean,
    objective,
)
from tepo.objectives.reducers import Reducer
from tepo.objectives.regularizers import Estimator, estimate_kl

pytestmark = pytest.mark.peer

DRAW = Draw()
# verl's k3 is cut at 10, so log-ratios to its target stay under 2.5; its gspo cuts log s at 10.
CALM = Draw(spread=(0.01, 0.1, 0.3))
CLIPS = ("clip/low", "clip/high")

FINE = (3e-4, 4e-4, 3.0)
HIGHER = (0.2, 0.28, 3.0)

# name: (our objective, how verl is asked, the batches, metrics that some batches must exercise)
METHODS: dict[str, tuple[Objective, Verl, Draw, tuple[str, ...]]] = {
    "dapo, dual clip 3": (objective("dapo", clip_dual=3.0), Verl(clip=HIGHER), DRAW, (*CLIPS, "clip/dual")),
    "dapo, dual clip 10": (
        objective("dapo", clip_dual=10.0),
        Verl(clip=(0.2, 0.28, 10.0)),
        Draw(spread=(0.5, 2.0)),
        (*CLIPS, "clip/dual"),
    ),
    "dapo, entropy bonus": (
        objective("dapo", clip_dual=3.0, entropy_coef=0.01),
        Verl(clip=HIGHER, entropy=0.01),
        DRAW,
        ("loss/entropy_bonus",),
    ),
    "grpo": (objective("grpo", kl_coef=0.0, clip_dual=3.0), Verl(mode=MEAN), DRAW, (*CLIPS, "clip/dual")),
    "grpo, k3 to the reference": (
        objective("grpo", kl_coef=0.04, clip_dual=3.0),
        Verl(mode=MEAN, kl=(0.04, "low_var_kl")),
        CALM,
        (*CLIPS, "loss/kl"),
    ),
    "grpo, k1 to the reference": (
        objective("grpo", kl_coef=0.04, clip_dual=3.0, kl_estimator="k1"),
        Verl(mode=MEAN, kl=(0.04, "kl")),
        DRAW,
        ("loss/kl",),
    ),
    "grpo, entropy bonus": (
        objective("grpo", kl_coef=0.0, clip_dual=3.0, entropy_coef=0.01),
        Verl(mode=MEAN, entropy=0.01),
        DRAW,
        ("loss/entropy_bonus",),
    ),
    "dr-grpo": (
        objective("dr-grpo", clip_dual=3.0, max_length=64),
        Verl(mode=NORM, scale=64, by_std=False),
        DRAW,
        CLIPS,
    ),
    "gspo": (objective("gspo"), Verl("gspo", MEAN, clip=FINE), DRAW, CLIPS),
    "gspo-token": (objective("gspo-token"), Verl("gspo", MEAN, clip=FINE), DRAW, CLIPS),
    "tepo-markov": (objective("tepo-markov"), Verl("gspo", clip=HIGHER), DRAW, CLIPS),
    "tepo-markov, sequence-token": (
        objective("tepo-markov", ratio="sequence-token"),
        Verl("gspo", clip=HIGHER),
        DRAW,
        CLIPS,
    ),
    "tepo": (
        objective("tepo"),
        Verl("gspo", clip=HIGHER, masked_kl=(1.0, "low_var_kl")),
        CALM,
        (*CLIPS, "mask/kl", "loss/kl"),
    ),
    "tepo, sequence-token, abs": (
        objective("tepo", ratio="sequence-token", kl_estimator="abs", kl_coef=0.5),
        Verl("gspo", clip=HIGHER, masked_kl=(0.5, "abs")),
        DRAW,
        (*CLIPS, "mask/kl", "loss/kl"),
    ),
    "tepo, k2": (
        objective("tepo", kl_estimator="k2"),
        Verl("gspo", clip=HIGHER, masked_kl=(1.0, "mse")),
        DRAW,
        ("mask/kl", "loss/kl"),
    ),
    "reinforce, token mean": (objective("reinforce"), Verl("gpg", by_std=False), DRAW, ("loss",)),
    "reinforce, sequence mean": (
        objective("reinforce", reducer="sequence-mean"),
        Verl("gpg", MEAN, by_std=False),
        DRAW,
        ("loss",),
    ),
    "reinforce, sequence sum": (
        objective("reinforce", reducer="sequence-sum"),
        Verl("reinforce", SUM, by_std=False),
        DRAW,
        ("loss",),
    ),
    "rloo": (objective("rloo", kl_coef=0.0), Verl("reinforce", SUM, "rloo"), DRAW, ("loss",)),
    "rloo, KL in the reward": (
        objective("rloo", kl_coef=0.05),
        Verl("gpg", SUM, "rloo_vectorized", reward_kl=0.05),
        DRAW,
        ("loss",),
    ),
    "dapo, token weights capped": (
        objective("dapo", clip_dual=3.0, importance_weight="truncate", importance_cap=1.5),
        Verl(clip=HIGHER, weights=("token", 1.5)),
        DRAW,
        CLIPS,
    ),
    "dapo, token weights masked": (
        objective("dapo", clip_dual=3.0, importance_weight="mask", importance_cap=2.0),
        Verl(clip=HIGHER, weights=("token", "0.5_2.0")),
        DRAW,
        CLIPS,
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_loss_and_gradient_equal_verl(name: str) -> None:
    mine, peer, draw, exercised = METHODS[name]
    comparison = Comparison()
    for batch in draw.batches():
        compare(comparison, ours(mine, batch), peer.result(batch))
    comparison.verdict(*exercised)


@pytest.mark.parametrize("name", ["dapo, dual clip 3", "grpo", "gspo", "tepo"])
def test_first_update_without_old_log_probs_equals_verl(name: str) -> None:
    """verl needs old log-probs: it gets the current ones, detached. TEPO's mask is empty then."""
    mine, peer, draw, _ = METHODS[name]
    comparison = Comparison()
    for batch in draw.batches(FEWER):
        first = batch.replace(old_logp=None, old_entropy=None)
        theirs = peer.result(batch.replace(old_logp=batch.logp, old_entropy=batch.entropy))
        compare(comparison, ours(mine, first), theirs)
    comparison.verdict(batches=FEWER)
    assert comparison.seen["mask/kl"] == 0


@pytest.mark.parametrize("name", ["dapo, dual clip 3", "grpo", "gspo", "tepo"])
def test_float32_equals_verl(name: str) -> None:
    mine, peer, draw, exercised = METHODS[name]
    comparison = Comparison(tolerance=1e-4)
    for batch in dataclasses.replace(draw, dtype=torch.float32).batches(FEWER):
        compare(comparison, ours(mine, batch), peer.result(batch))
    comparison.verdict(*exercised, batches=FEWER)


# --- parts ------------------------------------------------------------------------------------------------

ADVANTAGES: dict[str, tuple[Objective, Verl]] = {
    "grpo": (Objective("a", advantage=GroupNormalized()), Verl()),
    "grpo_vectorized": (Objective("a", advantage=GroupNormalized()), Verl(estimator="grpo_vectorized")),
    "dr_grpo": (Objective("a", advantage=GroupNormalized("none")), Verl(by_std=False)),
    "rloo": (Objective("a", advantage=LeaveOneOut()), Verl(estimator="rloo")),
    "rloo_vectorized": (Objective("a", advantage=LeaveOneOut()), Verl(estimator="rloo_vectorized")),
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_equal_verl(name: str) -> None:
    mine, peer = ADVANTAGES[name]
    comparison = Comparison(tolerance=1e-5 if name == "grpo_vectorized" else 1e-10)  # it computes in float32
    for batch in DRAW.batches():
        prepared = mine.prepare(batch)
        assert prepared.batch.advantage is not None
        comparison.add("advantage", prepared.batch.advantage, peer.advantages(batch), floor=1e-3)
        comparison.note(prepared.metrics.values())
    comparison.verdict("group/zero_std")


@pytest.mark.parametrize(
    ("mine", "theirs", "largest"),
    [("k1", "kl", 19.0), ("abs", "abs", 19.0), ("k2", "mse", 19.0), ("k3", "low_var_kl", 2.4)],
)
def test_kl_estimators_equal_verl(mine: Estimator, theirs: str, largest: float) -> None:
    rng = torch.Generator().manual_seed(0)
    comparison = Comparison()
    for _ in range(200):
        target = torch.randn(4, 9, generator=rng, dtype=torch.float64)
        d = (2 * torch.rand(4, 9, generator=rng, dtype=torch.float64) - 1) * largest
        own, other = leaf(target - d), leaf(target - d)
        values, peer = estimate_kl(target - own, mine), core_algos.kl_penalty(other, target, theirs)
        comparison.add("value", values, peer)
        comparison.add("gradient", *(torch.autograd.grad(v.sum(), x)[0] for v, x in ((values, own), (peer, other))))
        comparison.note({})
    comparison.verdict()


REDUCERS: dict[str, tuple[Reducer, str, int | None]] = {
    "token-mean": (TokenMean(), "token-mean", None),
    "seq-mean-token-mean": (SequenceMean(), MEAN, None),
    "seq-mean-token-sum": (SequenceSum(), SUM, None),
    "seq-mean-token-sum-norm": (SequenceSum(64), NORM, 64),
}


@pytest.mark.parametrize("name", REDUCERS)
def test_aggregation_equals_verl(name: str) -> None:
    reducer, mode, scale = REDUCERS[name]
    comparison = Comparison()
    for batch in DRAW.batches():
        weights = reducer(batch.mask, batch)
        values = leaf(batch.logp)
        theirs = core_algos.agg_loss(values, batch.mask, mode, loss_scale_factor=scale)
        comparison.add("value", (weights.tokens * values).sum() / weights.rows.sum(), theirs)
        comparison.add("weights", weights.tokens / weights.rows.sum(), torch.autograd.grad(theirs, values)[0])
        comparison.note({})
    comparison.verdict()


@pytest.mark.parametrize("name", ["dapo, dual clip 3", "grpo", "dr-grpo", "tepo-markov"])
def test_micro_batches_equal_verls_with_global_counts(name: str) -> None:
    """verl's engine gives each micro-batch the mini-batch's counts; each share equals ours, not just their sum."""
    mine, peer, draw, _ = METHODS[name]
    comparison = Comparison()
    for batch in dataclasses.replace(draw, empty_rows=False, holes=False).batches(FEWER):
        prepared = mine.prepare(batch).batch
        statistics = mine.statistics(prepared)
        advantages = peer.advantages(batch)
        config = peer.config()
        counts = {"batch_num_tokens": int(batch.mask.sum()), "global_batch_size": len(batch.mask), "dp_size": 1}
        config.global_batch_info.update(counts)
        for rows in torch.arange(len(batch.mask)).split(3):
            micro = batch.take(rows)
            logp, own = leaf(micro.logp), leaf(micro.logp)
            loss, _ = core_algos.get_policy_loss_fn(peer.loss)(
                micro.old_logp, logp, advantages[rows], micro.mask, peer.mode, config=config
            )
            part = mine.partial(prepared.take(rows).replace(logp=own), statistics.take(rows)).loss
            comparison.add("share", part, loss, floor=1e-2)
            comparison.add("gradient", torch.autograd.grad(part, own)[0], torch.autograd.grad(loss, logp)[0])
        comparison.note({})
    comparison.verdict(batches=FEWER)


def test_metrics_equal_verl() -> None:
    comparison = Comparison(tolerance=1e-6)  # verl's fractions are float32
    mine, peer, draw, exercised = METHODS["dapo, dual clip 3"]
    for batch in draw.batches(FEWER):
        result, theirs = ours(mine, batch), peer.result(batch)
        clipped = result.metrics["clip/low"] + result.metrics["clip/high"]
        comparison.add("clip", torch.tensor(clipped), torch.tensor(theirs.metrics["actor/pg_clipfrac"]), floor=1e-2)
        dual = torch.tensor(theirs.metrics["actor/pg_clipfrac_lower"])
        comparison.add("dual", torch.tensor(result.metrics["clip/dual"]), dual, floor=1e-2)
        comparison.note(result.metrics)
    comparison.verdict(*exercised, batches=FEWER)


@pytest.mark.parametrize("measured", [0.0, 0.009, 0.011, 0.5])
def test_adaptive_coefficient_equals_verls_controller(measured: float) -> None:
    controller = core_algos.AdaptiveKLController(init_kl_coef=0.04, target_kl=0.01, horizon=1000)
    controller.update(current_kl=measured, n_steps=100)
    mine = AdaptiveCoefficient(target=0.01, gain=100 / 1000)(torch.tensor(0.04, dtype=torch.float64), measured)
    assert float(mine) == pytest.approx(controller.value, rel=1e-12)


def test_tepos_mask_is_what_the_composition_uses() -> None:
    """The composition's own mask (advantage > 0 and entropy fallen by more than 1e-3 nats) is FallingEntropy's."""
    for batch in CALM.batches(FEWER):
        advantages = Verl().advantages(batch)
        given = batch.replace(advantage=advantages)
        falling = (batch.entropy < batch.old_entropy - 1e-3) & (advantages > 0)
        assert torch.equal(FallingEntropy()(given), falling & batch.mask)
