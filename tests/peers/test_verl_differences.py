"""Where our objectives differ from verl's functions on purpose: what verl gives, what ours gives.

docs/differences.md has the reasons.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

if os.environ.get("TEPO_PEER") != "verl":  # `make test-verl` sets it: there, a missing verl is a failure
    pytest.importorskip("verl", reason="verl lives in its own environment: make test-verl")

from random_batches import doubles, ours, tiny
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig
from verl_composed import MEAN, NORM, Verl

from tepo.objectives import GroupNormalized, LeaveOneOut, Objective, TokenBatch, objective

pytestmark = pytest.mark.peer


@pytest.mark.parametrize(
    ("estimator", "expected"), [("grpo", 0.7), ("rloo", 0.7), ("grpo_vectorized", 0.7), ("rloo_vectorized", 0.0)]
)
def test_difference_group_of_one(estimator: str, expected: float) -> None:
    """One response to a prompt has nothing to be compared with: verl passes its raw reward on, ours is 0."""
    batch = tiny([[0.0]], [0.7])
    assert float(Verl(estimator=estimator).advantages(batch)) == pytest.approx(expected, rel=1e-5)
    for advantage in (GroupNormalized(), LeaveOneOut()):
        mine = Objective("a", advantage=advantage).prepare(batch).batch.advantage
        assert mine is not None
        assert float(mine) == 0


def test_difference_nearly_equal_rewards_carry_no_signal() -> None:
    """Seven rewards of 0.7 in float32: their mean is an ulp off, which over eps 1e-6 becomes an advantage."""
    batch = tiny([[0.0]] * 7, [0.7] * 7)
    halved = batch.replace(logp=batch.logp.float(), old_logp=batch.old_logp.float(), rewards=batch.rewards.float())
    theirs = Verl().advantages(halved)
    mine = objective("grpo").prepare(halved).batch.advantage
    assert mine is not None
    assert float(theirs.abs().max()) > 1e-3
    assert bool((mine == 0).all())


def test_difference_kl_value_is_not_cut() -> None:
    """A reference 3 nats above: k3 = e^3 - 4 > 10, which verl cuts to 10 without gradient; ours keeps pulling."""
    batch = tiny([[0.0], [0.0]], [0.0, 0.0], ref_logp=doubles([[2.0], [-1.0]]))
    theirs = Verl(mode=MEAN, kl=(1.0, "low_var_kl")).result(batch)
    mine = ours(objective("grpo", kl_coef=1.0), batch)
    assert float(theirs.loss) == pytest.approx(10 / 2)
    assert float(theirs.logp[0, 0]) == 0
    assert float(mine.loss) == pytest.approx((math.exp(3) - 4) / 2)
    assert float(mine.logp[0, 0]) == pytest.approx((1 - math.exp(3)) / 2)


def test_difference_log_ratio_clamp_of_kl() -> None:
    """30 nats from the reference: verl's k1 is 30 with gradient, ours stops at 20 without."""
    batch = tiny([[30.0], [0.0]], [0.0, 0.0])
    theirs = Verl(mode=MEAN, kl=(1.0, "kl")).result(batch)
    mine = ours(objective("grpo", kl_coef=1.0, kl_estimator="k1"), batch)
    assert float(theirs.loss) == pytest.approx(30 / 2)
    assert float(mine.loss) == pytest.approx(20 / 2)
    assert float(theirs.logp[0, 0]) == pytest.approx(1 / 2)
    assert float(mine.logp[0, 0]) == 0


@pytest.mark.parametrize(("log_s", "theirs", "mine"), [(15.0, 10.0, 15.0), (-25.0, -25.0, -20.0), (30.0, 10.0, 20.0)])
def test_difference_sequence_ratio_clamp(log_s: float, theirs: float, mine: float) -> None:
    """verl bounds log s at 10 from above only; ours at 20 on both sides, as every log-ratio. A = -1 shows it."""
    batch = tiny([[log_s], [0.0]], [0.0, 1.0])
    given = batch.replace(advantage=doubles([-0.5, 0.5]))
    unclipped = {"clip_low": 1.0, "clip_high": 1e300}
    assert float(Verl("gspo", MEAN, by_std=False, clip=(1.0, 1e300, 3.0)).result(batch).loss) == pytest.approx(
        (0.5 * math.exp(theirs) - 0.5) / 2
    )
    assert float(ours(objective("gspo", **unclipped), given).loss) == pytest.approx((0.5 * math.exp(mine) - 0.5) / 2)


def test_difference_dual_clip_is_a_setting() -> None:
    """verl's vanilla loss always has a dual clip (3 unless set); ours has one where the paper or the user does."""
    assert ActorConfig.__dataclass_fields__["clip_ratio_c"].default == 3.0
    batch = tiny([[math.log(5.0)], [0.0]], [0.0, 1.0])
    given = batch.replace(advantage=doubles([-0.5, 0.5]))
    assert float(Verl(by_std=False).result(batch).loss) == pytest.approx((0.5 * 3 - 0.5) / 2)
    assert float(ours(objective("dapo"), given).loss) == pytest.approx((0.5 * 5 - 0.5) / 2)
    assert float(ours(objective("dapo", clip_dual=3.0), given).loss) == pytest.approx((0.5 * 3 - 0.5) / 2)


