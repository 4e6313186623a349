"""Returns, generalised advantages and whitening, worked out by hand; gaps in the mask are no steps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import tepo
from tepo.objectives import GAE, TokenBatch, TokenReturns, Whitened
from tepo.objectives.batch import clean
from tepo.objectives.returns import generalized_advantages, reward_of_tokens

GAP = float("nan")  # what stands outside the mask must not matter


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture
def batch() -> TokenBatch:
    """Two rows: tokens, a gap of tool output, one more token; and a row padded on both sides."""
    mask = torch.tensor([[1, 1, 0, 0, 1], [0, 1, 1, 0, 0]]).bool()
    return TokenBatch(
        logp=torch.zeros(2, 5, dtype=torch.float64),
        mask=mask,
        old_values=rows([0.5, 0.2, GAP, 9.0, 0.4], [GAP, 0.1, 0.3, 8.0, GAP]),
        rewards=torch.tensor([1.0, -2.0], dtype=torch.float64),
    )


def test_gae_of_a_response_with_a_gap_by_hand(batch: TokenBatch) -> None:
    """gamma 0.9, lam 0.8. Row 1: d = (0.9 0.2 - 0.5, 0.9 0.4 - 0.2, 1 - 0.4) = (-0.32, 0.16, 0.6), the gap skipped;
    A = (-0.32 + 0.72 0.592, 0.16 + 0.72 0.6, 0.6). Row 2: d = (0.27 - 0.1, -2 - 0.3), A = (0.17 - 0.72 2.3, -2.3)."""
    found = GAE(gamma=0.9, lam=0.8)(clean(batch))
    wanted = rows([0.10624, 0.592, 0, 0, 0.6], [0, -1.486, -2.3, 0, 0])
    assert torch.allclose(found, wanted, atol=1e-15, rtol=0)


def test_token_rewards_add_to_the_reward_of_the_response(batch: TokenBatch) -> None:
    view = clean(batch.replace(token_rewards=rows([0.1, -0.2, GAP, GAP, 0.3], [GAP, 0.0, 0.5, 0.0, 0.0])))
    assert reward_of_tokens(view, "test").tolist() == [[0.1, -0.2, 0, 0, 1.3], [0, 0, -1.5, 0, 0]]
    found = TokenReturns(gamma=0.5)(view)
    assert torch.allclose(found, rows([0.1 - 0.1 + 0.325, -0.2 + 0.65, 0, 0, 1.3], [0, -0.75, -1.5, 0, 0]))


def test_without_discount_advantage_and_value_are_the_return(batch: TokenBatch) -> None:
    view = clean(batch)
    assert view.old_values is not None
    found = GAE(gamma=1.0, lam=1.0)(view) + view.old_values
    assert torch.allclose(found[view.mask], TokenReturns()(view)[view.mask])
    assert TokenReturns()(view).tolist() == [[1, 1, 0, 0, 1], [0, -2, -2, 0, 0]]


def test_lam_zero_is_the_one_step_error(batch: TokenBatch) -> None:
    found = GAE(gamma=0.9, lam=0.0)(clean(batch))
    assert torch.allclose(found, rows([-0.32, 0.16, 0, 0, 0.6], [0, 0.17, -2.3, 0, 0]))


def test_a_response_without_a_reward_has_no_advantage(batch: TokenBatch) -> None:
    view = clean(batch.replace(rewards=torch.tensor([float("nan"), 1.0], dtype=torch.float64)))
    for part in (GAE(), TokenReturns()):
        advantage = part(view)
        assert advantage[0].tolist() == [0, 0, 0, 0, 0]
        assert bool((advantage[1][view.mask[1]] != 0).all())
        assert Whitened()(advantage, view)[0].tolist() == [0, 0, 0, 0, 0]


def test_an_empty_batch_of_tokens() -> None:
    nothing = torch.zeros(2, 0)
    assert generalized_advantages(nothing, nothing, nothing.bool(), gamma=1.0, lam=1.0).shape == (2, 0)
    view = TokenBatch(logp=torch.zeros(1, 3), mask=torch.zeros(1, 3).bool(), rewards=torch.ones(1))
    assert Whitened()(TokenReturns()(view), view).tolist() == [[0, 0, 0]]


def test_whitening_has_mean_0_and_sample_variance_1_over_tokens(batch: TokenBatch) -> None:
    view = clean(batch)
    white = Whitened()(rows([1.0, 2.0, 0.0, 0.0, 3.0], [0.0, 6.0, 8.0, 0.0, 0.0]), view)
    # mean 4, squares 9 + 4 + 1 + 4 + 16 = 34 over 4
    scale = math.sqrt(34 / 4 + 1e-8)
    wanted = rows([-3 / scale, -2 / scale, 0, 0, -1 / scale], [0, 2 / scale, 4 / scale, 0, 0])
    assert torch.allclose(white, wanted, atol=1e-15, rtol=0)
    assert float(white[view.mask].mean()) == pytest.approx(0, abs=1e-15)
    assert float(white[view.mask].var()) == pytest.approx(1, abs=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 1 / 3, -0.7, 1e4 / 3])
def test_equal_advantages_whiten_to_exactly_nothing(value: float, dtype: torch.dtype) -> None:
    view = TokenBatch(logp=torch.zeros(5, 7, dtype=dtype), mask=torch.ones(5, 7).bool())
    equal = torch.full((5, 7), value, dtype=dtype)
    assert bool((Whitened()(equal, view) == 0).all())
    assert bool((Whitened()(equal * (1 + torch.finfo(dtype).eps * torch.arange(7)), view) == 0).all())


@pytest.mark.parametrize(("name", "value"), [("gamma", 1.1), ("gamma", -0.1), ("lam", 2.0)])
def test_rates_outside_0_and_1_are_refused(name: str, value: float) -> None:
    with pytest.raises(tepo.InputError, match=f"{name}={value}: expected a number from 0 to 1"):
        GAE(**{name: value})


def test_a_missing_field_is_named() -> None:
    view = TokenBatch(logp=torch.zeros(1, 3), mask=torch.ones(1, 3).bool(), rewards=torch.ones(1))
    with pytest.raises(tepo.InputError, match=r"GAE needs TokenBatch.old_values: the critic's values"):
        GAE()(view)
