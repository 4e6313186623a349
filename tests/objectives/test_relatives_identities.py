"""What GRPO's relatives become where they should become something else, in float64, on random batches."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from reference_relatives import METHODS
from test_identities import SEEDS, assert_credit_is_the_central_difference, same, value_and_credit
from torch import Tensor

import tepo
from tepo.objectives import (
    GroupNormalized,
    HolderRatio,
    NoRatio,
    Objective,
    PolicyGradient,
    PrefixRatio,
    SequenceMean,
    SequenceRatio,
    SequenceSum,
    TokenBatch,
    TokenMean,
    TokenRatio,
    Unclipped,
)
from tepo.objectives.batch import clean
from tepo.objectives.reducers import Reducer
from tepo.testing import random_batch


def batch(seed: int, **settings: Any) -> TokenBatch:
    return random_batch(seed, fields={"entropy", "ref_logp", "old_logp"}, **settings)


def equal(one: Objective, two: Objective, over: TokenBatch) -> bool:
    (value, credit), (other_value, other_credit) = value_and_credit(one, over), value_and_credit(two, over)
    return same(value, other_value) and same(credit, other_credit)


# At the old policy every ratio is 1: (method, settings, the reducer of the plain policy gradient it becomes)
ON_POLICY: list[tuple[str, dict[str, Any], Reducer]] = [
    ("ppo-clip", {}, TokenMean()),
    ("ppo-clip", {"reducer": "sequence-sum", "max_length": 7}, SequenceSum(7)),
    ("cispo", {}, TokenMean()),
    ("cispo", {"cap": "relative", "clip_low": 0.2, "clip_high": 0.2}, TokenMean()),
    ("sapo", {}, SequenceMean()),
    ("sapo", {"tau_positive": 3.0, "tau_negative": 0.2}, SequenceMean()),
    ("gmpo", {}, SequenceMean()),
    ("luspo", {}, SequenceSum()),
    ("vespo", {}, TokenMean()),
    ("vespo", {"k_positive": 0.3, "lam_negative": 9.0}, TokenMean()),
    ("dppo", {}, TokenMean()),
    ("dppo", {"divergence": "kl", "ratio_cap": 1.0}, TokenMean()),
    ("dro", {"beta": 5.0}, TokenMean()),
    ("pnpo", {}, TokenMean()),
    ("pnpo", {"surrogate": "clip"}, TokenMean()),
    ("holder", {}, SequenceMean()),
    ("holder", {"p": -3.0, "clip": "token"}, SequenceMean()),
    ("gdpo", {"whiten": "none"}, SequenceMean()),
    ("gpg", {"divide_by_std": True, "alpha": "none"}, TokenMean()),
]


@pytest.mark.parametrize(("name", "settings", "reducer"), ON_POLICY, ids=str)
def test_at_the_old_policy_they_are_the_plain_policy_gradient(
    name: str, settings: dict[str, Any], reducer: Reducer
) -> None:
    plain = Objective("pg", ratio=NoRatio(), surrogate=PolicyGradient(), reducer=reducer)
    for seed in SEEDS:
        first = batch(seed, kind="first-update")
        assert same(tepo.credit(tepo.objective(name, **settings), first), tepo.credit(plain, first))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_differentiated_prefix_moves_the_same_mass_to_earlier_tokens(seed: int) -> None:
    """At the old policy a row's coefficients sum to the same; its last token keeps 1/L of its own."""
    first = batch(seed, kind="first-update")
    own, spread = (tepo.credit(tepo.objective("pnpo", gradient=gradient), first) for gradient in ("token", "prefix"))
    assert same(own.sum(dim=1), spread.sum(dim=1))
    last = first.mask & (first.mask.flip(1).cumsum(1).flip(1) == 1)
    assert same(spread[last], own[last] / first.lengths())