def test_difference_tie_at_the_dual_clip() -> None:
    """r exactly at the dual clip: verl's minimum shares the gradient between both branches, ours keeps it whole."""
    batch = tiny([[1.0], [0.0]], [0.0, 1.0])
    dual = float((batch.logp - batch.old_logp).exp()[0, 0])
    given = batch.replace(advantage=doubles([-0.5, 0.5]))
    theirs = Verl(by_std=False, clip=(0.2, 0.2, dual)).result(batch)
    mine = ours(objective("dapo", clip_dual=dual), given)
    assert float(mine.logp[0, 0]) == pytest.approx(0.5 * dual / 2)
    assert float(theirs.logp[0, 0]) == pytest.approx(0.5 * dual / 4)
    torch.testing.assert_close(mine.loss, theirs.loss)


def test_ties_at_the_clip_agree() -> None:
    """r exactly at 1 + high: the unclipped branch keeps its gradient on both sides."""
    batch = tiny([[1.0], [0.0]], [1.0, 0.0])
    high = float((batch.logp - batch.old_logp).exp()[0, 0]) - 1
    theirs = Verl(by_std=False, clip=(0.2, high, 3.0)).result(batch)
    mine = ours(objective("dapo", clip_high=high), batch.replace(advantage=doubles([0.5, -0.5])))
    torch.testing.assert_close(mine.logp, theirs.logp)
    assert float(mine.logp[0, 0]) == pytest.approx(-0.5 * (1 + high) / 2)


def test_difference_nothing_to_learn_from() -> None:
    """Every token masked: verl's means are 0/0, ours is 0 with zero gradient."""
    batch = tiny([[0.1, 0.2]], [1.0], mask=torch.zeros(1, 2, dtype=torch.bool))
    for mode in ("token-mean", MEAN):
        assert math.isnan(float(Verl(mode=mode).result(batch).loss))
    for name in ("dapo", "grpo"):
        mine = ours(objective(name), batch)
        assert float(mine.loss) == 0
        assert bool((mine.logp == 0).all())


def test_difference_padding_may_hold_anything() -> None:
    """NaN under the mask: verl's sequence modes multiply by the mask and get NaN; its token mean and ours do not."""
    mask = torch.tensor([[True, False], [True, True]])
    clean = tiny([[0.1, 0.0], [0.1, 0.2]], [0.0, 1.0], mask=mask)
    dirty = clean.replace(logp=torch.where(mask, clean.logp, torch.full_like(clean.logp, math.nan)))
    assert math.isnan(float(Verl(mode=MEAN).result(dirty).loss))
    assert not math.isnan(float(Verl().result(dirty).loss))
    for name in ("grpo", "dapo"):
        mine = objective(name)
        assert torch.equal(ours(mine, dirty).loss, ours(mine, clean).loss)
        assert torch.equal(ours(mine, dirty).logp, ours(mine, clean).logp)


def test_difference_padded_width_is_no_constant() -> None:
    """Without a loss scale factor verl divides by the padded width: two columns of padding change its loss."""
    narrow = tiny([[0.1], [0.0]], [1.0, 0.0])
    padding = torch.zeros(2, 2, dtype=torch.float64)
    wide = narrow.replace(
        **{name: torch.cat([getattr(narrow, name), padding], dim=1) for name in ("logp", "old_logp", "ref_logp")},
        mask=torch.cat([narrow.mask, padding.bool()], dim=1),
        entropy=torch.cat([narrow.entropy, padding], dim=1),
    )
    theirs = Verl(mode=NORM, by_std=False)
    assert float(theirs.result(narrow).loss) == pytest.approx(3 * float(theirs.result(wide).loss))
    mine = objective("dr-grpo", max_length=1)
    assert float(ours(mine, narrow).loss) == float(ours(mine, wide).loss)
    assert float(ours(mine, narrow).loss) == pytest.approx(float(theirs.result(narrow).loss))


def test_difference_global_counts_include_empty_rows() -> None:
    """verl counts non-empty rows in one batch, but all rows when its engine passes the mini-batch's size."""
    mask = torch.tensor([[True], [True], [False]])
    given = {"advantages": torch.tensor([[-1.0], [2.0], [-1.0]]), "response_mask": mask}
    logp = torch.zeros(3, 1, dtype=torch.float64)
    loss: Callable[..., tuple[Tensor, dict[str, Any]]] = core_algos.get_policy_loss_fn("vanilla")
    config = Verl(mode=MEAN).config()
    local, _ = loss(old_log_prob=logp, log_prob=logp, loss_agg_mode=MEAN, config=config, **given)
    config.global_batch_info["global_batch_size"] = 3
    whole, _ = loss(old_log_prob=logp, log_prob=logp, loss_agg_mode=MEAN, config=config, **given)
    batch = TokenBatch(logp=logp, old_logp=logp, mask=mask, entropy=logp, advantage=doubles([-1.0, 2.0, -1.0]))
    assert float(local) == float(ours(objective("grpo", kl_coef=0.0), batch).loss) == pytest.approx(-1 / 2)
    counted = ours(objective("grpo", kl_coef=0.0, empty_rows="count"), batch)
    assert float(whole) == pytest.approx(float(counted.loss)) == pytest.approx(-1 / 3)
