"""Where our objectives differ from TRL's code on purpose: what TRL gives, what ours gives.

docs/differences.md has the reasons.
"""

from __future__ import annotations

import math
import os

import pytest
import torch

if os.environ.get("TEPO_PEER") != "trl":  # `make test-trl` sets it: there, a missing TRL is a failure
    pytest.importorskip("trl", reason="TRL lives in its own environment: make test-trl")

from random_batches import doubles, ours, tiny
from trl import GRPOConfig
from trl_standin import GRPOStandIn, RLOOStandIn, accumulated, loss_of

from tepo.objectives import objective

pytestmark = pytest.mark.peer

NO_STD = {"scale_rewards": "none"}


def test_difference_log_ratio_clamp() -> None:
    """A token 30 nats off with A < 0: TRL's loss and gradient are of size e^30, ours stops at e^20 without gradient."""
    batch = tiny([[30.0, 0.0], [0.0, 0.0]], [0.0, 2.0])
    theirs = loss_of(GRPOStandIn(batch, **NO_STD))
    mine = ours(objective("grpo", kl_coef=0.0), batch.replace(advantage=doubles([-1.0, 1.0])))
    assert float(theirs.logp[0, 0]) == pytest.approx(math.exp(30) / 4)
    assert float(mine.logp[0, 0]) == 0
    assert float(mine.loss) == pytest.approx((math.exp(20) + 1 - 2) / 4)
    assert torch.equal(mine.logp[0, 1:], theirs.logp[0, 1:])


def test_difference_kl_clamp() -> None:
    """A reference 30 nats above: TRL's k3 is e^30 - 31, ours e^20 - 21 without gradient."""
    batch = tiny([[0.0], [0.0]], [0.0, 0.0], ref_logp=doubles([[29.0], [-1.0]]))
    theirs = loss_of(GRPOStandIn(batch, beta=1.0))
    mine = ours(objective("grpo", kl_coef=1.0), batch)
    assert float(theirs.loss) == pytest.approx((math.exp(30) - 31) / 2)
    assert float(mine.loss) == pytest.approx((math.exp(20) - 21) / 2)
    assert float(theirs.logp[0, 0]) == pytest.approx((1 - math.exp(30)) / 2)
    assert float(mine.logp[0, 0]) == 0


def test_difference_sequence_sum_stays_finite() -> None:
    """1000 tokens, each 1 nat up, A < 0: TRL's exp of the sum is inf and its gradient with it; ours is clamped."""
    batch = tiny([[1.0] * 1000, [0.0] * 1000], [0.0, 2.0])
    theirs = loss_of(RLOOStandIn(batch))
    mine = ours(objective("rloo", ratio="sequence-sum", kl_coef=0.0), batch)
    assert math.isinf(float(theirs.loss))
    assert not bool(torch.isfinite(theirs.logp).all())
    assert math.isfinite(float(mine.loss))
    assert bool((mine.logp[0] == 0).all())


def test_difference_kl_is_not_reweighted() -> None:
    """TRL multiplies k3 by the ratio unless `use_bias_correction_kl` is off; our k3 is the paper's."""
    assert GRPOConfig.__dataclass_fields__["use_bias_correction_kl"].default is True
    batch = tiny([[0.1], [0.0]], [0.0, 0.0], ref_logp=doubles([[-0.7], [-1.0]]))
    corrected = loss_of(GRPOStandIn(batch, beta=1.0, use_bias_correction_kl=True))
    mine = ours(objective("grpo", kl_coef=1.0), batch)
    k3 = math.exp(0.2) - 0.2 - 1
    assert float(corrected.loss) == pytest.approx(math.exp(0.1) * k3 / 2)
    assert float(mine.loss) == pytest.approx(k3 / 2)


def test_difference_several_updates_divide_by_their_own_tokens() -> None:
    """Two optimizer steps a generation, of 1 and 3 tokens: TRL's dapo divides both by the mean, 2; ours by 1 and 3."""
    mask = torch.tensor([[True, False, False], [True, True, True]])
    batch = tiny([[0.0] * 3] * 2, [0.0, 2.0], mask=mask)
    trainer = GRPOStandIn(batch, loss_type="dapo", steps_per_generation=2, **NO_STD)
    inputs = trainer.generate()
    prepared = batch.replace(advantage=doubles([-1.0, 1.0]))
    for row, tokens in ((0, 1), (1, 3)):
        theirs = trainer.loss(inputs, slice(row, row + 1))
        mine = ours(objective("dapo"), prepared.take(torch.tensor([row])))
        assert float(theirs.loss) == pytest.approx((1, -1)[row] * tokens / 2)
        assert float(mine.loss) == pytest.approx((1, -1)[row])


def test_difference_empty_rows() -> None:
    """A response without tokens: TRL counts it in the mean over responses, we do unless told to count."""
    mask = torch.tensor([[True], [True], [False]])
    batch = tiny([[0.0]] * 3, [0.0, 3.0, 0.0], mask=mask)
    theirs = loss_of(GRPOStandIn(batch, **NO_STD))
    given = batch.replace(advantage=doubles([-1.0, 2.0, -1.0]))
    assert float(theirs.loss) == pytest.approx((1 - 2) / 3)
    assert float(ours(objective("grpo", kl_coef=0.0), given).loss) == pytest.approx((1 - 2) / 2)
    assert float(ours(objective("grpo", kl_coef=0.0, empty_rows="count"), given).loss) == pytest.approx((1 - 2) / 3)


