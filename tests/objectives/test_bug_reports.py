"""Faults that users of other trainers reported, as values. The names give the public thread; numbers are by hand."""

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
    EntropyBonus,
    GroupNormalized,
    NoRatio,
    NotTruncated,
    Objective,
    Parts,
    PolicyGradient,
    SequenceMean,
    SequenceRatio,
    SequenceSum,
    TokenBatch,
    TokenMean,
    Unclipped,
)
from tepo.objectives.batch import group_index
from tepo.objectives.reducers import Reducer
from tepo.testing import random_batch

NAN = float("nan")


def losses_of(rows: list[list[float]], width: int | None = None) -> TokenBatch:
    """Return a batch whose token losses under -A logp are the given ones (A = 1)."""
    width = width or max(map(len, rows))
    logp = torch.tensor([[-value for value in row] + [0.0] * (width - len(row)) for row in rows], dtype=torch.float64)
    mask = torch.tensor([[t < len(row) for t in range(width)] for row in rows])
    return TokenBatch(logp=logp, mask=mask, advantage=torch.ones(len(rows), dtype=torch.float64))


def plain(reducer: Reducer) -> Objective:
    return Objective("plain", ratio=NoRatio(), surrogate=PolicyGradient(), reducer=reducer)


def in_parts(objective: Objective, batch: TokenBatch, split: list[list[int]]) -> Parts:
    prepared = objective.prepare(batch)
    statistics = objective.statistics(prepared.batch)
    parts = []
    for rows in split:
        index = torch.tensor(rows)
        parts.append(objective.partial(prepared.batch.take(index), statistics.take(index)))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def test_trl_3823_sequence_ratio_under_a_sequence_mean() -> None:
    """A = 1, -1, s = 1.1, 0.9, lengths 2 and 6: -(1.1 - 0.9) / 2 = -0.1; broadcast into a token mean: +0.4 / ..."""
    log = torch.tensor([[math.log(1.1)] * 2 + [0.0] * 4, [math.log(0.9)] * 6], dtype=torch.float64)
    mask = torch.tensor([[True] * 2 + [False] * 4, [True] * 6])
    advantage = torch.tensor([1.0, -1.0], dtype=torch.float64)
    batch = TokenBatch(logp=log, old_logp=torch.zeros_like(log), mask=mask, advantage=advantage)
    objective = Objective("s", ratio=SequenceRatio(), surrogate=Unclipped(), reducer=SequenceMean())
    assert float(objective(batch).loss) == pytest.approx(-0.1, abs=1e-12)
    by_tokens = Objective("s", ratio=SequenceRatio(), surrogate=Unclipped(), reducer=TokenMean())
    assert float(by_tokens(batch).loss) == pytest.approx((-2 * 1.1 + 6 * 0.9) / 8, abs=1e-12)


@pytest.mark.parametrize("split", [[[0, 1]], [[0], [1]], [[1], [0]]], ids=str)
def test_swift_10117_trl_6024_prime_583_token_mean_over_micro_batches(split: list[list[int]]) -> None:
    """Token losses 1, 1, 1, 1 and 4: 8 / 5 = 1.6 however split; the mean of means is 2.5."""
    parts = in_parts(plain(TokenMean()), losses_of([[1, 1, 1, 1], [4]]), split)
    assert float(parts.loss) == pytest.approx(1.6, abs=1e-12)
    assert parts.metrics()["loss"] == pytest.approx(1.6, abs=1e-12)


@pytest.mark.parametrize("width", [3, 4, 11])
def test_verl_3741_sum_over_a_constant_is_a_mean_over_rows_for_any_width(width: int) -> None:
    batch = losses_of([[1, 1, 1], [2]], width)
    assert float(plain(SequenceSum(4.0))(batch).loss) == pytest.approx(0.625, abs=1e-12)
    old = batch.replace(old_logp=torch.zeros_like(batch.logp))
    by_name = tepo.objective("dr-grpo", max_length=4, clip_low=1.0, clip_high=1e9, log_ratio_clamp=50.0)
    expected = -(3 * math.exp(-1) / 4 + math.exp(-2) / 4) / 2
    assert float(by_name(old).loss) == pytest.approx(expected, abs=1e-12)


