"""Extremes: huge log-ratios, long responses, degenerate batches, narrow types; and what never changes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tepo
from tepo.objectives import GroupNormalized, LeaveOneOut, Objective, TokenBatch
from tepo.testing import evaluate, random_batch

NAMES = [entry.name for entry in tepo.objectives()]
EVERYTHING: dict[str, Any] = {
    "truncated": "drop",
    "zero_variance": "drop",
    "entropy_coef": 0.01,
    "importance_weight": "sequence-mask",
}


def assert_finite(objective: Objective, batch: TokenBatch) -> None:
    outcome = evaluate(objective, batch)
    assert bool(torch.isfinite(outcome.loss))
    assert all(bool(torch.isfinite(gradient).all()) for gradient in outcome.gradients.values())
    assert all(math.isfinite(value) for value in outcome.metrics.values()), outcome.metrics


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1000.0, -1000.0])
@pytest.mark.parametrize("name", NAMES)
def test_a_log_ratio_of_a_thousand_is_finite(name: str, size: float, dtype: torch.dtype) -> None:
    objective = tepo.objective(name)
    for seed in range(4):
        batch = random_batch(seed, fields=objective.needs.batch, dtype=dtype)
        row, column = batch.mask.nonzero()[seed].tolist()
        logp, ref = batch.logp.clone(), None if batch.ref_logp is None else batch.ref_logp.clone()
        logp[row, column] = batch.old_logp[row, column] + size
        assert_finite(objective, batch.replace(logp=logp, ref_logp=ref))


@pytest.mark.parametrize("size", [1000.0, -1000.0])
@pytest.mark.parametrize("name", ["dapo", "gspo", "gspo-token", "tepo-markov", "tepo"])
def test_beyond_the_clamp_there_is_no_gradient(name: str, size: float) -> None:
    """One token's log-ratio is beyond; a sequence ratio takes its whole (short) row along."""
    settings = {"clip_low": 1.0, "clip_high": 1e12, **({"kl_estimator": "k1"} if name == "tepo" else {})}
    batch = random_batch(0, fields={"entropy", "old_entropy"}, kind="token-advantages")
    row, column = batch.mask.nonzero()[0].tolist()
    logp = batch.logp.clone()
    logp[row, column] = batch.old_logp[row, column] + size
    credit = tepo.credit(tepo.objective(name, **settings), batch.replace(logp=logp))
    assert float(credit[row, column]) == 0
    assert float(credit[torch.arange(7) != row].abs().max()) > 0


@pytest.mark.parametrize("drift", [0.02, -0.02])
@pytest.mark.parametrize("name", [*NAMES, "rloo-sum"])
def test_responses_of_8192_tokens_are_finite(name: str, drift: float) -> None:
    """exp(8192 * 0.02) = exp(164) overflows float32; the clamp holds it."""
    objective = (
        tepo.objective("rloo", ratio="sequence-sum", kl_coef=0.03) if name == "rloo-sum" else tepo.objective(name)
    )
    shape = (2, 8192)
    batch = TokenBatch(
        logp=torch.full(shape, -1.0) + drift,
        old_logp=torch.full(shape, -1.0),
        ref_logp=torch.full(shape, -1.1),
        entropy=torch.full(shape, 0.9),
        old_entropy=torch.full(shape, 1.0),
        other_logp=torch.full(shape, -0.9),
        values=torch.full(shape, 0.1),
        old_values=torch.full(shape, 0.2),
        mask=torch.ones(shape, dtype=torch.bool),
        rewards=torch.tensor([1.0, 0.0]),
        correct=torch.tensor([True, False]),
        truncated=torch.tensor([False, False]),
        group=torch.zeros(2, dtype=torch.long),
        row_id=torch.arange(2),
        token_ids=torch.arange(2 * 8192).view(shape) // 8000,
    )
    assert_finite(objective, batch)


def test_the_sequence_mean_of_8192_terms_decides_a_fine_clip_rightly() -> None:
    """A mean log-ratio just inside and just outside of log(1 + 4e-4), summed in float32."""
    border = math.log1p(4e-4)
    for offset, clipped in ((-2e-6, 0.0), (2e-6, 1.0)):
        logp = torch.full((1, 8192), -1.0) + (border + offset)
        old = torch.full((1, 8192), -1.0)
        batch = TokenBatch(logp=logp, old_logp=old, mask=torch.ones(1, 8192, dtype=torch.bool), advantage=torch.ones(1))
        assert tepo.objective("gspo")(batch).metrics["clip/high"] == clipped


