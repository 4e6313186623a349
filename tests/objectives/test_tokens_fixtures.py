"""Hand-computed values of the methods that choose, weigh or reward single tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_fixtures import first_batch, in_mask, mask_of, padded
from torch import Tensor

import tepo
from tepo.objectives import TokenBatch
from tepo.objectives.batch import clean
from tepo.objectives.covariance import CovarianceKernel, TopCovariance, token_covariance
from tepo.objectives.entropies import EntropyChangeWeights, TopEntropy, quantile
from tepo.objectives.entropy_rewards import ClassNormalized, ConfidenceReward, EntropySharedRewards
from tepo.objectives.max_entropy import DualAscent, SoftBaseline, Steps
from tepo.objectives.row_weights import LengthPreference
from tepo.objectives.shaping import SoftOverlong
from tepo.objectives.trie import PrefixAdvantage, UniquePrefixes
from tepo.testing import random_batch

SIX_DIGITS = {"abs": 6e-7}
CLIPS = {"clip_low": 0.2, "clip_high": 0.28}


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture
def first() -> TokenBatch:
    """The first fixture of `test_fixtures`, as one group."""
    return first_batch().replace(group=torch.tensor([4, 4, 4]), row_id=torch.tensor([20, 10, 30]))


FIRST: list[tuple[str, dict[str, Any], float]] = [
    ("kl-cov", {"kl_coef": 0}, -0.119966),
    ("kl-cov", {"kl_fraction": 1 / 8}, -0.069966),  # one token of the eight
    ("kl-cov", {}, -0.069966),  # never fewer than one
    ("kl-cov", {"kl_fraction": 1.0}, -0.119966 + 0.2875),  # every token: the mean of |D|
    ("steer", CLIPS | {"clip_dual": 3.0}, 0.021487),
    ("high-entropy", CLIPS | {"clip_dual": 3.0}, -0.24),
    ("high-entropy", CLIPS | {"clip_dual": 3.0, "denominator": "all"}, -0.06),
    # Entropies sorted: .2 .3 .4 .5 .9 1 1.2 1.6; the 0.8 quantile is at place 5.6, 1 + 0.6 * 0.2 = 1.12
    ("high-entropy", CLIPS | {"clip_dual": 3.0, "rule": "quantile", "denominator": "all"}, -0.06),
    ("high-entropy", CLIPS | {"clip_dual": 3.0, "entropy_fraction": 1.0}, 0.018803),
    ("lambda-grpo", CLIPS | {"clip_dual": 3.0}, 0.018803),
    ("lambda-grpo", CLIPS | {"clip_dual": 3.0, "length_preference": 1.0}, 0.082667),
    ("lambda-grpo", CLIPS | {"clip_dual": 3.0, "length_preference": -1.0}, -0.036429),
    ("dapo-overlong", CLIPS | {"clip_dual": 3.0, "truncated": "keep"}, 0.018803),
    # min(0.4 H, |A| / 2): .36 .16 .5 / .12 .48 .2 .4 / .08, so A' = 1.36 1.16 1.5 / -.88 -.52 -.8 -.6 / .58; with
    # current entropies the third would be min(.64, .5) too. Old: .4 .16 .5 / .12 .44 .24 .4 / .12
    # losses 1.4*1.221403=1.709964, 1.16*.904837=1.049611, 1.5*1.28=1.92 / .88*.904837=.796257, .56*.8=.448, .76,
    # .6*1.491825=.895095 / .62*1.28=.7936
    ("entropy-advantage", {}, (-1.709964 - 1.049611 - 1.92 + 0.796257 + 0.448 + 0.76 + 0.895095 - 0.7936) / 8),
    # 1.36*1.221403=1.661108, 1.049611, 1.92 / .796257, .52*.8=.416, .8, .895095 / .58*1.28=.7424
    (
        "entropy-advantage",
        {"entropy": "current"},
        (-1.661108 - 1.049611 - 1.92 + 0.796257 + 0.416 + 0.8 + 0.895095 - 0.7424) / 8,
    ),
    ("em-ft", {}, 6.1 / 8),
    ("em-ft", {"reducer": "sequence-mean"}, (2.9 / 3 + 3.0 / 4 + 0.2) / 3),
    ("em-ft", {"reducer": "sequence-sum"}, 6.1 / 3),
    # PPO with 0.2/0.28 and no dual clip is 0.018803; less alpha times the mean entropy, alpha held in float32
    ("max-entropy", {"temperature": 0.5}, 0.018803 - 0.5 * 6.1 / 8),
    ("max-entropy", {"temperature": 0.5, "tuning": "steps"}, 0.018803),  # no bonus before a first measurement
]


@pytest.mark.parametrize(("name", "settings", "loss"), FIRST, ids=str)
def test_loss_of_the_first_fixture(first: TokenBatch, name: str, settings: dict[str, Any], loss: float) -> None:
    truncated = first.replace(truncated=torch.zeros(3, dtype=torch.bool))
    assert float(tepo.objective(name, **settings)(truncated).loss) == pytest.approx(loss, abs=1.2e-6)


def test_covariance_of_the_first_fixture(first: TokenBatch) -> None:
    view = clean(first)
    # mean log pi = -6.1 / 8 = -0.7625, mean A = -0.5 / 8 = -0.0625
    centred = [-0.0375, 0.1625, -0.4375, 0.4625, -1.1375, 0.0625, 0.2625, 0.6625]
    a = [1.0625] * 3 + [-0.9375] * 4 + [0.5625]
    assert in_mask(token_covariance(view), first) == pytest.approx([x * y for x, y in zip(centred, a, strict=True)])
    chosen = TopCovariance(1 / 8)(view)
    assert chosen.nonzero().tolist() == [[1, 1]]  # 1.066406
    assert tepo.objective("kl-cov")(first).metrics["mask/kl"] == 1 / 8


def test_clip_cov_lets_go_of_what_is_in_its_band(first: TokenBatch) -> None:
    """Only row 2, token 2 has 1 < c < 5. At clips of 0.2/0.28 PPO holds it already, and nothing is let go of."""
    loss = (-1.221403 - 0.904837 - 2.225541 + 0.904837 + 0.0 + 1.0 + 1.491825 - 0.674929) / 8
    wide = tepo.objective("clip-cov", clip_high=2.0)(first)
    assert float(wide.loss) == pytest.approx(loss, abs=1e-6)
    assert wide.metrics["mask/policy"] == 7 / 8
    assert tepo.objective("clip-cov", **CLIPS)(first).metrics["mask/policy"] == 1


def test_weights_of_the_first_fixture(first: TokenBatch) -> None:
    view = clean(first)
    steer = EntropyChangeWeights("exponential", 0.8).weights(view)
    expected = [0.976163, 0.971137, 0.8, 1.0, 0.866635, 0.964529, 0.900076, 0.997699]
    assert in_mask(steer, first) == pytest.approx(expected, **SIX_DIGITS)
    # The linear map runs through the same |Omega| = -ln w / k, from 1.2 at 0 to 0.8 at the largest.
    linear = [1.2 - 0.4 * math.log(w) / math.log(0.8) for w in expected]
    assert in_mask(EntropyChangeWeights("linear", 0.8, 1.2).weights(view), first) == pytest.approx(linear, abs=1e-5)
    kernel = CovarianceKernel().weights(view)
    expected = [1.359673, 1.275132, 0.834741, 0.889788, 0.102711, 1.353976, 1.188987, 0.994992]
    assert in_mask(kernel, first) == pytest.approx(expected, **SIX_DIGITS)
    assert sum(expected) == pytest.approx(8, abs=1e-5)


@pytest.mark.parametrize(
    ("lam", "expected"),
    [(0.0, [1.0, 1.0, 1.0]), (1.0, [1.0239, 1.119303, 0.856796]), (-1.0, [0.952106, 0.881253, 1.166641])],
)
def test_length_preference_of_the_first_fixture(first: TokenBatch, lam: float, expected: list[float]) -> None:
    part = LengthPreference(lam)
    weights = part(part.prepare(first), part.init_state())
    assert weights[:, 0].tolist() == pytest.approx(expected, abs=2e-6)


# --- counts, ties and quantiles --------------------------------------------------------------------------------------


def flat_entropies(*rows: list[float], row_id: list[int]) -> TokenBatch:
    entropy = padded(*rows)
    mask = mask_of(*map(len, rows))
    logp = -torch.ones_like(entropy)
    ids = torch.tensor(row_id)
    return clean(TokenBatch(logp=logp, mask=mask, entropy=entropy, row_id=ids, advantage=torch.ones_like(logp)))


@pytest.mark.parametrize(("fraction", "count"), [(0.2, 2), (0.21, 3), (0.01, 1), (0.3, 3), (1.0, 10)])
def test_top_k_is_exact(fraction: float, count: int) -> None:
    batch = flat_entropies([0.5] * 5, [0.5] * 5, row_id=[1, 2])
    assert int(TopEntropy(fraction)(batch).sum()) == count
    assert int(TopEntropy(fraction, "quantile")(batch).sum()) == 10  # ties are all kept


def test_ties_go_to_the_smaller_row_id_then_to_the_earlier_token() -> None:
    batch = flat_entropies([0.5, 0.5, 0.9], [0.5, 0.5, 0.1], row_id=[7, 3])
    assert TopEntropy(0.5)(batch).tolist() == [[False, False, True], [True, True, False]]
    turned = batch.take(torch.tensor([1, 0]))
    assert TopEntropy(0.5)(turned).tolist() == [[True, True, False], [False, False, True]]


@pytest.mark.parametrize("q", [0.0, 0.1, 0.25, 0.5, 0.8, 0.99, 1.0])
def test_quantile_is_torchs(q: float) -> None:
    for n in (1, 2, 5, 8, 101):
        values = torch.rand(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
        assert float(quantile(values, q)) == pytest.approx(float(torch.quantile(values, q)), rel=1e-14)


def test_a_draw_is_the_same_wherever_the_token_lies() -> None:
    """Row 5 among others, alone, padded, and with a hole that is no token."""
    ids = torch.tensor([3, 5, 8])
    mask = torch.ones(3, 6, dtype=torch.bool)
    objective = tepo.objective("s-grpo", probability=0.5, seed=11)
    batch = TokenBatch(logp=-torch.ones(3, 6), mask=mask, row_id=ids, advantage=torch.ones(3))
    chosen = objective.selectors[0](batch)[1].tolist()
    alone = batch.take(torch.tensor([1]))
    assert objective.selectors[0](alone)[0].tolist() == chosen
    holed = TokenBatch(
        logp=-torch.ones(1, 9),
        mask=torch.tensor([[False, True, True, False, True, True, True, True, False]]),
        row_id=torch.tensor([5]),
    )
    assert objective.selectors[0](holed)[holed.mask].tolist() == chosen
    other = tepo.objective("s-grpo", probability=0.5, seed=12)
    assert any(other.selectors[0](batch.replace(row_id=ids + k))[1].tolist() != chosen for k in range(3))


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.4, 0.9, 1.0])
def test_the_share_drawn_is_the_probability(probability: float) -> None:
    mask = torch.ones(200, 200, dtype=torch.bool)
    batch = TokenBatch(logp=-torch.ones(200, 200), mask=mask, row_id=torch.arange(200) * 2**20)
    drawn = tepo.objective("s-grpo", probability=probability).selectors[0](batch).float()
    spread = 5 * math.sqrt(probability * (1 - probability) / 40000)
    assert float(drawn.mean()) == pytest.approx(probability, abs=spread + 1e-9)
    # Neither along the rows nor along the columns does a draw say anything about its neighbour.
    for one, two in ((drawn[:, 1:], drawn[:, :-1]), (drawn[1:], drawn[:-1])):
        assert float((one * two).mean()) == pytest.approx(probability**2, abs=5 / 200 * probability)


def test_the_first_tokens_always_and_never_more_than_the_limit() -> None:
    mask = torch.tensor([[True] * 10, [True] * 3 + [False] * 7])
    batch = TokenBatch(logp=-torch.ones(2, 10), mask=mask, row_id=torch.tensor([1, 2]))
    drawn = tepo.objective("s-grpo", probability=0.0, always=2).selectors[0](batch)
    assert drawn.sum(dim=1).tolist() == [2, 2]
    assert drawn[:, :2].all()
    assert tepo.objective("s-grpo", probability=1.0, most=4).selectors[0](batch).sum(dim=1).tolist() == [4, 3]


# --- rewards ---------------------------------------------------------------------------------------------------------


def test_entropy_shared_rewards_by_hand() -> None:
    """Right: lengths 2 and 1, old entropies (0.6, 0.3) and (0.2). Wrong: (0.5) and (0.25, 1.0)."""
    entropy = padded([0.6, 0.3], [0.2], [0.5], [0.25, 1.0])
    batch = clean(
        TokenBatch(
            logp=-torch.ones_like(entropy),
            old_logp=-torch.ones_like(entropy),
            old_entropy=entropy,
            mask=mask_of(2, 1, 1, 2),
            group=torch.tensor([9, 9, 9, 9]),
            correct=torch.tensor([True, True, False, False]),
        )
    )
    # place 1: right 2 * .6/.8 = 1.5 and .5; wrong 1/H = 2 and 4, 2 * 2/6 = 2/3 and 4/3; place 2: alone, so 1
    rewards = EntropySharedRewards("token", 1.0, 0.1)(batch).token_rewards
    assert in_mask(rewards, batch) == pytest.approx([1.15, 1.1, 1.05, -1 - 0.2 / 3, -1 - 0.4 / 3, -1.1])
    advantage = ClassNormalized("token")(EntropySharedRewards("token", 1.0, 0.1)(batch))
    # right: 1.15 1.1 1.05, deviation .05 sqrt(2/3); wrong: mean -1.1, differences 1/30, -1/30, 0
    half = math.sqrt(3 / 2)
    assert in_mask(advantage, batch) == pytest.approx([half, 0, -half, half, -half, 0], abs=1e-12)
    # mean entropies .45 .2 | .5 .625: right 2 * .45/.65, 2 * .2/.65; wrong 1/H = 2, 1.6: 2 * 2/3.6, 2 * 1.6/3.6
    rewards = EntropySharedRewards("sequence", 1.0, 0.1)(batch).rewards
    assert rewards.tolist() == pytest.approx([1 + 0.09 / 0.65, 1 + 0.04 / 0.65, -1 - 0.4 / 3.6, -1 - 0.32 / 3.6])
    assert ClassNormalized("sequence")(batch.replace(rewards=rewards)).tolist() == pytest.approx([1, -1, -1, 1])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_common_constant_drops_out_within_a_class_and_counts_within_a_group(level: Any) -> None:
    batch = clean(random_batch(5, fields={"old_entropy", "entropy", "correct"}))
    for over in ("class", "group"):
        one, two = (ClassNormalized(level, over)(EntropySharedRewards(level, base, 0.1)(batch)) for base in (0.0, 1.0))
        assert torch.allclose(one, two, atol=1e-9) == (over == "class")


def test_confidence_rewards_are_sums_over_the_response(first: TokenBatch) -> None:
    view = clean(first.replace(mask=mask_of(3, 4, 0) & first.mask))
    rewards = ConfidenceReward("sequence")(view).rewards
    assert rewards[:2].tolist() == pytest.approx([-3.5, -3.3])
    assert math.isnan(float(rewards[2]))
    assert ConfidenceReward("token")(view).rewards[:2].tolist() == pytest.approx([-3.1, -3.0])


def test_em_rl_looks_at_no_reward(first: TokenBatch) -> None:
    """A = leave-one-out of -3.5, -3.3, -0.4; J = mean of A_i sum log pi: sums -2.6, -3.4, -0.1."""
    batch = first.replace(advantage=None)
    a = [-3.5 - (-3.3 - 0.4) / 2, -3.3 - (-3.5 - 0.4) / 2, -0.4 - (-3.5 - 3.3) / 2]
    loss = -sum(x * y for x, y in zip(a, (-2.6, -3.4, -0.1), strict=True)) / 3
    objective = tepo.objective("em-rl-sequence", kl_coef=0)
    assert "rewards" not in objective.needs.batch
    for rewards in (None, doubles(1, 0, 1), doubles(0, 0, 0)):
        out = objective(batch.replace(rewards=rewards))
        assert float(out.loss) == pytest.approx(loss)
        assert out.metrics["group/zero_std"] == 0
    # Groups that the task's reward finds equal are not dropped: the method's own rewards differ.
    dropping = tepo.objective("em-rl-sequence", kl_coef=0, zero_variance="drop")
    assert float(dropping(batch.replace(rewards=doubles(0, 0, 0))).loss) == pytest.approx(loss)


@pytest.mark.parametrize(
    ("length", "punishment"), [(0, 0), (16383, 0), (16384, 0), (16385, 1 / 4096), (18432, 0.5), (20480, 1), (21000, 1)]
)
def test_soft_overlong_punishment(length: int, punishment: float) -> None:
    """DAPO eq. 13 with 16384 + 4096 tokens."""
    mask = torch.arange(21000)[None] < length
    batch = TokenBatch(logp=torch.zeros(1, 21000), mask=mask, rewards=torch.tensor([0.25]))
    assert float(SoftOverlong(20480, 4096)(batch).rewards) == pytest.approx(0.25 - punishment)
    assert float(SoftOverlong(20480, 4096, 0.5)(batch).rewards) == pytest.approx(0.25 - punishment / 2)


def test_the_punishment_enters_the_advantage_but_not_the_judgement_of_groups() -> None:
    mask = mask_of(2, 4, 3, 3)
    batch = TokenBatch(
        logp=-torch.ones(4, 4, dtype=torch.float64),
        mask=mask,
        rewards=doubles(1, 1, 1, 0),
        group=torch.tensor([0, 0, 1, 1]),
        truncated=torch.tensor([False, True, False, False]),
    )
    objective = tepo.objective("dapo-overlong", overlong_length=4, overlong_cache=2, truncated="keep")
    prepared = objective.prepare(batch)
    assert prepared.metrics.values()["group/zero_std"] == 0.5  # both right: no signal for dynamic sampling
    advantage = prepared.batch.advantage
    assert advantage is not None
    assert advantage[:, 0].tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)] * 2, abs=1e-5)
    dropped = tepo.objective("dapo-overlong", overlong_length=4, overlong_cache=2)(batch)
    assert dropped.metrics["mask/policy"] == 8 / 12  # the cut response leaves the loss, after its say in the group


# --- the prefix tree -------------------------------------------------------------------------------------------------


def forest(words: list[str], rewards: list[float], group: list[int] | None = None, **fields: Any) -> TokenBatch:
    """Responses as strings, one token a letter."""
    width = max(map(len, words))
    ids = torch.tensor([[ord(c) for c in word.ljust(width)] for word in words])
    return clean(
        TokenBatch(
            logp=-torch.ones(len(words), width, dtype=torch.float64),
            mask=mask_of(*map(len, words)),
            token_ids=ids,
            rewards=doubles(*rewards),
            group=torch.tensor(group or [0] * len(words)),
            row_id=torch.arange(len(words)) * 5,
            **fields,
        )
    )


def test_credit_is_where_the_responses_part() -> None:
    """abc 1, abd 0, axy 1, abc 0: after a (mean 1/2): b 1/3 or x 1; after ab: c 1/2 or d 0; x is alone from there."""
    batch = forest(["abc", "abd", "axy", "abc"], [1, 0, 1, 0])
    expected = [
        [0, 1 / 3 - 1 / 2, 1 / 2 - 1 / 3],
        [0, 1 / 3 - 1 / 2, 0 - 1 / 3],
        [0, 1 - 1 / 2, 0],
        [0, 1 / 3 - 1 / 2, 1 / 2 - 1 / 3],
    ]
    advantage = PrefixAdvantage()(batch)
    assert torch.allclose(advantage, torch.tensor(expected, dtype=torch.float64))
    chosen = UniquePrefixes()(batch.replace(advantage=advantage))
    # (a, b) once, by row 1; (ab, c) once, by row 1; (ab, d); (a, x)
    assert chosen.nonzero().tolist() == [[0, 1], [0, 2], [1, 2], [2, 1]]
    loss = tepo.objective("t-spmo")(batch.replace(advantage=None)).loss
    assert float(loss) == pytest.approx(-(-1 / 6 + 1 / 6 - 1 / 3 + 1 / 2) / 4)


def test_groups_are_trees_of_their_own_and_a_response_may_end_inside_another() -> None:
    batch = forest(["a", "ab", "a", "b"], [1, 0, 1, 0], group=[0, 0, 1, 1])
    # group 0: both begin with a: no branch; after a: E = 1/2 (one ends there), with b: 0
    assert PrefixAdvantage()(batch).tolist() == [[0, 0], [0, -0.5], [0.5, 0], [-0.5, 0]]


def test_an_unscored_response_is_in_no_mean_and_stands_for_nobody() -> None:
    batch = forest(["ab", "ab", "ac"], [math.nan, 1, 0])
    advantage = PrefixAdvantage()(batch)
    assert advantage.tolist() == [[0, 0], [0, 0.5], [0, -0.5]]
    assert UniquePrefixes()(batch.replace(advantage=advantage)).nonzero().tolist() == [[1, 1], [2, 1]]


def test_equal_responses_and_equal_rewards_have_no_credit() -> None:
    for words, rewards in ((["abc"] * 3, [1, 0, 1]), (["abc", "abd", "x"], [0.1, 0.1, 0.1])):
        batch = forest(words, rewards)
        assert not PrefixAdvantage()(batch).any()
        out = tepo.objective("t-spmo")(batch.replace(advantage=None))
        assert float(out.loss) == 0
        assert out.metrics["mask/policy"] == 0


# --- maximum entropy -------------------------------------------------------------------------------------------------


def test_soft_value_by_hand() -> None:
    """tau 0.5, rewards 1, 0, 0: V = 0.5 log((e^2 + 2) / 3) = 0.5 log 3.129685; unscored responses have no say."""
    value = 0.5 * math.log((math.exp(2) + 2) / 3)
    batch = TokenBatch(
        logp=-torch.ones(5, 1, dtype=torch.float64),
        mask=torch.ones(5, 1, dtype=torch.bool),
        rewards=doubles(1, 0, math.nan, 0, 7),
        group=torch.tensor([1, 1, 1, 1, 2]),
    )
    assert SoftBaseline(0.5)(batch).tolist() == pytest.approx([1 - value, -value, 0, -value, 0])
    # Rewards in the thousands neither overflow nor lose the differences.
    large = batch.replace(rewards=batch.rewards + 5000)
    assert SoftBaseline(0.5)(large).tolist() == pytest.approx([1 - value, -value, 0, -value, 0])
    best = SoftBaseline(1e-3)(batch).tolist()
    assert best == pytest.approx([1e-3 * math.log(3), -1 + 1e-3 * math.log(3), 0, -1 + 1e-3 * math.log(3), 0])


def test_the_temperature_follows_the_entropy() -> None:
    alpha = torch.tensor(0.01, dtype=torch.float64)
    dual = DualAscent(target=0.5, rate=0.1, highest=0.2)
    assert float(dual(alpha, 0.3)) == pytest.approx(0.01 * math.exp(0.02))
    assert float(dual(alpha, 1.5)) == pytest.approx(0.01 * math.exp(-0.1))
    assert float(dual(alpha, -1e4)) == 0.2
    assert float(dual(alpha, 1e6)) == pytest.approx(1e-8)
    steps = Steps(target=0.5, rate=0.005, highest=0.2)
    assert [float(steps(alpha, h)) for h in (0.4, 0.5, 0.6)] == pytest.approx([0.015, 0.015, 0.005])
    assert float(steps(torch.tensor(0.003), 0.6)) == 0
    assert float(steps(torch.tensor(0.199), 0.1)) == pytest.approx(0.2)
    assert [float(steps.applies(torch.tensor(h))) for h in (0.4, 0.5, 0.6, math.inf)] == [1, 1, 0, 0]


def test_the_temperature_is_tuned_by_the_last_update(first: TokenBatch) -> None:
    """Mean entropy 0.7625 against a target of 1: alpha rises; steps begin to act after a first measurement."""
    dual = tepo.objective("max-entropy", temperature=0.01, target_entropy=1.0, temperature_rate=0.1)
    state = dual.update(dual.init_state(), dual(first).metrics)
    assert float(state["temperature"]) == pytest.approx(0.01 * math.exp(0.1 * 0.2375), rel=1e-6)
    assert float(dual(first, state).metrics["loss/max_entropy"]) == pytest.approx(
        -0.7625 * float(state["temperature"]), rel=1e-6
    )
    steps = tepo.objective("max-entropy", tuning="steps", temperature=0.01, target_entropy=1.0, temperature_rate=0.005)
    before = steps(first).metrics
    assert before["loss/max_entropy"] == 0
    state = steps.update(steps.init_state(), before)
    assert steps(first, state).metrics["loss/max_entropy"] == pytest.approx(-0.7625 * 0.015, rel=1e-6)
    fixed = tepo.objective("max-entropy", tuning="fixed", temperature=0.01)
    state = fixed.update(fixed.init_state(), fixed(first).metrics)
    assert float(state["temperature"]) == pytest.approx(0.01)
    assert fixed.update(state, {})["temperature"] == state["temperature"]