def in_processes(objective: Objective, batch: TokenBatch, shards: list[list[int]]) -> tuple[float, Tensor]:
    """Loss and gradient as data-parallel processes make them: denominators summed, gradients averaged.

    Each process multiplies its loss by the number of processes, because the averaging divides by it.
    """
    world = len(shards)
    prepared = objective.prepare(batch)
    local = [objective.statistics(prepared.batch.take(torch.tensor(rows))) for rows in shards]
    names = local[0].denominators
    summed = {name: torch.stack([each.denominators[name] for each in local]).sum() for name in names}
    losses, gradient = [], torch.zeros_like(batch.logp)
    for rows, statistics in zip(shards, local, strict=True):
        index = torch.tensor(rows)
        logp = batch.logp.detach()[index].requires_grad_(True)
        micro = prepared.batch.take(index).replace(logp=logp)
        loss = objective.partial(micro, statistics.replace(denominators=summed)).loss * world
        losses.append(float(loss.detach()))
        gradient[index] += torch.autograd.grad(loss, logp)[0] / world
    return sum(losses) / world, gradient


@pytest.mark.parametrize("reducer", [TokenMean(), SequenceMean()], ids=["token-mean", "sequence-mean"])
def test_verl_5798_four_processes_of_unit_losses_average_to_one(reducer: Reducer) -> None:
    batch = losses_of([[1] * 3, [1], [1] * 4, [1] * 2, [1] * 4, [1] * 2, [1], [1] * 5])
    shards = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert in_processes(plain(reducer), batch, shards)[0] == pytest.approx(1.0, abs=1e-12)


VARIANTS: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in METHODS] + [
    ("tepo", {"kl_norm": "masked", "truncated": "drop", "zero_variance": "drop"}),
    ("grpo", {"empty_rows": "count", "truncated": "drop"}),
    ("dapo", {"scope": "group", "entropy_coef": 0.1}),
]