def test_difference_empty_rows_of_rloo_have_no_value() -> None:
    """TRL's sequence loss of a truncated, masked response is -A (ratio 1, no gradient); ours has no term for it."""
    batch = tiny([[0.0]] * 3, [0.0, 3.0, 0.0], truncated=torch.tensor([False, False, True]))
    theirs = loss_of(RLOOStandIn(batch, mask_truncated_completions=True))
    mine = ours(objective("rloo", ratio="sequence-sum", kl_coef=0.0, empty_rows="count", truncated="drop"), batch)
    assert float(theirs.loss) == pytest.approx((1.5 - 3 + 1.5) / 3)
    assert float(mine.loss) == pytest.approx((1.5 - 3) / 3)
    torch.testing.assert_close(mine.logp, theirs.logp)


def test_difference_entropy_bonus_follows_the_reducer() -> None:
    """Rows of 1 and 3 tokens with entropies 1 and 2: TRL's bonus is the token mean in every loss type."""
    mask = torch.tensor([[True, False, False], [True, True, True]])
    entropy = doubles([[1.0] * 3, [2.0] * 3])
    batch = tiny([[0.0] * 3] * 2, [0.0, 0.0], mask=mask, entropy=entropy)
    theirs = loss_of(GRPOStandIn(batch, entropy_coef=1.0))
    mine = ours(objective("grpo", kl_coef=0.0, entropy_coef=1.0), batch)
    assert float(theirs.loss) == pytest.approx(-(1 + 3 * 2) / 4)
    assert float(mine.loss) == pytest.approx(-(1 + 2) / 2)


def test_difference_nearly_equal_rewards_carry_no_signal() -> None:
    """Seven rewards of 0.7 in float32: their mean is an ulp off, and TRL turns that into an advantage."""
    batch = tiny([[0.0]] * 7, [0.0] * 7).replace(rewards=torch.full((7,), 0.7))
    theirs = GRPOStandIn(batch).generate()["advantages"]
    mine = objective("grpo", advantage_eps=1e-4).prepare(batch).batch.advantage
    assert mine is not None
    assert 0 < float(theirs.abs().max()) < 1e-2
    assert bool((mine == 0).all())


def test_difference_padding_may_hold_anything() -> None:
    """NaN under the mask: TRL multiplies by the mask and gets NaN; ours never reads it."""
    mask = torch.tensor([[True, False], [True, True]])
    clean = tiny([[0.1, 0.0], [0.1, 0.2]], [0.0, 2.0], mask=mask)
    dirty = clean.replace(logp=torch.where(mask, clean.logp, torch.full_like(clean.logp, math.nan)))
    assert math.isnan(float(loss_of(GRPOStandIn(dirty)).loss))
    mine = objective("grpo", kl_coef=0.0)
    assert torch.equal(ours(mine, dirty).logp, ours(mine, clean).logp)


def test_difference_default_epsilon() -> None:
    """Rewards 1 and 0: (0.5) / (sqrt(0.5) + eps), eps 1e-4 in TRL and 1e-6 in ours unless set."""
    batch = tiny([[0.0], [0.0]], [1.0, 0.0])
    theirs = GRPOStandIn(batch).generate()["advantages"]
    mine = objective("grpo").prepare(batch).batch.advantage
    assert mine is not None
    assert float(theirs[0]) == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-4), rel=1e-6)
    assert float(mine[0, 0]) == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-6), rel=1e-9)


@pytest.mark.parametrize(("loss_type", "name"), [("bnpo", "dapo"), ("grpo", "grpo")])
def test_difference_micro_batches_weigh_by_their_tokens(loss_type: str, name: str) -> None:
    """TRL: the loss depends on where the step is cut. Ours: any split adds up to the same mini-batch."""
    mask = torch.tensor([[True, False, False], [True, True, True], [True, True, True]])
    batch = tiny([[0.0] * 3] * 3, [0.0, 3.0, 0.0], mask=mask)
    mine = objective(name, **({"kl_coef": 0.0} if name == "grpo" else {}))
    prepared = mine.prepare(batch.replace(advantage=doubles([-1.0, 2.0, -1.0]))).batch
    statistics = mine.statistics(prepared)
    for split, theirs in (
        (1, {"bnpo": (1 - 3 / 6) / 2, "grpo": (1 - 1 / 2) / 2}),
        (2, {"bnpo": -1 / 8, "grpo": 1 / 4}),
    ):
        cut = accumulated(batch, split, loss_type=loss_type, **NO_STD)
        assert float(cut.loss) == pytest.approx(theirs[loss_type])
        rows = torch.arange(3).split([split, 3 - split])
        parts = [mine.partial(prepared.take(own), statistics.take(own)).loss for own in rows]
        assert float(parts[0] + parts[1]) == pytest.approx({"bnpo": (1 - 6 + 3) / 7, "grpo": 0.0}[loss_type])


def test_ties_at_the_two_sided_clip_agree() -> None:
    """r exactly at delta, A < 0: the whole gradient on both sides."""
    batch = tiny([[1.0], [0.0]], [0.0, 1.0])
    delta = float((batch.logp - batch.old_logp).exp()[0, 0])
    theirs = loss_of(GRPOStandIn(batch, delta=delta, **NO_STD))
    mine = ours(objective("dapo", clip_dual=delta), batch.replace(advantage=doubles([-0.5, 0.5])))
    assert float(mine.logp[0, 0]) == pytest.approx(0.5 * delta / 2)
    torch.testing.assert_close(mine.logp, theirs.logp)