@pytest.mark.parametrize("settings", [{}, EVERYTHING], ids=["default", "everything"])
@pytest.mark.parametrize("name", NAMES)
def test_degenerate_batches_are_finite(name: str, settings: dict[str, Any]) -> None:
    objective = tepo.objective(name, **settings)
    fields = objective.needs.batch
    batch = random_batch(0, fields=fields, dtype=torch.float32)
    empty_rows = batch.take(torch.tensor([], dtype=torch.long))
    no_columns = batch.take(torch.arange(7), 0)
    degenerate = {
        "all masked": batch.replace(mask=torch.zeros_like(batch.mask)),
        "one empty response": batch.replace(mask=batch.mask & (torch.arange(7) != 2)[:, None]),
        "one response left": batch.replace(mask=batch.mask & (torch.arange(7) == 2)[:, None]),
        "no rows": empty_rows,
        "no columns": no_columns,
        "no reward": batch.replace(rewards=torch.full((7,), float("nan"))),
        "groups of one": batch.replace(group=torch.arange(7)),
        "equal rewards": batch.replace(rewards=torch.full((7,), 0.1)),
    }
    if batch.truncated is not None:
        degenerate["all truncated"] = batch.replace(truncated=torch.ones(7, dtype=torch.bool))
    for changed in degenerate.values():
        assert_finite(objective, changed)
    for nothing in ("all masked", "no rows", "no columns"):
        assert float(objective(degenerate[nothing]).loss) == 0


@pytest.mark.parametrize("name", NAMES)
def test_entropy_zero_and_log_v_are_finite(name: str) -> None:
    objective = tepo.objective(name, entropy_coef=0.01)
    batch = random_batch(0, fields={*objective.needs.batch, "entropy", "old_entropy"})
    for new, old in ((0.0, math.log(50000)), (math.log(50000), 0.0), (0.0, 0.0)):
        changed = {"entropy": torch.full_like(batch.logp, new), "old_entropy": torch.full_like(batch.logp, old)}
        assert_finite(objective, batch.replace(**changed))


