"""What the methods that choose, weigh or reward single tokens become at their limits, and what they never do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tepo
from tepo.objectives import (
    EntropyBonus,
    GroupNormalized,
    NoRatio,
    Objective,
    PolicyGradient,
    PPOClip,
    SequenceMean,
    TokenBatch,
    TokenMean,
    Unclipped,
    objective,
)
from tepo.objectives.entropy_rewards import NoAdvantage
from tepo.testing import evaluate, random_batch

SEEDS = range(10)
FIELDS = ("entropy", "old_entropy", "ref_logp", "row_id", "token_ids", "correct", "truncated")
DAPO10 = objective("dapo", clip_dual=10.0)
GRPO = objective("grpo", kl_coef=0.0)
DAPO = objective("dapo")

# method at a limit of its settings, and what it is there
LIMITS: dict[str, tuple[Objective, Objective]] = {
    "lambda-grpo, lambda 0": (objective("lambda-grpo"), DAPO),
    "lambda-grpo, rho 0": (objective("lambda-grpo", length_preference=2.0, length_scale=0.0), DAPO),
    "steer, every weight 1": (objective("steer", weight_low=1.0), DAPO10),
    "steer, linear from 1 to 1": (
        objective("steer", weight_map="linear", weight_low=1.0, weight_high=1.0),
        DAPO10,
    ),
    "entropy-advantage, alpha 0": (objective("entropy-advantage", alpha=0.0), DAPO),
    "cw-grpo, a wide kernel": (objective("cw-grpo", bandwidth=1e9), GRPO),
    "high-entropy, every token": (objective("high-entropy", entropy_fraction=1.0), DAPO10),
    "high-entropy, every token above the quantile": (
        objective("high-entropy", entropy_fraction=1.0, rule="quantile", denominator="all"),
        DAPO10,
    ),
    "s-grpo, every token": (objective("s-grpo", probability=1.0), GRPO),
    "s-grpo, the first hundred": (objective("s-grpo", probability=0.0, always=100), GRPO),
    "erpo, no progress": (objective("erpo", progress=0.0), DAPO),
    "kl-cov without KL": (objective("kl-cov", kl_coef=0.0), Objective("is", surrogate=Unclipped())),
    "clip-cov, nothing in the band": (
        objective("clip-cov", covariance_low=90.0, covariance_high=99.0),
        objective("dapo", clip_low=1.0, clip_high=1.0),
    ),
    "dapo-overlong, responses far from the limit": (objective("dapo-overlong"), objective("dapo", truncated="drop")),
    "max-entropy, fixed, mean baseline": (
        objective("max-entropy", tuning="fixed", baseline="mean", temperature=0.5),
        Objective(
            "fixed",
            advantage=GroupNormalized("none"),
            surrogate=PPOClip(0.2, 0.28),
            regularizers=(EntropyBonus(0.5),),
        ),
    ),
}


def batch(seed: int, **settings: Any) -> TokenBatch:
    return random_batch(seed, fields=FIELDS, **settings)


def same(a: Tensor, b: Tensor, rtol: float = 1e-11) -> bool:
    return torch.allclose(a, b, rtol=rtol, atol=1e-13)


def gradients(method: Objective, given: TokenBatch) -> dict[str, Tensor]:
    found = evaluate(method, given)
    return {"loss": found.loss, **{name: found.gradients[name] for name in ("logp", "entropy")}}


@pytest.mark.parametrize("kind", ["plain", "first-update", "zero-variance", "empty-row"])
@pytest.mark.parametrize("name", LIMITS)
def test_limits(name: str, kind: Any) -> None:
    one, two = LIMITS[name]
    for seed in SEEDS:
        left, right = (gradients(method, batch(seed, kind=kind)) for method in (one, two))
        assert all(same(left[field], right[field]) for field in left), seed


def test_minimised_entropy_is_an_entropy_bonus_turned_round() -> None:
    parts = {"advantage": NoAdvantage(), "ratio": NoRatio(), "surrogate": PolicyGradient()}
    bonus = Objective("bonus", **parts, regularizers=(EntropyBonus(1.0),))
    for seed in SEEDS:
        left, right = (gradients(method, batch(seed)) for method in (objective("em-ft"), bonus))
        assert all(same(left[field], -right[field]) for field in left), seed


@pytest.mark.parametrize("lam", [-3.0, 0.5, 2.0])
def test_equal_lengths_have_equal_weights_whatever_lambda(lam: float) -> None:
    for seed in SEEDS:
        full = batch(seed)
        full = full.replace(mask=torch.ones_like(full.mask))
        preferring = objective("lambda-grpo", length_preference=lam)
        assert all(
            same(a, b)
            for a, b in zip(gradients(preferring, full).values(), gradients(DAPO, full).values(), strict=True)
        )
        assert float(evaluate(preferring, full).gradients["state lambda"]) == pytest.approx(0, abs=1e-12)


def test_lambda_moves_weight_between_responses_of_a_group_and_makes_none() -> None:
    for seed in SEEDS:
        given = batch(seed)
        method = objective("lambda-grpo", length_preference=1.5)
        part = method.row_weight
        f = part(part.prepare(given), method.init_state())[:, 0]
        for group in given.group.unique():
            inside = (given.group == group) & (given.lengths() > 0)
            assert float(f[inside].mean()) == pytest.approx(1)
            order = given.lengths()[inside].argsort()
            assert bool((f[inside][order].diff() >= -1e-6).all())  # longer is never lighter


def test_lambdas_gradient_is_the_central_difference_of_the_loss() -> None:
    method = objective("lambda-grpo", length_preference=0.7)
    for seed in SEEDS:
        given = batch(seed)
        slope = float(evaluate(method, given).gradients["state lambda"])
        step = 1e-5
        ends = [
            float(method(given, {"lambda": torch.tensor(0.7 + sign * step, dtype=torch.float64)}).loss)
            for sign in (1, -1)
        ]
        at = float(method(given, {"lambda": torch.tensor(0.7, dtype=torch.float64)}).loss)
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=1e-4, abs=1e-8 * (1 + abs(at)))


def test_a_scalar_that_no_part_keeps_cannot_be_learned() -> None:
    with pytest.raises(
        tepo.InputError, match=r"learnable names 'lamda', which no part keeps in its state\. Did you mean"
    ):
        Objective("typo", row_weight=objective("lambda-grpo").row_weight, learnable=("lamda",))
    assert objective("lambda-grpo", learn=False).learnable == ()


@pytest.mark.parametrize("name", ["clip-cov", "kl-cov", "cw-grpo", "steer", "high-entropy"])
def test_part_of_a_group_in_the_mini_batch_is_no_error(name: str) -> None:
    """Statistics are the mini-batch's; the advantage is the whole group's."""
    method = objective(name)
    prepared = method.prepare(batch(0)).batch
    for rows in (torch.arange(3), torch.arange(3, 7)):
        mini = prepared.take(rows)
        assert bool(torch.isfinite(method.partial(mini, method.statistics(mini)).loss))


def test_lambda_and_the_prefix_tree_know_the_whole_group_in_any_mini_batch() -> None:
    for name in ("lambda-grpo", "t-spmo"):
        method = objective(name) if name == "t-spmo" else objective(name, length_preference=2.0)
        given = batch(1)
        prepared = method.prepare(given).batch
        whole = method.statistics(prepared).advantage
        for row in range(7):
            mini = prepared.take(torch.tensor([row]))
            assert torch.equal(method.statistics(mini).advantage[0], whole[row])
            if name == "lambda-grpo":
                one, all_rows = (method.row_weight(each, method.init_state()) for each in (mini, prepared))
                assert float(one[0]) == pytest.approx(float(all_rows[row]), rel=1e-12)


@pytest.mark.parametrize("name", ["clip-cov", "kl-cov"])
def test_at_the_old_policy_they_have_the_plain_policy_gradient(name: str) -> None:
    """|D| has no gradient at 0; Clip-Cov's band is put where nothing is."""
    settings = {"covariance_low": 90.0, "covariance_high": 99.0} if name == "clip-cov" else {}
    for seed in SEEDS:
        first = batch(seed, kind="first-update")
        plain = Objective("pg", ratio=NoRatio(), surrogate=PolicyGradient())
        assert same(tepo.credit(objective(name, **settings), first), tepo.credit(plain, first))