@pytest.mark.parametrize("seed", SEEDS)
def test_inside_the_cap_cispo_has_the_gradient_of_the_unclipped_ratio(seed: int) -> None:
    later = batch(seed)
    unclipped = Objective("pg", ratio=TokenRatio(), surrogate=Unclipped())
    assert same(tepo.credit(tepo.objective("cispo", clip_high=1e9), later), tepo.credit(unclipped, later))
    open_region = tepo.objective("dppo", threshold_low=1.0, threshold_high=1.0, ratio_cap=1.7)
    assert equal(open_region, tepo.objective("cispo", clip_high=1.7), later)


@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_clip_is_the_bench_of_its_relatives(seed: int) -> None:
    later = batch(seed, kind=("plain", "group-of-one", "empty-row", "token-advantages")[seed % 4])
    pairs = [
        ({"clip_high": 0.28}, tepo.objective("dapo")),
        ({"clip_high": 0.28, "scope": "group"}, tepo.objective("dapo", scope="group")),
        ({"reducer": "sequence-mean"}, tepo.objective("grpo", kl_coef=0)),
        ({"reducer": "sequence-mean", "empty_rows": "count"}, tepo.objective("grpo", kl_coef=0, empty_rows="count")),
        (
            {"reducer": "sequence-sum", "advantage": "centred", "max_length": 20},
            tepo.objective("dr-grpo", max_length=20),
        ),
        ({"reducer": "sequence-mean"}, tepo.objective("gdpo", whiten="none")),
    ]
    for settings, other in pairs:
        assert equal(tepo.objective("ppo-clip", **settings), other, later), settings


@pytest.mark.parametrize("seed", SEEDS)
def test_with_one_token_a_row_they_are_token_methods(seed: int) -> None:
    short = batch(seed, kind="length-one")
    token = tepo.objective("ppo-clip", clip_high=0.28)
    assert equal(tepo.objective("luspo", clip_low=0.2, clip_high=0.28), token, short)
    assert equal(tepo.objective("holder", p=3.0, clip_high=0.28), token, short)
    for gradient in ("token", "prefix"):
        assert equal(tepo.objective("pnpo", surrogate="clip", gradient=gradient), token, short)
    in_logs = tepo.objective("gmpo", clip_low=-math.log(0.8), clip_high=math.log(1.28))
    assert same(value_and_credit(in_logs, short)[1], value_and_credit(token, short)[1])  # clipped values differ
    assert equal(tepo.objective("opo"), tepo.objective("reinforce"), short)