@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=str)
def test_verl_5798_several_processes_equal_one(name: str, settings: dict[str, Any]) -> None:
    objective = tepo.objective(name, **settings)
    whole_groups = settings.get("scope") == "group"  # a group's tokens are counted where its rows are
    for seed in range(3):
        batch = random_batch(seed, fields=objective.needs.batch, groups=(2, 3, 2, 1))
        names = batch.group.unique().tolist()
        shards = [[row for row in range(8) if batch.group[row] == name] for name in names]
        shards = shards if whole_groups else [[0, 1], [2, 3], [4, 5], [6, 7]]
        loss, gradient = in_processes(objective, batch, shards)
        assert loss == pytest.approx(float(objective(batch).loss), rel=1e-12, abs=1e-14)
        assert torch.allclose(gradient, -tepo.credit(objective, batch), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("reward", [1.0, 0.1, 1 / 3, -0.7])
@pytest.mark.parametrize("name", ["tepo", "tepo-markov", "grpo", "dapo", "dr-grpo", "gspo", "gspo-token", "reinforce"])
def test_trl_5588_equal_rewards_give_exactly_no_advantage(name: str, reward: float) -> None:
    batch = random_batch(0, fields={"entropy", "old_entropy", "ref_logp"}, groups=(4, 3), dtype=torch.float32)
    batch = batch.replace(rewards=torch.full((7,), reward))
    objective = tepo.objective(name, **({"kl_coef": 0} if name == "grpo" else {}))
    out = objective(batch)
    assert out.metrics["group/zero_std"] == 1
    assert out.metrics["advantage/max"] == out.metrics["advantage/min"] == 0
    assert float(out.loss) == 0
    assert float(tepo.credit(objective, batch).abs().max()) == 0


def test_trl_5588_tokens_of_equal_rewards_stay_in_the_denominator_or_leave_it() -> None:
    """Two groups of one-token rows, rewards 1, 0 and 1, 1: A = 0.5, -0.5, 0, 0 (centred), logp = -1, -3."""
    batch = TokenBatch(
        logp=torch.tensor([[-1.0], [-3.0], [-1.0], [-1.0]], dtype=torch.float64),
        mask=torch.ones(4, 1, dtype=torch.bool),
        rewards=torch.tensor([1.0, 0, 1, 1]),
        group=torch.tensor([0, 0, 1, 1]),
    )
    kept, dropped = (tepo.objective("reinforce", zero_variance=choice)(batch) for choice in ("keep", "drop"))
    assert float(kept.loss) == pytest.approx((0.5 - 1.5) / 4)
    assert float(dropped.loss) == pytest.approx((0.5 - 1.5) / 2)
    assert kept.metrics["group/zero_std"] == dropped.metrics["group/zero_std"] == 0.5


def test_a_mini_batch_may_hold_a_part_of_an_informative_group() -> None:
    """Rewards 1, 1, 0, 0: each half of the group has equal rewards, the group has not."""
    batch = TokenBatch(
        logp=torch.full((4, 1), -1.0, dtype=torch.float64),
        mask=torch.ones(4, 1, dtype=torch.bool),
        rewards=torch.tensor([1.0, 1, 0, 0]),
        group=torch.zeros(4, dtype=torch.long),
    )
    objective = tepo.objective("reinforce", zero_variance="drop")
    prepared = objective.prepare(batch)
    mini = prepared.batch.take(torch.tensor([0, 1]))
    parts = objective.partial(mini, objective.statistics(mini))
    assert float(parts.loss) == pytest.approx(0.5)


@pytest.mark.parametrize("name", METHODS)
def test_verl_a_group_of_one_has_advantage_zero(name: str) -> None:
    objective = tepo.objective(name)
    batch = random_batch(0, fields=objective.needs.batch, groups=(1, 1, 1))
    out = objective(batch)
    assert out.metrics["advantage/max"] == out.metrics["advantage/min"] == 0
    assert out.metrics["group/zero_std"] == 1


@pytest.mark.parametrize("value", [1e10, float("-inf"), float("inf"), NAN])
@pytest.mark.parametrize("name", [entry.name for entry in tepo.objectives()])
def test_nemo_4120_swift_9767_masked_positions_reach_nothing(name: str, value: float) -> None:
    objective = tepo.objective(name)
    batch = random_batch(1, fields=objective.needs.batch, dtype=torch.float32)
    dirty = batch.replace(
        **{
            field: torch.where(batch.mask, tensor, torch.full_like(tensor, value))
            for field, tensor in batch.present()
            if tensor.is_floating_point() and tensor.shape == batch.mask.shape
        }
    )
    assert torch.equal(objective(dirty).loss, objective(batch).loss)
    assert torch.equal(tepo.credit(objective, dirty), tepo.credit(objective, batch))
    assert objective(dirty).metrics == objective(batch).metrics


def test_trl_3476_6369_truncated_responses_leave_the_denominator() -> None:
    """Lengths 3 (ended) and 5 (truncated, dropped): three tokens count, so the loss is the mean of three ones."""
    batch = losses_of([[1] * 3, [7] * 5]).replace(truncated=torch.tensor([False, True]))
    objective = tepo.objective("reinforce", truncated="drop")
    assert float(objective(batch).loss) == pytest.approx(1.0)
    assert float(objective.statistics(objective.prepare(batch).batch).denominators["policy"]) == 3
    assert float(tepo.objective("reinforce")(batch).loss) == pytest.approx((3 + 35) / 8)


def test_trl_3476_a_truncated_response_stays_in_its_groups_statistics() -> None:
    batch = TokenBatch(
        logp=torch.full((2, 1), -1.0, dtype=torch.float64),
        mask=torch.ones(2, 1, dtype=torch.bool),
        rewards=torch.tensor([1.0, 0.0]),
        group=torch.zeros(2, dtype=torch.long),
        truncated=torch.tensor([False, True]),
    )
    assert float(tepo.objective("reinforce", truncated="drop")(batch).loss) == pytest.approx(0.5)


@pytest.mark.parametrize(("denominator", "tokens"), [("selected", 1), ("all", 2)])
def test_a_row_filter_counts_the_same_tokens_for_every_term(denominator: Any, tokens: int) -> None:
    """Two responses of one token, the second truncated: losses 3 (and 5), entropies 2 (and 4)."""
    batch = losses_of([[3], [5]]).replace(
        truncated=torch.tensor([False, True]), entropy=torch.tensor([[2.0], [4.0]], dtype=torch.float64)
    )
    objective = Objective(
        "filtered",
        ratio=NoRatio(),
        surrogate=PolicyGradient(),
        selectors=(NotTruncated(denominator=denominator),),
        regularizers=(EntropyBonus(1.0),),
    )
    metrics = objective(batch).metrics
    assert metrics["loss/policy"] == pytest.approx(3 / tokens)
    assert metrics["loss/entropy_bonus"] == pytest.approx(-2 / tokens)


def test_openrlhf_1243_length_counts_the_tokens_of_a_mask_with_holes() -> None:
    mask = torch.tensor([[bit == "1" for bit in "000111100011111"]])
    assert TokenBatch(logp=torch.zeros(1, 15), mask=mask).lengths().tolist() == [9]


BERNOULLI = {"k1": 0.0, "k2": -0.34657, "k3": -0.30, "full": -0.34657}


@pytest.mark.parametrize(("estimator", "expected"), BERNOULLI.items())
def test_nemo_2506_expected_gradient_of_kl_estimators_in_the_loss(estimator: Any, expected: float) -> None:
    """p = 0.5 (logit 0), reference 0.8: dKL/dlogit = p (1-p) (0 - log 4) = -0.34657; k1 gives 0, k3 -0.30.

    Both outcomes have probability 1/2, so the token mean over the two is the expectation over samples.
    """
    logit = torch.zeros((), dtype=torch.float64, requires_grad=True)
    logp = torch.stack([torch.nn.functional.logsigmoid(logit), torch.nn.functional.logsigmoid(-logit)])
    reference = torch.tensor([0.8, 0.2], dtype=torch.float64).log()
    kl = (logp.exp() * (logp - reference)).sum()
    batch = TokenBatch(
        logp=logp[:, None],
        ref_logp=reference[:, None],
        kl_full=kl.expand(2, 1),
        mask=torch.ones(2, 1, dtype=torch.bool),
        advantage=torch.zeros(2, dtype=torch.float64),
    )
    loss = Objective("kl", regularizers=(KL(1.0, "reference", estimator),))(batch).loss
    assert float(torch.autograd.grad(loss, logit)[0]) == pytest.approx(expected, abs=5e-6)


def test_trl_6533_three_rewards_for_four_responses_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"rewards has shape \(3,\), expected \[B\] or \[B, K\], B=4"):
        TokenBatch(logp=torch.zeros(4, 2), mask=torch.ones(4, 2, dtype=torch.bool), rewards=torch.zeros(3))