def test_clip_covs_metric_says_what_was_let_go_of() -> None:
    """At a fraction of 1 the whole band goes; the denominator keeps it."""
    for seed in SEEDS:
        given = batch(seed)
        method = objective("clip-cov", clip_fraction=1.0, covariance_low=-9.0, covariance_high=0.0)
        prepared = method.prepare(given).batch
        statistics = method.statistics(prepared)
        assert float(statistics.denominators["policy"]) == int(given.mask.sum())
        left = statistics.weights["policy"] > 0
        assert 0 < int(left.sum()) < int(given.mask.sum())
        share = int(left.sum()) / int(given.mask.sum())
        assert method(given).metrics["mask/policy"] == pytest.approx(share)


def test_more_of_a_clip_covs_fraction_lets_go_of_more_of_the_same_draw() -> None:
    given = batch(3)
    chosen = []
    for fraction in (0.05, 0.2, 0.5):
        method = objective("clip-cov", clip_fraction=fraction, covariance_low=-9.0, covariance_high=9.0)
        prepared = method.prepare(given).batch
        chosen.append(method.statistics(prepared).weights["policy"] == 0)
    assert bool((~chosen[0] | chosen[1]).all())
    assert bool((~chosen[1] | chosen[2]).all())
    other = objective("clip-cov", clip_fraction=0.2, covariance_low=-9.0, covariance_high=9.0, seed=1)
    prepared = other.prepare(given).batch
    assert bool((other.statistics(prepared).weights["policy"] == 0).ne(chosen[1]).any())


