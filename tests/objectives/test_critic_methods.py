"""PPO with a critic, InstructGPT and Tulu 3: value and gradient equal an independent reference; the parts by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_checks import Options, assert_every_setting_is_tried, compare_defaults, compare_options
from reference_critic import METHODS, reference
from torch import Tensor

import tepo
from tepo.objectives import (
    AdaptiveCoefficient,
    ClippedReward,
    MissingEOS,
    TokenBatch,
    TokenKLPenalty,
    ValueLoss,
    Verified,
)
from tepo.testing import check_objective, evaluate

PPO: Options = {
    "clip_low": (0.2, 0.5),
    "clip_high": (0.2, 0.28),
    "clip_dual": (None, 1.2, 3.0),
    "gamma": (1.0, 0.9, 0.0),
    "lam": (0.95, 0.5, 1.0, 0.0),
    "whiten": (True, False),
    "value_clip": (0.2, 1.0, None),
    "value_coef": (0.1, 1.0),
}
OPTIONS: dict[str, Options] = {
    "ppo": PPO,
    "instructgpt": PPO
    | {"kl_coef": (0.02, 1.0, 0), "kl_adapt_to": (None, 0.1), "reward_clip": (None, 0.5), "ptx_coef": (0.0, 27.8)},
    "tulu3-rlvr": PPO | {"kl_coef": (0.05, 1.0, 0), "verified_reward": (10.0, 1.0), "missing_eos": (-10.0, -1.0, None)},
}
TOKEN_REWARDS = frozenset({"token_rewards"})


@pytest.mark.parametrize("more", [frozenset(), TOKEN_REWARDS], ids=["", "token rewards"])
@pytest.mark.parametrize("name", METHODS)
def test_defaults_equal_the_reference(name: str, more: frozenset[str]) -> None:
    compare_defaults(name, reference, more=more)


@pytest.mark.parametrize("more", [frozenset(), TOKEN_REWARDS], ids=["", "token rewards"])
@pytest.mark.parametrize("name", METHODS)
def test_options_equal_the_reference(name: str, more: frozenset[str]) -> None:
    compare_options(name, OPTIONS[name], reference, more=more)


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_is_tried(name: str) -> None:
    assert_every_setting_is_tried(name, OPTIONS)


@pytest.mark.parametrize("name", METHODS)
def test_the_invariance_matrix(name: str) -> None:
    check_objective(name)
    check_objective(name, whiten=False, value_clip=None, lam=1.0, entropy_coef=0.1)


def test_the_matrix_with_a_steered_coefficient_and_bounds() -> None:
    check_objective("instructgpt", kl_adapt_to=0.1, reward_clip=0.7)
    check_objective("tulu3-rlvr", missing_eos=None, truncated="drop")


@pytest.mark.parametrize("name", METHODS)
def test_extremes_stay_finite(name: str) -> None:
    mask = torch.ones(4, 3).bool()
    mask[3] = False
    wild = torch.tensor([[1000.0, 0.0, -1000.0], [-1000.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    batch = TokenBatch(
        logp=wild,
        old_logp=torch.zeros(4, 3),
        ref_logp=-wild,
        values=100 * wild,
        old_values=-100 * wild,
        entropy=torch.zeros(4, 3),
        mask=mask,
        rewards=torch.tensor([1.0, 1.0, float("nan"), 1.0]),
        correct=torch.tensor([True, True, False, True]),
        truncated=torch.tensor([False, True, False, False]),
        group=torch.tensor([0, 1, 2, 2]),
    )
    outcome = evaluate(tepo.objective(name), batch)
    assert bool(torch.isfinite(outcome.loss))
    assert all(bool(torch.isfinite(value).all()) for value in outcome.gradients.values())
    long = torch.full((1, 8192), -1.0)
    outcome = evaluate(
        tepo.objective(name),
        TokenBatch(
            logp=long + 0.02,
            old_logp=long,
            ref_logp=long - 0.1,
            values=torch.zeros(1, 8192),
            old_values=torch.zeros(1, 8192),
            mask=torch.ones(1, 8192).bool(),
            rewards=torch.ones(1),
            correct=torch.tensor([True]),
            truncated=torch.tensor([False]),
        ),
    )
    assert bool(torch.isfinite(outcome.loss))
    assert all(bool(torch.isfinite(value).all()) for value in outcome.gradients.values())


# --- the parts by hand --------------------------------------------------------------------------------------------


def two_tokens(**fields: Any) -> TokenBatch:
    rows = {name: torch.tensor([value], dtype=torch.float64) for name, value in fields.items() if name != "rewards"}
    batch = {"logp": torch.zeros(1, 2, dtype=torch.float64), "mask": torch.ones(1, 2).bool()}
    return TokenBatch(**{**batch, **rows, "rewards": torch.tensor([fields.get("rewards", 1.0)], dtype=torch.float64)})


def of(loss: ValueLoss, v: float, old: float, target: float) -> tuple[float, float]:
    """Value and derivative by v."""
    values = torch.tensor([[v, 0.0]], dtype=torch.float64, requires_grad=True)
    batch = two_tokens(old_values=[old, 0.0], returns=[target, 0.0]).replace(values=values)
    value = loss.values(batch, 20.0)[0, 0]
    (slope,) = torch.autograd.grad(value, values)
    return float(value.detach()), float(slope[0, 0])


@pytest.mark.parametrize(
    ("v", "old", "target", "value", "slope"),
    [
        (0.1, 0.0, 1.0, 0.405, -0.9),  # inside the clip
        (0.5, 0.0, 1.0, 0.32, 0.0),  # moved towards the target by more than 0.2: held
        (-0.5, 0.0, 1.0, 1.125, -1.5),  # moved away: pulled back
        (1.5, 0.0, 1.0, 0.32, 0.0),  # overshot, still nearer than where the clip ends: held
        (2.0, 0.0, 1.0, 0.5, 1.0),  # overshot by more: pulled back
    ],
)
def test_the_clipped_value_loss(v: float, old: float, target: float, value: float, slope: float) -> None:
    assert of(ValueLoss(clip=0.2), v, old, target) == pytest.approx((value, slope), abs=1e-12)
    assert of(ValueLoss(clip=None), v, old, target) == pytest.approx((0.5 * (v - target) ** 2, v - target))


def test_the_critic_s_target_comes_before_whitening() -> None:
    """gamma 1, lam 0.5, values (0.5, 0.2), reward 1: A = (-0.3 + 0.5 0.8, 0.8), R = A + V = (0.6, 1)."""
    batch = two_tokens(values=[0.5, 0.2], old_values=[0.5, 0.2])
    prepared = tepo.objective("ppo", lam=0.5).prepare(batch).batch
    assert prepared.returns is not None
    assert prepared.advantage is not None
    assert prepared.returns.tolist() == [pytest.approx([0.6, 1.0])]
    half = 0.7 / (0.49 + 0.49 + 1e-8) ** 0.5  # A - mean = -+0.35, sample variance 2 0.35^2
    assert prepared.advantage.tolist() == [pytest.approx([-half, half])]


def test_how_much_of_the_returns_the_critic_foresees() -> None:
    batch = two_tokens(values=[0.5, 0.2], old_values=[0.5, 0.2])
    out = tepo.objective("ppo", lam=0.5)(batch)
    # returns (0.6, 1): mean 0.8, 0.08 around it; errors (0.1, 0.8)
    assert out.metrics["value/explained"] == pytest.approx(1 - 0.65 / 0.08)
    assert out.metrics["value/return"] == pytest.approx(0.8)
    assert out.metrics["value/mean"] == pytest.approx(0.35)
    assert out.metrics["value/error"] == pytest.approx(0.325)
    assert out.metrics["loss/value"] == pytest.approx(0.1 * 0.1625)


def test_kl_in_the_reward_of_every_token() -> None:
    batch = two_tokens(old_logp=[-1.0, -2.0], ref_logp=[-1.5, -1.8], token_rewards=[0.1, 0.0])
    shaped = TokenKLPenalty(0.5)(batch)
    assert shaped.token_rewards is not None
    assert shaped.token_rewards.tolist() == [pytest.approx([0.1 - 0.25, 0.1])]
    assert shaped.rewards is batch.rewards


def test_the_controller_steers_the_coefficient_of_the_reward() -> None:
    method = tepo.objective("instructgpt", kl_coef=0.5, kl_adapt_to=0.1, whiten=False, lam=1.0)
    state = method.init_state()
    assert {name: float(value) for name, value in state.items()} == {"kl_coef": 0.5}
    state = method.update(state, {"kl/ref": 1.0})
    assert float(state["kl_coef"]) == pytest.approx(0.5 * 1.02)
    assert float(method.update(state, {})["kl_coef"]) == float(state["kl_coef"])
    batch = two_tokens(
        old_logp=[-1.0, -2.0], ref_logp=[-1.5, -2.0], old_values=[0.0, 0.0], values=[0.0, 0.0], rewards=2.0
    )
    prepared = method.prepare(batch, state).batch
    assert prepared.advantage is not None
    assert prepared.advantage.tolist() == [pytest.approx([2 - 0.51 * 0.5, 2])]
    assert TokenKLPenalty(0.5).init_state() == {}
    assert TokenKLPenalty(0.5).update({}, {"kl/ref": 1.0}) == {}
    fixed = TokenKLPenalty(0.5, AdaptiveCoefficient(0.1))
    assert fixed.tuned({"kl_coef": torch.tensor(0.25)}).coef == torch.tensor(0.25)


def shaped_rewards(part: Any, rewards: list[float], **flags: list[bool]) -> list[float]:
    n = len(rewards)
    fields: dict[str, Tensor] = {name: torch.tensor(value) for name, value in flags.items()}
    batch = TokenBatch(
        logp=torch.zeros(n, 1, dtype=torch.float64),
        mask=torch.ones(n, 1).bool(),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        **fields,
    )
    value: list[float] = part(batch).rewards.tolist()
    return value


def test_verdicts_missing_ends_and_bounds() -> None:
    nan = float("nan")
    verdicts = shaped_rewards(Verified(10.0), [1.0, 0.5, nan], correct=[True, False, False])
    assert verdicts == pytest.approx([10.0, 0.0, nan], nan_ok=True)
    cut = shaped_rewards(MissingEOS(-10.0), [1.0, 1.0, nan], truncated=[True, False, True])
    assert cut == pytest.approx([-10.0, 1.0, nan], nan_ok=True)
    assert shaped_rewards(MissingEOS(-1.0, "add"), [1.0, 1.0], truncated=[True, False]) == [0.0, 1.0]
    assert shaped_rewards(ClippedReward(2.0), [5.0, -7.0, 1.0]) == [2.0, -2.0, 1.0]


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("ppo", {"value_clip": 0.0}, "value_clip=0.0: expected a number > 0"),
        ("ppo", {"gamma": 1.5}, "gamma=1.5: expected a number from 0 to 1"),
        ("tulu3-rlvr", {"missing_eos": 1.0}, "missing_eos=1.0: expected a number <= 0"),
        ("instructgpt", {"reward_clip": 0.0}, "reward_clip=0.0: expected a number > 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(name: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(tepo.InputError, match=words):
        tepo.objective(name, **settings)


def test_needs() -> None:
    assert tepo.objective("ppo").needs.batch == {"rewards", "values", "old_values"}
    assert tepo.objective("ppo").needs.critic
    assert not tepo.objective("grpo").needs.critic
    needs = tepo.objective("tulu3-rlvr").needs
    assert needs.batch == {"rewards", "values", "old_values", "old_logp", "ref_logp", "correct", "truncated"}
    assert needs.old_logp
    assert needs.reference
    assert not tepo.objective("instructgpt", kl_coef=0).needs.reference