def test_verl_7150_groups_are_any_integers() -> None:
    index, n = group_index(torch.tensor([2, 2, 5, 7, 5, 2]))
    assert (index.tolist(), n) == ([0, 0, 1, 2, 1, 0], 3)
    rewards = torch.tensor([1.0, 0, 1, 5, 0, 0.5], dtype=torch.float64)
    expected = GroupNormalized().of(rewards, torch.tensor([2, 2, 5, 7, 5, 2]))
    for other in ([-1, -1, 40, 0, 40, -1], [7, 7, 2, 5, 2, 7], [10**12, 10**12, -(10**12), 3, -(10**12), 10**12]):
        assert torch.equal(GroupNormalized().of(rewards, torch.tensor(other)), expected)


def test_the_entropy_bonus_has_the_gradient_of_the_dense_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 11, generator=generator, dtype=torch.float64).requires_grad_(True)
    mask = torch.rand(3, 5, generator=generator) > 0.3
    log_probs = logits.log_softmax(2)
    entropy = -(log_probs.exp() * log_probs).sum(2)
    batch = TokenBatch(
        logp=log_probs[..., 0], entropy=entropy, mask=mask, advantage=torch.zeros(3, dtype=torch.float64)
    )
    loss = tepo.objective("dapo", entropy_coef=0.3)(batch).loss
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(-0.3 * entropy[mask].mean(), logits)
    assert torch.allclose(gradient, expected, rtol=1e-12, atol=1e-15)
    # dH/dz_k = -p_k (log p_k + H)
    by_hand = 0.3 / int(mask.sum()) * log_probs.exp() * (log_probs + entropy[..., None])
    assert torch.allclose(gradient[mask], by_hand[mask], rtol=1e-10, atol=1e-14)
    assert tepo.objective("dapo", entropy_coef=0.3).needs.scores == {"entropy", "entropy_grad"}