def test_gtpo_without_a_bonus_has_nothing_to_say() -> None:
    """Class by class, a constant has no deviation: the one identity of the family that does not lead to DAPO."""
    for seed in SEEDS:
        for name in ("gtpo", "grpo-s"):
            assert not tepo.credit(objective(name, reward_bonus=0.0), batch(seed)).any()
        both = objective("gtpo", reward_bonus=0.0, normalize="group").prepare(batch(seed)).batch
        right = both.correct[:, None] & both.mask
        assert both.advantage is not None
        assert bool((both.advantage[right] >= 0).all())


def test_base_and_bonus_drop_out_of_gtpo_class_by_class() -> None:
    for seed in SEEDS:
        one, two = (
            tepo.credit(objective("gtpo", reward_base=base, reward_bonus=bonus), batch(seed))
            for base, bonus in ((1.0, 0.1), (7.0, 3.0))
        )
        assert same(one, two, rtol=1e-9)


def test_with_one_token_a_response_gtpo_is_grpo_s() -> None:
    for seed in SEEDS:
        short = batch(seed, kind="length-one")
        left, right = (gradients(objective(name), short) for name in ("gtpo", "grpo-s"))
        assert all(same(left[field], right[field], rtol=1e-9) for field in left)


def test_with_surprisal_for_entropy_the_two_em_rl_rewards_are_one() -> None:
    for seed in SEEDS:
        given = batch(seed)
        given = given.replace(old_entropy=-given.old_logp)
        assert same(*(tepo.credit(objective(name), given) for name in ("em-rl-sequence", "em-rl-token")))


def test_no_advantage_changes_its_sign_under_entropy_advantage_and_erpo() -> None:
    for seed in SEEDS:
        for name, settings in (("entropy-advantage", {"alpha": 9.0}), ("erpo", {"progress": 9.0})):
            given = batch(seed)
            before = DAPO.prepare(given).batch.advantage
            after = objective(name, **settings).prepare(given).batch.advantage
            assert before is not None
            assert after is not None
            assert bool((before * after >= 0).all())
            assert bool((after[before == 0] == 0).all())


def test_steer_weighs_down_what_changes_the_entropy_most() -> None:
    given = batch(2)
    method = objective("steer")
    prepared = method.prepare(given).batch
    weights = method.statistics(prepared).advantage[given.mask] / prepared.advantage[given.mask]
    assert float(weights.min()) == pytest.approx(0.8, abs=1e-12)
    assert float(weights.max()) <= 1


def test_a_wide_soft_baseline_is_the_mean_and_a_narrow_one_the_best() -> None:
    for seed in SEEDS:
        given = batch(seed)
        wide, mean, narrow = (
            objective("max-entropy", **settings).prepare(given).batch.advantage
            for settings in ({"baseline_temperature": 1e7}, {"baseline": "mean"}, {"baseline_temperature": 1e-4})
        )
        assert torch.allclose(wide, mean, atol=1e-6)
        assert float(narrow.max()) <= 1e-3
        assert bool((wide - narrow >= -1e-6).all())


def test_dropped_responses_have_no_say_in_the_statistics_of_the_rest() -> None:
    """A cut response with extreme values changes nothing beside its group's statistics, which are given here."""
    for name in ("clip-cov", "kl-cov", "steer", "cw-grpo", "high-entropy"):
        method = objective(name, truncated="drop")
        given = batch(4).replace(advantage=torch.linspace(-1, 1, 7, dtype=torch.float64))
        given = given.replace(truncated=torch.arange(7) == 2)
        extreme = {
            field: torch.where(torch.arange(7)[:, None] == 2, 5 * value, value)
            for field, value in given.present()
            if field in ("logp", "entropy")
        }
        one, two = evaluate(method, given), evaluate(method, given.replace(**extreme))
        assert float(one.loss) == float(two.loss), name
        assert torch.equal(one.gradients["logp"], two.gradients["logp"])


@pytest.mark.parametrize("reducer", [TokenMean(), SequenceMean()], ids=["token-mean", "sequence-mean"])
def test_parts_compose_with_any_other(reducer: Any) -> None:
    """A few crossings that no paper has pass the whole matrix."""
    from tepo.objectives.entropies import TopEntropy
    from tepo.objectives.row_weights import LengthPreference
    from tepo.objectives.selectors import RandomTokens
    from tepo.testing import check_objective

    crossed = Objective(
        "crossed",
        transforms=objective("cw-grpo").transforms,
        selectors=(RandomTokens(0.8), TopEntropy(0.5)),
        regularizers=objective("kl-cov").regularizers,
        row_weight=LengthPreference(0.5),
        reducer=reducer,
        learnable=("lambda",),
    )
    check_objective(crossed, kinds=("plain", "empty-row"))
