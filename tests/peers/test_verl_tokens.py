"""Clip-Cov and KL-Cov against verl's own functions: the same random batches, equal losses and gradients.

verl draws Clip-Cov's tokens with a running generator. Equality is shown where the draw takes the whole band or finds
none, and with its generator replaced by our draws.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
import torch

if os.environ.get("TEPO_PEER") != "verl":  # `make test-verl` sets it: there, a missing verl is a failure
    pytest.importorskip("verl", reason="verl lives in its own environment: make test-verl")

from random_batches import BATCHES, Comparison, Draw, compare, doubles, ours, tiny
from verl.trainer.ppo import core_algos
from verl_composed import Verl

from tepo.objectives import TokenBatch, objective
from tepo.objectives.batch import clean
from tepo.objectives.choice import draws
from tepo.objectives.covariance import token_covariance

pytestmark = pytest.mark.peer

DRAW = Draw()


def numbered(draw: Draw) -> Iterator[TokenBatch]:
    """Yield 200 batches with row ids; where all rewards are equal every covariance is 0, and the largest a tie."""
    kept = 0
    for seed in itertools.count():
        batch = draw.batch(seed)
        if not bool((Verl().advantages(batch) * batch.mask).any()):
            continue
        yield batch.replace(row_id=torch.arange(len(batch.mask)) * 7 + seed)
        kept += 1
        if kept == BATCHES:
            return


@pytest.mark.parametrize("fraction", [2e-4, 0.05, 0.3, 1.0])
def test_kl_cov_equals_verl(fraction: float) -> None:
    peer = Verl("kl_cov", policy_loss={"kl_cov_ratio": fraction, "ppo_kl_coef": 0.5})
    comparison = Comparison()
    for batch in numbered(DRAW):
        mine = ours(objective("kl-cov", kl_fraction=fraction, kl_coef=0.5), batch)
        compare(comparison, mine, peer.result(batch))
    comparison.verdict("mask/kl", "loss/kl")


CLIP_COV = {"clip_low": 0.2, "clip_high": 0.28}
BANDS = {"a whole band": (0.1, 1.5), "everything": (-90.0, 90.0), "nothing": (80.0, 90.0)}


@pytest.mark.parametrize("name", BANDS)
def test_clip_cov_equals_verl_where_the_draw_takes_all(name: str) -> None:
    low, high = BANDS[name]
    peer = Verl(
        "clip_cov",
        clip=(0.2, 0.28, 3.0),
        policy_loss={"clip_cov_ratio": 1.0, "clip_cov_lb": low, "clip_cov_ub": high},
    )
    mine = objective("clip-cov", clip_fraction=1.0, covariance_low=low, covariance_high=high, **CLIP_COV)
    comparison = Comparison()
    for batch in numbered(DRAW):
        compare(comparison, ours(mine, batch), peer.result(batch))
    comparison.verdict("mask/policy", "clip/low")


def test_clip_cov_equals_verl_with_our_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the tokens, of about half of them in the band: verl's permutation is the order of our draws."""
    low, high = -0.2, 1.5
    peer = Verl(
        "clip_cov",
        clip=(0.2, 0.28, 3.0),
        policy_loss={"clip_cov_ratio": 0.2, "clip_cov_lb": low, "clip_cov_ub": high},
    )
    mine = objective("clip-cov", clip_fraction=0.2, covariance_low=low, covariance_high=high, seed=5, **CLIP_COV)
    comparison = Comparison()
    for batch in numbered(DRAW):
        view = clean(batch.replace(advantage=peer.advantages(batch)))
        assert view.advantage is not None
        ratio = (view.logp - view.old_logp).exp()
        clipped = (view.advantage > 0) & (ratio > 1.28) | (view.advantage < 0) & (ratio < 0.8)
        c = token_covariance(view)
        order = draws(view, 5, "the test")[view.mask & ~clipped & (c > low) & (c < high)].argsort(descending=True)
        monkeypatch.setattr(core_algos.torch, "randperm", lambda n, order=order: order if n == len(order) else None)
        theirs = peer.result(batch)
        monkeypatch.undo()
        compare(comparison, ours(mine, batch), theirs)
    comparison.verdict("mask/policy", "clip/low", "clip/high")


# --- differences ----------------------------------------------------------------------------------------------------


def test_difference_statistics_of_the_mini_batch() -> None:
    """Two responses of two tokens, each a micro-batch: verl holds one token of each, ours the one of largest c."""
    batch = tiny([[0.5, 0.0], [0.1, 0.0]], [2.0, 0.0], row_id=torch.tensor([0, 1]))
    method = objective("kl-cov", kl_fraction=0.25, kl_coef=1.0)
    prepared = method.prepare(batch).batch
    statistics = method.statistics(prepared)
    shares = [method.partial(prepared.take(r), statistics.take(r)) for r in torch.arange(2).split(1)]
    assert sum(int(share.metrics()["mask/kl"] * 2) for share in shares) == 1
    assert float(sum(share.loss for share in shares)) == pytest.approx(float(method(batch).loss))
    advantages = Verl().advantages(batch)
    pull = 0.0
    for row, sign, coefficient in ((0, 1, 1.0), (0, -1, 0.0), (1, 1, 1.0), (1, -1, 0.0)):
        config = Verl("kl_cov", policy_loss={"kl_cov_ratio": 0.25, "ppo_kl_coef": coefficient}).config()
        one = batch.take(torch.tensor([row]))
        loss, _ = core_algos.compute_policy_loss_kl_cov(
            one.old_logp, one.logp, advantages[row : row + 1], one.mask, "token-mean", config
        )
        pull += sign * float(loss) * 2 / 4
    assert pull == pytest.approx((0.5 + 0.1) / 4)  # both |D|; ours holds one of them
    assert float(method(batch).metrics["loss/kl"]) == pytest.approx(0.5 / 4)


def test_difference_log_ratio_clamp_of_the_covariance_methods() -> None:
    """30 nats off: verl's unclipped ratio is e^30 and |D| 30 with gradient; ours stops at 20 without."""
    batch = tiny([[30.0], [0.0]], [0.0, 1.0], row_id=torch.tensor([0, 1]))
    peer = Verl("kl_cov", policy_loss={"kl_cov_ratio": 1.0, "ppo_kl_coef": 1.0})
    theirs = peer.result(batch)
    given = batch.replace(advantage=doubles([-1.0, 1.0]) * 0.5**0.5)
    mine = ours(objective("kl-cov", kl_fraction=1.0), given)
    assert float(theirs.logp[0, 0]) > 1e12
    assert float(mine.logp[0, 0]) == 0
    assert float(mine.loss) < 2e9