def test_entropy_mechanism_1_an_absolute_penalty_at_ratio_one_pulls_nowhere() -> None:
    """|log r| has no derivative at r = 1; the subgradient 0 is taken, so on-policy the penalty does nothing."""
    batch = losses_of([[1, 2], [3]])
    penalised = Objective("abs", ratio=NoRatio(), surrogate=PolicyGradient(), regularizers=(KL(1.0, "old", "abs"),))
    assert torch.equal(tepo.credit(penalised, batch), tepo.credit(plain(TokenMean()), batch))


def test_the_name_of_the_deviation_says_which_convention_it_is() -> None:
    rewards, group = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64), torch.zeros(4, dtype=torch.long)
    sample = GroupNormalized(ddof=1, eps=0.0).of(rewards, group)
    assert sample.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-12)
    population = GroupNormalized(ddof=0, eps=0.0).of(rewards, group)
    assert population.tolist() == pytest.approx([1.7321, -0.5774, -0.5774, -0.5774], abs=5e-5)
    assert float(GroupNormalized(eps=1e-4).of(rewards, group)[0]) == pytest.approx(1.4997, abs=5e-6)  # TRL
    assert float(GroupNormalized().of(rewards, group)[0]) == pytest.approx(1.499997, abs=5e-7)  # verl, and ours


def one_group(rewards: torch.Tensor) -> TokenBatch:
    rows = rewards.shape[0]
    mask = torch.ones(rows, 1, dtype=torch.bool)
    return TokenBatch(logp=torch.zeros(rows, 1), mask=mask, rewards=rewards, group=torch.zeros(rows, dtype=torch.long))


def test_one_set_of_rewards_under_every_estimator() -> None:
    """Rewards 1, 0, 0, 1, 1, 0, 0, 0."""
    rewards = torch.tensor([1.0, 0, 0, 1, 1, 0, 0, 0], dtype=torch.float64)
    for name, high, low in [
        ("grpo", 1.207612, -0.724567),
        ("dr-grpo", 0.625, -0.375),
        ("rloo", 0.714286, -0.428571),
        ("reinforce", 0.625, -0.375),
    ]:
        advantage = tepo.objective(name).advantage(one_group(rewards))
        expected = [high if reward else low for reward in rewards.tolist()]
        assert advantage.tolist() == pytest.approx(expected, abs=6e-7), name
    trl = tepo.objective("grpo", advantage_eps=1e-4).advantage(one_group(rewards))
    assert trl[:2].tolist() == pytest.approx([1.207381, -0.724429], abs=6e-7)
