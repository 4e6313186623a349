"""Identities between the methods, in float64, on random batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from objectives_reference import METHODS
from torch import Tensor

import tepo
from tepo.objectives import (
    KL,
    GroupNormalized,
    LeaveOneOut,
    NoRatio,
    Objective,
    PolicyGradient,
    PPOClip,
    SequenceMean,
    SequenceRatio,
    SequenceTokenRatio,
    TokenBatch,
    TokenMean,
    TokenRatio,
)
from tepo.objectives.reducers import Reducer
from tepo.testing import random_batch, steady_batch

SEEDS = range(10)
NARROW: Any = {"rtol": 1e-12, "atol": 1e-14}


def batch(seed: int, **settings: Any) -> TokenBatch:
    return random_batch(seed, fields={"entropy", "old_entropy", "ref_logp"}, **settings)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, **NARROW)


def value_and_credit(objective: Objective, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    return objective(batch).loss.detach(), tepo.credit(objective, batch)


@pytest.mark.parametrize("reducer", [TokenMean(), SequenceMean()], ids=["token-mean", "sequence-mean"])
@pytest.mark.parametrize("seed", SEEDS)
def test_at_the_old_policy_every_clipped_method_is_the_plain_policy_gradient(reducer: Reducer, seed: int) -> None:
    first = batch(seed, kind="first-update")
    plain = tepo.credit(Objective("pg", ratio=NoRatio(), surrogate=PolicyGradient(), reducer=reducer), first)
    for ratio in (TokenRatio(), SequenceTokenRatio(), SequenceRatio()):
        for clip in (PPOClip(0.2, 0.2), PPOClip(0.2, 0.28), PPOClip(3e-4, 4e-4), PPOClip(0.2, 0.28, 3.0)):
            clipped = Objective("clipped", ratio=ratio, surrogate=clip, reducer=reducer)
            assert same(tepo.credit(clipped, first), plain)
            metrics = clipped(first).metrics
            assert metrics["ratio/min"] == metrics["ratio/max"] == 1


@pytest.mark.parametrize("name", [entry.name for entry in tepo.objectives()])
def test_old_logp_omitted_is_old_logp_equal(name: str) -> None:
    objective = tepo.objective(name)
    for seed in range(3):
        first = random_batch(seed, fields=objective.needs.batch, kind="first-update")
        entropy = None if first.entropy is None else first.entropy.clone()
        explicit = first.replace(old_logp=first.logp.clone(), old_entropy=entropy)
        one, two = value_and_credit(objective, first), value_and_credit(objective, explicit)
        assert same(one[0], two[0])
        assert same(one[1], two[1])


@pytest.mark.parametrize("seed", SEEDS)
def test_sequence_and_sequence_token_ratios_agree_for_a_row_constant_advantage(seed: int) -> None:
    later = batch(seed)
    for reducer in (TokenMean(), SequenceMean()):
        for clip in (PPOClip(0.2, 0.28), PPOClip(3e-4, 4e-4), PPOClip(0.2, 0.28, 1.2)):
            one, two = (
                value_and_credit(Objective("s", ratio=ratio, surrogate=clip, reducer=reducer), later)
                for ratio in (SequenceRatio(), SequenceTokenRatio())
            )
            assert same(one[0], two[0])
            assert same(one[1], two[1])


def test_sequence_and_sequence_token_ratios_differ_for_token_advantages() -> None:
    later = random_batch(0, fields=(), kind="token-advantages")
    clip = PPOClip(0.2, 0.28)
    one, two = (
        value_and_credit(Objective("s", ratio=ratio, surrogate=clip), later)
        for ratio in (SequenceRatio(), SequenceTokenRatio())
    )
    assert same(one[0], two[0])
    assert not torch.allclose(one[1], two[1], atol=1e-4)


@pytest.mark.parametrize("seed", SEEDS)
def test_with_one_token_a_row_the_sequence_methods_are_the_token_methods(seed: int) -> None:
    short = batch(seed, kind="length-one")
    clips = {"clip_low": 0.2, "clip_high": 0.28}
    token = value_and_credit(tepo.objective("grpo", kl_coef=0, **clips), short)
    for name in ("gspo", "gspo-token", "dapo", "tepo-markov"):
        other = value_and_credit(tepo.objective(name, **clips), short)
        assert same(token[0], other[0]), name
        assert same(token[1], other[1]), name


@pytest.mark.parametrize("seed", SEEDS)
def test_with_equal_lengths_the_token_mean_is_the_sequence_mean(seed: int) -> None:
    full = batch(seed)
    full = full.replace(mask=torch.ones_like(full.mask))
    pairs = [
        (tepo.objective("dapo"), tepo.objective("grpo", kl_coef=0, clip_high=0.28)),
        (tepo.objective("dapo", scope="group"), tepo.objective("dapo")),
        (tepo.objective("tepo-markov"), tepo.objective("gspo", clip_low=0.2, clip_high=0.28)),
    ]
    if len(set(full.group.unique(return_counts=True)[1].tolist())) > 1:
        pairs.pop(1)  # groups of different sizes weigh differently
    for one, two in pairs:
        assert same(value_and_credit(one, full)[0], value_and_credit(two, full)[0])
        assert same(value_and_credit(one, full)[1], value_and_credit(two, full)[1])


def test_with_equal_groups_of_equal_lengths_the_group_scope_is_the_mini_batch_scope() -> None:
    full = random_batch(0, fields=(), groups=(3, 3, 3))
    full = full.replace(mask=torch.ones_like(full.mask))
    one, two = (value_and_credit(tepo.objective("dapo", scope=scope), full) for scope in ("group", "mini"))
    assert same(one[0], two[0])
    assert same(one[1], two[1])


@pytest.mark.parametrize("seed", SEEDS)
def test_advantages_are_multiples_of_the_centred_reward(seed: int) -> None:
    rewards, group = batch(seed, kind="group-of-one").rewards, batch(seed, kind="group-of-one").group
    centred = GroupNormalized(scale="none").of(rewards, group)
    left_out, normalized = LeaveOneOut().of(rewards, group), GroupNormalized(eps=0.0).of(rewards, group)
    for name in group.unique():
        inside = group == name
        n = int(inside.sum())
        if n == 1:
            assert float(left_out[inside]) == float(normalized[inside]) == float(centred[inside]) == 0
            continue
        assert same(left_out[inside], centred[inside] * n / (n - 1))
        assert same(normalized[inside], centred[inside] / rewards[inside].std(unbiased=True))


@pytest.mark.parametrize("estimator", ["abs", "k2", "k3", "k3-old"])
def test_kl_estimators_do_nothing_where_the_policies_agree(estimator: Any) -> None:
    first = batch(0, kind="first-update").replace(advantage=torch.zeros(7, dtype=torch.float64))
    for target in ("old", "reference"):
        held = Objective("kl", regularizers=(KL(1.0, target, estimator),))
        credit = tepo.credit(held, first.replace(ref_logp=first.logp.clone()))
        assert float(credit.abs().max()) == 0
    pull = tepo.credit(Objective("kl", regularizers=(KL(1.0, "old", "k1"),)), first)
    assert same(pull[first.mask], torch.full_like(pull[first.mask], -1 / int(first.mask.sum())))


def test_k2_has_the_gradient_logp_minus_target() -> None:
    later = batch(0).replace(advantage=torch.zeros(7, dtype=torch.float64))
    credit = tepo.credit(Objective("kl", regularizers=(KL(1.0, "reference", "k2"),)), later)
    expected = -(later.logp - later.ref_logp) / later.mask.sum()
    assert same(credit[later.mask], expected[later.mask])


@pytest.mark.parametrize("seed", SEEDS)
def test_unclipped_tepo_has_the_coefficient_a_s_over_n_at_every_token(seed: int) -> None:
    later = batch(seed)
    objective = tepo.objective("tepo", kl_coef=0, clip_low=1.0, clip_high=1e9)
    advantage = objective.prepare(later).batch.advantage
    assert advantage is not None
    zero = torch.zeros_like(later.logp)
    mean = torch.where(later.mask, later.logp - later.old_logp, zero).sum(1) / later.lengths().clamp_min(1)
    expected = torch.where(later.mask, advantage * mean.exp()[:, None] / later.mask.sum(), zero)
    assert same(tepo.credit(objective, later), expected)


@pytest.mark.parametrize("name", METHODS)
def test_credit_is_the_central_difference_of_the_loss(name: str) -> None:
    """Later updates only: on the first one the old policy is the current one and would move along."""
    settings = {"kl_coef": 0.5} if name == "grpo" else {}
    for seed in range(2):
        assert_credit_is_the_central_difference(tepo.objective(name, **settings), seed)


def assert_credit_is_the_central_difference(objective: Objective, seed: int) -> None:
    """Compare the credit of every token with the loss a little above and below its log-prob."""
    step = 1e-6
    later = steady_batch(objective, seed, rounded=None)
    credit = tepo.credit(objective, later)
    for row, column in later.mask.nonzero().tolist():
        moved = []
        for sign in (1, -1):
            logp = later.logp.clone()
            logp[row, column] += sign * step
            moved.append(float(objective(later.replace(logp=logp)).loss))
        slope = (moved[1] - moved[0]) / (2 * step)
        assert slope == pytest.approx(float(credit[row, column]), abs=2e-9, rel=1e-6)


def test_credit_leaves_the_batch_alone_and_is_zero_outside_the_mask() -> None:
    later = batch(0)
    leaf = later.logp.clone().requires_grad_(True)
    credit = tepo.credit(tepo.objective("tepo"), later.replace(logp=leaf))
    assert leaf.grad is None
    assert not credit.requires_grad
    assert float(credit[~later.mask].abs().max()) == 0
    assert math.isclose(float(credit.sum()), float(credit[later.mask].sum()))