@pytest.mark.parametrize("name", NAMES)
def test_large_and_offset_rewards(name: str) -> None:
    """Rewards in the thousands, and rewards that differ by little around a large offset."""
    objective = tepo.objective(name)
    batch = random_batch(0, fields=objective.needs.batch, dtype=torch.float32)
    assert_finite(objective, batch.replace(rewards=batch.rewards * 1e6))
    assert_finite(objective, batch.replace(rewards=batch.rewards + 1e4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("preference", [-50.0, -2.5, 0.0, 2.5, 50.0])
def test_a_learned_preference_for_length_is_finite_beside_a_response_without_tokens(
    preference: float, dtype: torch.dtype
) -> None:
    objective = tepo.objective("lambda-grpo", length_preference=preference, length_scale=0.3)
    for seed in range(7, 200, 24):
        assert_finite(objective, random_batch(seed, fields=(), kind="empty-row", groups=(4, 3, 2), dtype=dtype))


class NoWiderThanFloat32(TorchDispatchMode):
    """Refuses any operation that makes a float64 tensor: some devices (mps) have none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        wide = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64]
        assert not wide, f"{func} made a float64 tensor"
        return result


@pytest.mark.parametrize("settings", [{}, EVERYTHING], ids=["default", "everything"])
@pytest.mark.parametrize("name", NAMES)
def test_float32_and_bfloat16_batches_never_make_float64(name: str, settings: dict[str, Any]) -> None:
    objective = tepo.objective(name, **settings)
    for dtype in (torch.float32, torch.bfloat16):
        for kind in ("plain", "first-update", "reward-components"):
            batch = random_batch(0, fields=objective.needs.batch, kind=kind, dtype=dtype)
            current = {name: value for name, value in batch.present() if name in ("logp", "entropy")}
            leaves = {name: value.clone().requires_grad_(True) for name, value in current.items()}
            with NoWiderThanFloat32():
                out = objective(batch.replace(**leaves))
                out.loss.backward()
            assert out.loss.dtype == torch.float32
            gradients = [leaf.grad for leaf in leaves.values() if leaf.grad is not None]
            assert gradients
            assert all(gradient.dtype == dtype for gradient in gradients)


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_other_devices_agree_with_the_cpu(device: str) -> None:
    if not (torch.cuda.is_available() if device == "cuda" else torch.backends.mps.is_available()):
        pytest.skip(f"no {device} device here")
    for entry in tepo.objectives():
        batch = random_batch(0, fields=entry.needs.batch, dtype=torch.float32)
        here, there = entry.objective(batch), entry.objective(batch.to(device))
        assert there.loss.device.type == device
        assert float(there.loss) == pytest.approx(float(here.loss), abs=1e-6), entry.name
        assert there.metrics == pytest.approx(here.metrics, abs=1e-5), entry.name


def test_half_precision_inputs_give_float32_credit() -> None:
    batch = random_batch(0, fields=(), rounded=torch.float16, dtype=torch.float16)
    credit = tepo.credit(tepo.objective("dapo"), batch)
    assert credit.dtype == torch.float32
    exact = tepo.credit(tepo.objective("dapo"), random_batch(0, fields=(), rounded=torch.float16))
    assert torch.allclose(credit.double(), exact, atol=1e-6)


def test_types_may_be_mixed() -> None:
    batch = random_batch(0, fields={"ref_logp"}, rounded=torch.bfloat16)
    mixed = batch.replace(
        logp=batch.logp.float(), old_logp=batch.old_logp.bfloat16(), rewards=batch.rewards.to(torch.float16)
    )
    for name in ("grpo", "gspo-token"):
        assert float(tepo.objective(name)(mixed).loss) == pytest.approx(
            float(tepo.objective(name)(batch).loss), abs=1e-6
        )


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16, torch.float32], ids=str)
def test_rewards_of_any_type(dtype: torch.dtype) -> None:
    batch = random_batch(0, fields=(), dtype=torch.float32)
    binary = torch.tensor([1, 0, 1, 0, 0, 1, 0])
    expected = tepo.objective("dapo")(batch.replace(rewards=binary.float())).loss
    assert float(tepo.objective("dapo")(batch.replace(rewards=binary.to(dtype))).loss) == float(expected)


# --- advantages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("eps", [1e-6, 0.0])
def test_equal_rewards_are_exactly_silent_at_any_size(eps: float, dtype: torch.dtype) -> None:
    for value in (0.1, 0.3, -1 / 3, 1.0, 0.0, 1e4 / 3, 1e-30):
        for n in (1, 2, 3, 5, 7, 8, 16, 64):
            rewards, group = torch.full((n,), value, dtype=dtype), torch.zeros(n, dtype=torch.long)
            for part in (GroupNormalized(eps=eps), GroupNormalized("none"), LeaveOneOut(), GroupNormalized("batch")):
                assert part.of(rewards, group).abs().max() == 0


def test_rewards_an_ulp_apart_are_equal_and_rewards_ten_millionths_apart_are_not() -> None:
    """A mean of floats can be off by an ulp; divided by a deviation as small, rounding would become a signal."""
    group = torch.zeros(3, dtype=torch.long)
    for value in (0.1, 1.0, -250.0):
        reward = torch.tensor(value)
        ulp = torch.nextafter(reward, torch.tensor(float("inf")))
        for part in (GroupNormalized(eps=0.0), LeaveOneOut()):
            assert part.of(torch.stack([reward, ulp, reward]), group).tolist() == [0, 0, 0]
            assert float(part.of(torch.stack([reward, reward * (1 + 1e-5), reward]), group).abs().min()) > 0


def test_a_response_without_a_reward_has_no_advantage_and_no_say() -> None:
    nan = float("nan")
    rewards, group = torch.tensor([1.0, 0, nan, 0, nan, 2.0]), torch.tensor([0, 0, 0, 0, 1, 1])
    for part in (GroupNormalized(), GroupNormalized("none"), LeaveOneOut()):
        scored = part.of(torch.tensor([1.0, 0, 0]), torch.zeros(3, dtype=torch.long))
        assert part.of(rewards, group).tolist() == pytest.approx([*scored[:2].tolist(), 0, float(scored[2]), 0, 0])


def test_components_are_summed_without_the_ones_that_cannot_score() -> None:
    nan = float("nan")
    rewards = torch.tensor([[1.0, 0.5], [0.0, nan], [nan, nan], [nan, 0.25]], dtype=torch.float64)
    batch = TokenBatch(
        logp=torch.full((4, 1), -1.0, dtype=torch.float64),
        mask=torch.ones(4, 1, dtype=torch.bool),
        rewards=rewards,
        group=torch.zeros(4, dtype=torch.long),
    )
    mean = (1.5 + 0 + 0.25) / 3
    prepared = tepo.objective("dr-grpo").prepare(batch).batch.advantage
    assert prepared[:, 0].tolist() == pytest.approx([1.5 - mean, -mean, 0, 0.25 - mean])


def test_scale_by_the_batch_uses_one_deviation_for_all_groups() -> None:
    rewards = torch.tensor([1.0, 0, 5, 1], dtype=torch.float64)
    group = torch.tensor([0, 0, 1, 1])
    std = float(rewards.std())
    expected = [0.5 / std, -0.5 / std, 2 / std, -2 / std]
    assert GroupNormalized("batch", eps=0.0).of(rewards, group).tolist() == pytest.approx(expected)


def test_kl_in_the_reward_moves_it_by_the_sequence_sum() -> None:
    batch = random_batch(0, fields={"ref_logp"})
    objective = tepo.objective("rloo", kl_coef=0.5)
    zero = torch.zeros_like(batch.logp)
    penalty = torch.where(batch.mask, batch.old_logp - batch.ref_logp, zero).sum(1)
    expected = LeaveOneOut().of(batch.rewards - 0.5 * penalty, batch.group)
    prepared = objective.prepare(batch).batch.advantage
    assert torch.allclose(prepared, torch.where(batch.mask, expected[:, None], zero), atol=1e-12)
    assert objective.needs.old_logp
    assert not tepo.objective("rloo", kl_coef=0).needs.old_logp