@pytest.mark.parametrize("seed", SEEDS)
def test_power_means_are_ordered_and_continuous(seed: int) -> None:
    later = batch(seed)
    later = later.replace(advantage=torch.ones(7, dtype=torch.float64))
    geometric = HolderRatio(0.0)(clean(later), 20.0).value
    assert same(geometric, SequenceRatio()(clean(later), 20.0).value)
    for p in (1e-9, -1e-9):
        assert torch.allclose(HolderRatio(p)(clean(later), 20.0).value, geometric, rtol=1e-8)
    values = [HolderRatio(p)(clean(later), 20.0).value for p in (-50.0, -2.0, -0.1, 0.0, 1e-3, 1.0, 2.0, 50.0)]
    for lower, higher in itertools.pairwise(values):
        assert bool((lower <= higher + 1e-12).all())
    ratios = TokenRatio()(clean(later), 20.0).value
    mean = torch.where(later.mask, ratios, torch.zeros_like(ratios)).sum(1) / later.lengths()
    expected = torch.where(later.mask, mean[:, None].expand_as(ratios), torch.ones_like(ratios))
    assert same(HolderRatio(1.0)(clean(later), 20.0).value, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_holder_gmpo_and_gspo_meet_at_the_geometric_mean(seed: int) -> None:
    later = batch(seed)
    clips = {"clip_low": 0.2, "clip_high": 0.28}
    assert equal(tepo.objective("holder", p=0.0, **clips), tepo.objective("gspo", **clips), later)
    by_token = tepo.objective("holder", p=0.0, clip="token", **clips)
    in_logs = tepo.objective("gmpo", clip_low=-math.log1p(-0.2), clip_high=math.log1p(0.28))
    assert equal(by_token, in_logs, later)
    wide = tepo.objective("gmpo", clip_low=100.0, clip_high=100.0)
    unclipped = Objective("s", ratio=SequenceRatio(), surrogate=Unclipped(), reducer=SequenceMean())
    assert equal(wide, unclipped, later)


@pytest.mark.parametrize("seed", SEEDS)
def test_luspo_is_tepos_policy_term_but_for_a_constant(seed: int) -> None:
    later = batch(seed)
    clips = {"clip_low": 0.2, "clip_high": 0.28}
    by_rows, by_tokens = tepo.objective("luspo", **clips), tepo.objective("tepo-markov", **clips)
    scale = float(later.mask.sum()) / 7
    assert same(tepo.credit(by_rows, later), tepo.credit(by_tokens, later) * scale)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_prefix_of_the_last_token_is_the_sequence(seed: int) -> None:
    later = clean(batch(seed))
    last = later.mask & (later.mask.flip(1).cumsum(1).flip(1) == 1)
    prefix, whole = PrefixRatio()(later, 20.0).value, SequenceRatio()(later, 20.0).value
    assert same(prefix[last], whole[last])
    one = later.mask & (later.mask.cumsum(1) == 1)
    assert same(prefix[one], TokenRatio()(later, 20.0).value[one])


@pytest.mark.parametrize("seed", SEEDS)
def test_advantages_that_should_agree(seed: int) -> None:
    later = batch(seed)
    full = later.replace(mask=torch.ones_like(later.mask))

    def advantage(name: str, over: TokenBatch, **settings: Any) -> Tensor:
        value = tepo.objective(name, **settings).prepare(over).batch.advantage
        assert value is not None
        return value

    assert same(advantage("opo", full), advantage("reinforce", full))
    shifted = full.replace(rewards=full.rewards + 5.0 * full.group)
    assert torch.allclose(
        advantage("reinforce++-baseline", full), advantage("reinforce++-baseline", shifted), atol=1e-9
    )
    moved = full.replace(rewards=3 * full.rewards - 2)
    plus = [advantage("reinforce++", each, kl_coef=0) for each in (full, moved)]
    assert torch.allclose(plus[0], plus[1], atol=1e-6)  # the 1e-8 beside the variance does not scale
    one, twice = full, full.replace(rewards=torch.stack([full.rewards, full.rewards], dim=1))
    assert same(advantage("gdpo", twice, whiten="none"), 2 * advantage("grpo", one))
    assert torch.allclose(advantage("gdpo", twice), advantage("gdpo", one), atol=1e-5)  # eps beside the deviation
    second = full.replace(rewards=torch.stack([full.rewards, torch.full_like(full.rewards, 0.3)], dim=1))
    assert same(advantage("gdpo", second), advantage("gdpo", one))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_threshold_nobody_reaches_leaves_nobody_out(seed: int) -> None:
    later = batch(seed)
    for name in ("dapo", "gspo", "cispo", "rloo"):
        assert equal(tepo.objective(name, off_policy_mask=1e6), tepo.objective(name), later)


def test_a_silent_group_of_sums_may_speak_in_its_components() -> None:
    """Rewards (1, 0) and (0, 1): equal sums, so GRPO drops the group; GDPO does not."""
    mask = torch.ones(2, 2, dtype=torch.bool)
    pair = TokenBatch(
        logp=torch.full((2, 2), -1.0, dtype=torch.float64),
        mask=mask,
        rewards=torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64),
        group=torch.zeros(2, dtype=torch.long),
    )
    out = tepo.objective("gdpo", zero_variance="drop", reward_weights=[2.0, 1.0], whiten="none")(pair)
    assert out.metrics["group/zero_std"] == 0
    assert out.metrics["advantage/max"] == pytest.approx(math.sqrt(0.5), rel=1e-5)
    assert tepo.objective("grpo", kl_coef=0)(pair).metrics["group/zero_std"] == 1


