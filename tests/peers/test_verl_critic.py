"""Generalised advantages, their whitening, and the clipped value loss against verl's own functions."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TEPO_PEER") != "verl":  # `make test-verl` sets it: there, a missing verl is a failure
    pytest.importorskip("verl", reason="verl lives in its own environment: make test-verl")

from verl.trainer.ppo import core_algos

from tepo.objectives import GAE, TokenBatch, TokenMean, ValueLoss, Whitened, objective
from tepo.objectives.batch import clean
from tepo.testing import random_batch

pytestmark = pytest.mark.peer

RATES = ((1.0, 0.95), (1.0, 1.0), (0.9, 0.8), (0.97, 0.0))
BATCHES = 200


def drawn(seed: int) -> TokenBatch:
    """Rows of tokens, gaps and padding on both sides, with token rewards beside the response's."""
    fields = {"values", "old_values", "token_rewards"}
    return clean(random_batch(seed, fields=fields, groups=(4, 3), width=7))


def reward_of_tokens(batch: TokenBatch) -> torch.Tensor:
    """The response's reward on its last token, as verl's reward managers put it."""
    assert batch.rewards is not None
    assert batch.token_rewards is not None
    rewards = batch.token_rewards.clone()
    for row, mask in enumerate(batch.mask.tolist()):
        last = max(column for column, used in enumerate(mask) if used)
        rewards[row, last] += batch.rewards[row]
    return rewards


@pytest.mark.parametrize(("gamma", "lam"), RATES)
def test_advantages_whitened_and_returns(gamma: float, lam: float) -> None:
    for seed in range(BATCHES):
        batch = drawn(seed)
        assert batch.old_values is not None
        theirs, returns = core_algos.compute_gae_advantage_return(
            reward_of_tokens(batch), batch.old_values, batch.mask.to(torch.float64), gamma, lam
        )
        plain = GAE(gamma, lam)(batch)
        mask = batch.mask
        # verl divides its mean and variance by the count + 1e-8.
        assert torch.allclose(Whitened()(plain, batch)[mask], theirs[mask], atol=1e-7), seed
        assert torch.allclose((plain + batch.old_values)[mask], returns[mask], atol=1e-10, rtol=1e-9), seed
        prepared = objective("ppo", gamma=gamma, lam=lam).prepare(batch).batch
        assert prepared.advantage is not None
        assert prepared.returns is not None
        assert torch.allclose(prepared.advantage[mask], theirs[mask], atol=1e-7), seed
        assert torch.allclose(prepared.returns[mask], returns[mask], atol=1e-10, rtol=1e-9), seed


@pytest.mark.parametrize("clip", [0.2, 0.5])
def test_the_value_loss_and_its_gradient(clip: float) -> None:
    for seed in range(BATCHES):
        batch = objective("ppo").prepare(drawn(seed)).batch
        assert batch.values is not None
        losses = []
        for side in ("ours", "theirs"):
            values = batch.values.clone().requires_grad_(True)
            if side == "ours":
                tokens = ValueLoss(clip=clip).values(batch.replace(values=values), 20.0)
                weights = TokenMean()(batch.mask, batch)
                loss = (tokens * weights.tokens).sum() / weights.rows.sum()
            else:
                loss, _ = core_algos.compute_value_loss(
                    vpreds=values,
                    returns=batch.returns,
                    values=batch.old_values,
                    response_mask=batch.mask.to(torch.float64),
                    cliprange_value=clip,
                    loss_agg_mode="token-mean",
                )
            losses.append((loss.detach(), torch.autograd.grad(loss, values)[0]))
        (our_loss, our_gradient), (their_loss, their_gradient) = losses
        # verl's masked mean divides by the count + 1e-8.
        assert torch.allclose(our_loss, their_loss, rtol=1e-8), seed
        assert torch.allclose(our_gradient, their_gradient, atol=1e-9), seed
