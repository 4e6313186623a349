"""Exact ties: which side a value on a border falls on, and that the border keeps its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tepo
from tepo.objectives import TokenBatch
from tepo.objectives.batch import clean
from tepo.objectives.ratios import (
    RatioValue,
    SequenceRatio,
    SequenceSumRatio,
    SequenceTokenRatio,
    TokenRatio,
)
from tepo.objectives.regularizers import KL, FallingEntropy
from tepo.objectives.surrogates import PPOClip, SurrogateValue
from tepo.objectives.weights import Masked, SequenceMasked, Truncated


def one_token(**fields: float) -> TokenBatch:
    values = {name: torch.tensor([[value]], dtype=torch.float64) for name, value in {"logp": -1.0, **fields}.items()}
    return TokenBatch(mask=torch.ones(1, 1, dtype=torch.bool), **values)


def clipped_at(ratio: float, advantage: float, clip: PPOClip) -> tuple[SurrogateValue, float]:
    """Return the surrogate of one ratio, and its derivative by that ratio."""
    value = torch.tensor([[ratio]], dtype=torch.float64, requires_grad=True)
    batch = one_token()
    result = clip(RatioValue(value.log(), value), torch.tensor([[advantage]], dtype=torch.float64), batch)
    return result, float(torch.autograd.grad(result.loss.sum(), value)[0])


# Borders that floats hold exactly: 1 - 1/4, 1 + 1/4, and a dual clip of 2.
CLIP = PPOClip(0.25, 0.25, 2.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope", "clipped"),
    [
        (1.25, 1.0, -1.0, None),  # on the upper border: not clipped, the gradient flows
        (1.2500001, 1.0, 0.0, "clip_high"),
        (1.2500001, -1.0, 1.0, None),
        (0.75, -1.0, 1.0, None),  # on the lower border
        (0.7499999, -1.0, 0.0, "clip_low"),
        (0.7499999, 1.0, -1.0, None),
        (2.0, -1.0, 1.0, None),  # on the dual border
        (2.0000001, -1.0, 0.0, "clip_dual"),
        (1.0, 1.0, -1.0, None),
        (5.0, 0.0, 0.0, None),  # no advantage: no gradient, and nothing counts as clipped
    ],
)
def test_clip_borders(ratio: float, advantage: float, slope: float, clipped: str | None) -> None:
    value, derivative = clipped_at(ratio, advantage, CLIP)
    assert derivative == slope
    for name in ("clip_low", "clip_high", "clip_dual"):
        assert bool(getattr(value, name)) == (name == clipped), name


def test_a_clip_of_width_zero_still_lets_the_first_step_through() -> None:
    assert clipped_at(1.0, 1.0, PPOClip(0.0, 0.0))[1] == -1
    assert clipped_at(1.0, -1.0, PPOClip(0.0, 0.0))[1] == 1


def test_both_branches_equal_inside_the_clip_give_one_gradient_not_half() -> None:
    assert clipped_at(1.1, 2.0, PPOClip(0.2, 0.2))[1] == -2


def slope_of_log(ratio: object, log_ratio: float, clamp: float) -> Tensor:
    logp = torch.tensor([[log_ratio]], dtype=torch.float64, requires_grad=True)
    batch = TokenBatch(logp=logp, old_logp=torch.zeros(1, 1).double(), mask=torch.ones(1, 1, dtype=torch.bool))
    return torch.autograd.grad(ratio(clean(batch), clamp).log.sum(), logp)[0]  # type: ignore[operator]


@pytest.mark.parametrize("ratio", [TokenRatio(), SequenceRatio(), SequenceTokenRatio(), SequenceSumRatio()], ids=str)
def test_clamp_border(ratio: object) -> None:
    for sign in (1, -1):
        assert float(slope_of_log(ratio, sign * 2.0, 2.0)) == 1  # on the clamp: the gradient flows
        assert float(slope_of_log(ratio, sign * 2.0000001, 2.0)) == 0


def test_clamp_border_of_the_kl() -> None:
    for estimator, slope in (("k1", 1.0), ("k2", 2.0)):
        for excess, expected in ((0.0, slope), (1e-7, 0.0)):
            batch = one_token(logp=1.0 + excess, old_logp=-1.0)
            logp = batch.logp.requires_grad_(True)
            value = KL(1.0, "old", estimator).values(batch, 2.0)  # type: ignore[arg-type]
            assert float(torch.autograd.grad(value.sum(), logp)[0]) == expected


@pytest.mark.parametrize(
    ("advantage", "entropy", "held"),
    [
        (1.0, 0.75, False),  # fallen by exactly the margin
        (1.0, 0.7499999, True),
        (1.0, 1.0, False),
        (1.0, 1.5, False),
        (0.0, 0.1, False),
        (-1.0, 0.1, False),
        (1e-12, 0.1, True),
    ],
)
def test_entropy_margin_border(advantage: float, entropy: float, held: bool) -> None:
    batch = one_token(advantage=advantage, entropy=entropy, old_entropy=1.0)
    assert bool(FallingEntropy("realised", margin=0.25)(batch)) is held


def test_sign_and_first_order_borders_hold_nothing() -> None:
    """log p + H = 0, also at the uniform distribution, where the entropy cannot fall to first order."""
    assert not FallingEntropy("sign")(one_token(advantage=1.0, logp=-1.0, entropy=1.0))
    assert FallingEntropy("sign")(one_token(advantage=1.0, logp=-1.0, entropy=1.0 + 1e-9))
    p = 0.25  # uniform over four: sum p^2 (log p + H) = 0
    log_p = torch.tensor(p, dtype=torch.float64).log().item()
    uniform = one_token(advantage=1.0, logp=log_p, entropy=-log_p, sum_p2=p, sum_p2_logp=p * log_p)
    assert not FallingEntropy("first-order")(uniform)


def test_importance_weight_borders_are_kept() -> None:
    two = torch.tensor(2.0, dtype=torch.float64).log().item()
    weight = torch.tensor(two, dtype=torch.float64).exp().item()
    for part in (Truncated(weight), Masked(weight), SequenceMasked(weight)):
        on, over = one_token(old_logp=two, rollout_logp=0.0), one_token(old_logp=two + 1e-6, rollout_logp=0.0)
        assert float(part(on, 20.0)) == weight
        assert float(part(over, 20.0)) == (weight if isinstance(part, Truncated) else 0.0)
    below = one_token(old_logp=-two - 1e-6, rollout_logp=0.0)
    assert float(Masked(weight)(below, 20.0)) == 0
    assert float(SequenceMasked(weight)(below, 20.0)) == pytest.approx(0.5, abs=1e-6)


def test_importance_weights_carry_no_gradient() -> None:
    batch = one_token(logp=-1.0, old_logp=-0.9, rollout_logp=-1.2, advantage=1.0)
    for how in ("truncate", "mask", "sequence-mask"):
        plain, weighted = (
            float(tepo.credit(tepo.objective("dapo", importance_weight=choice), batch)) for choice in ("none", how)
        )
        assert weighted == pytest.approx(plain * torch.tensor(0.3).exp().item(), rel=1e-6)


def test_on_the_first_update_the_importance_weight_compares_with_the_current_policy() -> None:
    batch = one_token(logp=-1.0, rollout_logp=-1.1, advantage=2.0)
    credit = tepo.credit(tepo.objective("dapo", importance_weight="truncate"), batch)
    assert float(credit) == pytest.approx(2 * torch.tensor(0.1).exp().item(), rel=1e-6)