def test_holders_exponent_falls_with_the_updates() -> None:
    objective = tepo.objective("holder", p_updates=4)
    later = batch(0)
    state = objective.init_state()
    for p in (2.0, 1.0, 0.0, -1.0, -2.0, -2.0):
        assert float(state["holder_p"]) == p
        fixed = tepo.objective("holder", p=p, p_end=None)
        assert same(objective(later, state).loss.detach(), fixed(later).loss.detach())
        assert same(tepo.credit(objective, later, state), tepo.credit(fixed, later))
        state = objective.update(state, {})
    assert tepo.objective("holder", p_end=None).init_state() == {}
    rising = tepo.objective("holder", p=-1.0, p_end=1.0, p_updates=1)
    assert float(rising.update(rising.init_state(), {})["holder_p"]) == 1.0


# Their weight is detached: the gradient is not the loss's slope, on purpose.
DETACHED = {"cispo", "vespo", "dppo"}


@pytest.mark.parametrize("name", sorted(set(METHODS) - DETACHED))
def test_credit_is_the_central_difference_of_the_loss(name: str) -> None:
    settings = {"gradient": "prefix"} if name == "pnpo" else {}
    assert_credit_is_the_central_difference(tepo.objective(name, **settings), 0)


def test_rloos_clipped_sum_and_the_power_means_are_finite_at_extremes() -> None:
    """A product over 8192 tokens, and a token a thousand nats away, in float32."""
    objectives = [
        tepo.objective("rloo", ratio="sequence-sum", kl_coef=0),
        tepo.objective("vespo"),
        *(tepo.objective("holder", p=p, clip=clip) for p in (2.0, -2.0, 1e-6, 50.0) for clip in ("sequence", "token")),
        *(tepo.objective("pnpo", surrogate=bound, gradient="prefix") for bound in ("clip", "rejection")),
        dataclasses.replace(tepo.objective("holder", p_end=None), surrogate=Unclipped()),
    ]
    for drift in (0.02, -0.02):
        for size in (0.0, 1000.0, -1000.0):
            change = torch.full((2, 8192), drift)
            change[:, 17] = size
            logp = (torch.full((2, 8192), -1.0) + change).requires_grad_(True)
            long = TokenBatch(
                logp=logp,
                old_logp=torch.full((2, 8192), -1.0),
                mask=torch.ones(2, 8192, dtype=torch.bool),
                rewards=torch.tensor([1.0, 0.0]),
                group=torch.zeros(2, dtype=torch.long),
            )
            for objective in objectives:
                loss = objective(long).loss
                (gradient,) = torch.autograd.grad(loss, logp)
                assert bool(torch.isfinite(loss)), objective
                assert bool(torch.isfinite(gradient).all()), objective


def test_a_float32_power_mean_of_8192_close_ratios_keeps_its_digits() -> None:
    """exp(p D) - 1 of tiny D is lost if 1 is added first: compare with float64."""
    generator = torch.Generator().manual_seed(0)
    change = 1e-4 * torch.randn(1, 8192, generator=generator, dtype=torch.float64)
    for p in (2.0, 1.0, 1e-3, -2.0):
        exact, narrow = (
            HolderRatio(p)(
                clean(
                    TokenBatch(
                        logp=change.to(dtype),
                        old_logp=torch.zeros(1, 8192, dtype=dtype),
                        mask=torch.ones(1, 8192, dtype=torch.bool),
                    )
                ),
                20.0,
            ).log[0, 0]
            for dtype in (torch.float64, torch.float32)
        )
        assert abs(float(narrow) - float(exact)) < 1e-10


def test_group_normalised_is_the_default_of_the_group_methods() -> None:
    for name in ("ppo-clip", "cispo", "sapo", "gmpo", "luspo", "vespo", "holder", "pnpo", "dppo", "dro"):
        assert tepo.objective(name).advantage == GroupNormalized()
