"""80/20 and the adaptive entropy bonus against TRL's own code: the same random batches, equal losses and gradients."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch

if os.environ.get("TEPO_PEER") != "trl":  # `make test-trl` sets it: there, a missing TRL is a failure
    pytest.importorskip("trl", reason="TRL lives in its own environment: make test-trl")

from random_batches import FEWER, Comparison, Draw, compare, doubles, ours, tiny
from trl_standin import GRPOStandIn, loss_of

from tepo.objectives import KL, TokenBatch, objective

pytestmark = pytest.mark.peer

# TRL multiplies the variance by a float32 n/(n-1), whatever the dtype of the rewards: no tighter than 1e-7.
FLOAT32_STD = 1e-7
DRAW = Draw(equal_groups=True)
HIGHER = {"loss_type": "dapo", "epsilon_high": 0.28}
TRL_RULE: dict[str, Any] = {"rule": "quantile", "denominator": "all", "clip_dual": None, "advantage_eps": 1e-4}


def representable(batch: TokenBatch) -> TokenBatch:
    """Return the batch with entropies that float32 holds: TRL takes the quantile there."""
    assert batch.entropy is not None
    return batch.replace(entropy=batch.entropy.float().double())


@pytest.mark.parametrize("fraction", [0.2, 0.5, 0.05])
@pytest.mark.parametrize("kl", [0.0, 0.05])
def test_high_entropy_equals_trls_quantile(fraction: float, kl: float) -> None:
    """A KL to the reference acts on all tokens in both."""
    mine = objective("high-entropy", entropy_fraction=fraction, **TRL_RULE)
    if kl:
        mine = dataclasses.replace(mine, regularizers=(KL(kl, "reference"),))
    comparison = Comparison(tolerance=FLOAT32_STD)
    for batch in map(representable, DRAW.batches()):
        theirs = loss_of(GRPOStandIn(batch, **HIGHER, top_entropy_quantile=fraction, beta=kl))
        compare(comparison, ours(mine, batch), theirs)
    comparison.verdict("mask/policy", "clip/low")


def test_adaptive_entropy_equals_trls_controller() -> None:
    """Fifty updates in a row, the entropy now above, now below the target: the same loss and coefficient at each."""
    target, delta = 1.0, 0.02
    mine = objective(
        "max-entropy",
        baseline="mean",
        tuning="steps",
        temperature=0.03,
        target_entropy=target,
        temperature_rate=delta,
        temperature_max=0.06,
    )
    state = {name: value.double() for name, value in mine.init_state().items()}
    coefficient, last = float(state["temperature"]), float("inf")
    comparison = Comparison(tolerance=1e-6)
    coefficients = set()
    for batch in DRAW.batches(FEWER):
        trainer = GRPOStandIn(
            batch, **HIGHER, scale_rewards="none", entropy_coef=coefficient, use_adaptive_entropy=True
        )
        trainer._entropy_bonus_enabled = True
        trainer._entropy_window_stats = None
        trainer._last_world_entropy = last
        for name, value in (("target", target), ("coef_delta", delta), ("coef_min", 0.0), ("coef_max", 0.06)):
            setattr(trainer.args, f"entropy_{name}", value)
        theirs = loss_of(trainer)
        assert batch.entropy is not None
        logp, entropy = (value.clone().requires_grad_(True) for value in (batch.logp, batch.entropy))
        out = mine(batch.replace(logp=logp, entropy=entropy), state)
        gradients = torch.autograd.grad(out.loss, (logp, entropy), materialize_grads=True)
        for name, one, other in zip(
            ("loss", "logp", "entropy"),
            (out.loss.detach(), *gradients),
            (theirs.loss, theirs.logp, theirs.entropy),
            strict=True,
        ):
            comparison.add(name, one, other, floor=1e-2)
        comparison.note(out.metrics)
        state = mine.update(state, out.metrics)
        coefficient, last = trainer.entropy_coef, trainer._last_world_entropy
        assert float(state["temperature"]) == pytest.approx(coefficient, abs=1e-8)
        coefficients.add(round(coefficient, 6))
    comparison.verdict("loss/max_entropy", batches=FEWER)
    assert len(coefficients) > 3


# --- differences ----------------------------------------------------------------------------------------------------


def test_difference_the_bonus_is_on_all_tokens() -> None:
    """With 80/20 TRL's entropy bonus is the mean over the chosen tokens, ours the mean over all."""
    entropy = doubles([[2.0, 1.0, 0.5, 0.25]])
    batch = tiny([[0.0] * 4] * 2, [0.0, 0.0], entropy=entropy.expand(2, 4).clone())
    theirs = loss_of(GRPOStandIn(batch, **HIGHER, top_entropy_quantile=0.25, entropy_coef=1.0))
    mine = ours(objective("high-entropy", entropy_fraction=0.25, entropy_coef=1.0, **TRL_RULE), batch)
    assert float(theirs.loss) == pytest.approx(-2.0)
    assert float(mine.loss) == pytest.approx(-3.75 / 4)


def test_difference_default_denominator() -> None:
    """One of four tokens chosen: the authors' code, and ours, divide by it; TRL by all four."""
    entropy = doubles([[2.0, 1.0, 0.5, 0.25]]).expand(2, 4).clone()
    batch = tiny([[0.1] * 4, [0.0] * 4], [2.0, 0.0], entropy=entropy, row_id=torch.arange(2))
    theirs = loss_of(GRPOStandIn(batch, **HIGHER, top_entropy_quantile=0.25))
    mine = ours(objective("high-entropy", entropy_fraction=0.25, clip_dual=None, advantage_eps=1e-4), batch)
    assert float(mine.loss) == pytest.approx(4 * float(theirs.loss), rel=1e-6)


def test_difference_the_choice_is_the_mini_batchs() -> None:
    """Two responses, each a micro-batch: TRL takes the top half of each, ours the top half of both together."""
    entropy = doubles([[2.0, 1.5], [0.5, 0.1]])
    batch = tiny([[0.1] * 2, [0.0] * 2], [2.0, 0.0], entropy=entropy, row_id=torch.arange(2))
    trainer = GRPOStandIn(batch, **HIGHER, top_entropy_quantile=0.5)
    inputs = trainer.generate()
    theirs = [trainer.loss(inputs, slice(row, row + 1)).logp for row in range(2)]
    assert [int((gradient != 0).sum()) for gradient in theirs] == [1, 1]
    mine = ours(objective("high-entropy", entropy_fraction=0.5), batch)
    assert [int((gradient != 0).sum()) for gradient in mine.logp] == [2, 0]
