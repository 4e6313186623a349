"""What makes TEPO TEPO: DAPO on the first update, and a KL mask that touches exactly the right tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tepo
from tepo.objectives import KL, FallingEntropy, Objective, TokenBatch
from tepo.objectives.batch import clean
from tepo.testing import random_batch

SEEDS = range(20)
FIELDS = {"entropy", "old_entropy", "ref_logp", "sum_p2", "sum_p2_logp"}


@pytest.mark.parametrize("ratio", ["sequence", "sequence-token"])
@pytest.mark.parametrize("seed", SEEDS)
def test_without_kl_the_first_update_is_dapos_and_later_ones_are_not(ratio: str, seed: int) -> None:
    first = random_batch(seed, fields=FIELDS, kind="first-update")
    later = random_batch(seed, fields=FIELDS)
    dapo = tepo.objective("dapo")
    for mine in (tepo.objective("tepo", kl_coef=0, ratio=ratio), tepo.objective("tepo-markov", ratio=ratio)):
        one, two = tepo.credit(mine, first), tepo.credit(dapo, first)
        assert float((one - two).abs().max()) <= 1e-12 * float(two.abs().max())
        assert float(mine(first).loss) == pytest.approx(float(dapo(first).loss), rel=1e-12, abs=1e-15)
        one, two = tepo.credit(mine, later), tepo.credit(dapo, later)
        assert float((one - two).abs().max()) > 1e-3 * float(two.abs().max())


@pytest.mark.parametrize("estimator", ["abs", "k2", "k3", "k3-old", "k1"])
@pytest.mark.parametrize("seed", range(5))
def test_with_kl_the_first_update_is_dapos_too_because_the_mask_is_empty(estimator: str, seed: int) -> None:
    first = random_batch(seed, fields=FIELDS, kind="first-update")
    out = tepo.objective("tepo", kl_estimator=estimator)(first)
    one, two = (
        tepo.credit(tepo.objective(*each[0:1], **each[1]), first)
        for each in (("tepo", {"kl_estimator": estimator}), ("dapo", {}))
    )
    assert float((one - two).abs().max()) <= 1e-12 * float(two.abs().max())
    assert out.metrics["mask/kl"] == 0
    assert out.metrics["loss/kl"] == 0


@pytest.mark.parametrize("margin", [0.0, 1e-3, 0.1])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_kl_touches_exactly_tokens_with_positive_advantage_and_fallen_entropy(margin: float, seed: int) -> None:
    later = random_batch(seed, fields=FIELDS, kind=("plain", "token-advantages", "reward-components")[seed % 3])
    settings: dict[str, Any] = {"kl_estimator": "k1", "entropy_margin": margin}  # k1 pulls on every token it holds
    pulled = tepo.credit(tepo.objective("tepo", **settings), later) - tepo.credit(tepo.objective("tepo-markov"), later)
    advantage = tepo.objective("tepo").prepare(later).batch.advantage
    expected = [
        [
            bool(later.mask[i, t])
            and float(advantage[i, t]) > 0
            and float(later.entropy[i, t]) < float(later.old_entropy[i, t]) - margin
            for t in range(later.mask.shape[1])
        ]
        for i in range(later.mask.shape[0])
    ]
    assert (pulled.abs() > 1e-9).tolist() == expected
    tokens = int(later.mask.sum())
    assert pulled[torch.tensor(expected)].tolist() == pytest.approx([-1 / tokens] * sum(map(sum, expected)))
    fraction = tepo.objective("tepo", **settings)(later).metrics["mask/kl"]
    assert fraction == pytest.approx(sum(map(sum, expected)) / tokens)


def test_at_equal_weights_float_noise_does_not_reach_the_margin() -> None:
    """Two float32 passes of the same weights differ in the last digits: a mask without margin is a coin flip."""
    batch = random_batch(0, fields=FIELDS, groups=(8, 8, 8), width=40, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    noise = 1e-6 * torch.randn(batch.mask.shape, generator=generator)
    same = batch.replace(logp=batch.old_logp + noise, entropy=batch.old_entropy + noise)
    positive = float((tepo.objective("tepo").prepare(same).batch.advantage[same.mask] > 0).float().mean())
    assert tepo.objective("tepo")(same).metrics["mask/kl"] == 0
    assert tepo.objective("tepo", entropy_margin=0.0)(same).metrics["mask/kl"] > 0.3 * positive


def test_exactly_equal_entropies_give_an_empty_mask_even_without_margin() -> None:
    batch = random_batch(0, fields=FIELDS, dtype=torch.float32)
    same = batch.replace(logp=batch.old_logp, entropy=batch.old_entropy)
    assert tepo.objective("tepo", entropy_margin=0.0)(same).metrics["mask/kl"] == 0


def test_masked_norm_divides_by_the_masked_tokens() -> None:
    later = random_batch(3, fields=FIELDS)
    every, masked = (tepo.objective("tepo", kl_norm=norm)(later).metrics for norm in ("all", "masked"))
    assert 0 < every["mask/kl"] < 1
    assert masked["mask/kl"] == every["mask/kl"]
    assert masked["loss/kl"] == pytest.approx(every["loss/kl"] / every["mask/kl"])
    assert masked["loss/policy"] == pytest.approx(every["loss/policy"])


def test_first_order_criterion_is_the_sign_of_the_entropy_change() -> None:
    """Under a small step on A log p_a the entropy falls at exactly the tokens that the criterion names."""
    generator = torch.Generator().manual_seed(0)
    logits = 1.5 * torch.randn(300, 6, generator=generator, dtype=torch.float64)
    p = logits.softmax(1)
    token = torch.multinomial(p, 1, generator=generator)
    advantage = torch.where(torch.rand(300, 1, generator=generator) < 0.5, 1.0, -1.0).double()
    one_hot = torch.zeros_like(p).scatter(1, token, 1.0)
    stepped = (logits + 1e-5 * advantage * (one_hot - p)).softmax(1)

    def entropy(q: torch.Tensor) -> torch.Tensor:
        return -(q * q.log()).sum(1, keepdim=True)

    falls = (entropy(stepped) < entropy(p)) & (advantage > 0)
    batch = TokenBatch(
        logp=p.log().gather(1, token),
        mask=torch.ones(300, 1, dtype=torch.bool),
        entropy=entropy(p),
        sum_p2=(p**2).sum(1, keepdim=True),
        sum_p2_logp=(p**2 * p.log()).sum(1, keepdim=True),
        advantage=advantage,
    )
    assert torch.equal(FallingEntropy("first-order")(clean(batch)), falls)
    assert 50 < int(falls.sum()) < 150
    agreement = (FallingEntropy("sign")(clean(batch)) == falls).double().mean()
    assert 0.85 < float(agreement) < 1  # a proxy


@pytest.mark.parametrize(
    ("settings", "reads", "scores", "mini"),
    [
        ({}, {"entropy", "old_entropy"}, {"entropy"}, False),
        ({"kl_coef": 0}, set(), set(), False),
        ({"kl_norm": "masked"}, {"entropy", "old_entropy"}, {"entropy"}, True),
        ({"entropy_criterion": "sign"}, {"entropy"}, {"entropy"}, False),
        (
            {"entropy_criterion": "first-order"},
            {"entropy", "sum_p2", "sum_p2_logp"},
            {"entropy", "sum_p2", "sum_p2_logp"},
            False,
        ),
        ({"kl_target": "reference"}, {"entropy", "old_entropy", "ref_logp"}, {"entropy"}, False),
        (
            {"kl_target": "reference", "kl_estimator": "full"},
            {"entropy", "old_entropy", "kl_full"},
            {"entropy", "kl_full"},
            False,
        ),
        ({"kl_coef": 0, "entropy_coef": 0.1}, {"entropy"}, {"entropy", "entropy_grad"}, False),
    ],
    ids=["default", "no-kl", "kl-masked", "sign", "first-order", "reference", "full", "entropy-bonus"],
)
def test_needs_follow_the_settings(settings: dict[str, Any], reads: set[str], scores: set[str], mini: bool) -> None:
    needs = tepo.objective("tepo", **settings).needs
    assert needs.batch == reads | {"rewards", "group"}
    assert needs.scores == scores
    assert needs.mini_statistics == mini
    assert needs.reference == bool(reads & {"ref_logp", "kl_full"})
    assert needs.old_entropy == ("old_entropy" in reads)
    assert not needs.fine_clip
    assert tepo.objective("tepo", clip_low=3e-4, clip_high=4e-4).needs.fine_clip


def test_the_mask_is_a_decision_and_carries_no_gradient() -> None:
    later = random_batch(0, fields=FIELDS)
    entropy = later.entropy.clone().requires_grad_(True)
    logp = later.logp.clone().requires_grad_(True)
    for criterion in ("realised", "first-order", "sign"):
        loss = tepo.objective("tepo", entropy_criterion=criterion)(later.replace(logp=logp, entropy=entropy)).loss
        assert torch.autograd.grad(loss, entropy, allow_unused=True)[0] is None


def test_a_composed_mask_may_sit_beside_another_kl() -> None:
    later = random_batch(0, fields=FIELDS)
    two = Objective(
        "two", regularizers=(KL(0.5, "old", mask=FallingEntropy()), KL(0.1, "reference", name="kl_reference"))
    )
    metrics = two(later).metrics
    assert metrics["loss"] == pytest.approx(sum(metrics[f"loss/{name}"] for name in ("policy", "kl", "kl_reference")))
    assert metrics["loss/kl_reference"] == pytest.approx(0.1 * metrics["kl/ref"])
    assert "mask/kl_reference" not in metrics
    with pytest.raises(tepo.InputError, match="names must differ"):
        Objective("same", regularizers=(KL(0.5), KL(0.1)))
