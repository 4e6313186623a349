"""CoDistill-GRPO: both objectives equal the independent reference of their pieces; the distillation reward by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from objectives_reference import reference

import tepo
from tepo.core.seeds import stream
from tepo.objectives import DistillationReward, TokenBatch
from tepo.testing import KINDS, check_objective, evaluate, random_batch


def rewarded(batch: TokenBatch, coef: float) -> TokenBatch:
    """The batch with every reward plus coef times the mean log-ratio, in plain Python."""
    assert batch.rewards is not None
    assert batch.other_logp is not None
    rewards: list[Any] = batch.rewards.tolist()
    old = (batch.logp if batch.old_logp is None else batch.old_logp).tolist()
    other, shaped = batch.other_logp.tolist(), []
    for i, mask in enumerate(batch.mask.tolist()):
        gaps = [other[i][t] - old[i][t] for t, used in enumerate(mask) if used]
        known = [r for r in (rewards[i] if isinstance(rewards[i], list) else [rewards[i]]) if not math.isnan(r)]
        bonus = coef * math.fsum(gaps) / len(gaps) if gaps else 0.0
        shaped.append(math.fsum(known) + bonus if known else math.nan)
    return batch.replace(rewards=torch.tensor(shaped, dtype=torch.float64))


def test_both_policies_equal_the_reference() -> None:
    draw = stream(0, "tests/codistill")
    for seed in range(200):
        settings = {
            "distill_coef": draw.choice((0.1, 1.0)),
            "partner_cap": draw.choice((2.0, 1.1)),
            "clip_low": draw.choice((0.2, 0.4)),
            "clip_high": draw.choice((0.2, 0.28)),
        }
        clips = {name: settings[name] for name in ("clip_low", "clip_high")}
        small = tepo.objective("codistill-grpo", **settings)
        batch = random_batch(
            seed, fields={"other_logp", "rollout_logp"}, kind=KINDS[seed % len(KINDS)], groups=(4, 3, 2), width=5
        )
        large = small.partner
        assert large is not None
        weighted = {"importance_weight": "truncate", "importance_cap": settings["partner_cap"]}
        wanted = {
            small: reference("grpo", {"kl_coef": 0, **clips}, rewarded(batch, settings["distill_coef"])),
            large: reference("grpo", {"kl_coef": 0, **clips, **weighted}, batch),
        }
        for objective, expected in wanted.items():
            got = evaluate(objective, batch)
            assert float(got.loss) == pytest.approx(expected.loss, rel=1e-11, abs=1e-12), (objective.name, seed)
            by_logp = torch.tensor(expected.by_logp, dtype=torch.float64)
            assert torch.allclose(got.gradients["logp"], by_logp, atol=1e-12, rtol=1e-10), (objective.name, seed)


def test_the_invariance_matrix_of_both() -> None:
    small = tepo.objective("codistill-grpo", distill_coef=0.5)
    check_objective(small)
    assert small.partner is not None
    check_objective(small.partner)


@pytest.mark.parametrize("size", [1000.0, -1000.0, 0.02])
def test_extremes_of_the_partner_stay_finite(size: float) -> None:
    """One token far off, or 8192 tokens a little off, of the policy's own and of the sampling policy's log-probs."""
    large = tepo.objective("codistill-grpo").partner
    assert large is not None
    tokens = 8192 if abs(size) < 1 else 3
    shift = torch.full((3, tokens), size) if abs(size) < 1 else torch.tensor([[size, 0, 0], [0, 0, -size], [0, 0, 0]])
    old = torch.full((3, tokens), -1.0)
    batch = TokenBatch(
        logp=old + shift,
        old_logp=old,
        rollout_logp=old - shift,
        mask=torch.tensor([[True], [True], [False]]).expand(3, tokens),
        rewards=torch.tensor([1.0, 0.0, 1.0]),
        group=torch.zeros(3, dtype=torch.long),
    )
    outcome = evaluate(large, batch)
    assert bool(torch.isfinite(outcome.loss))
    assert all(bool(torch.isfinite(value).all()) for value in outcome.gradients.values())


def test_the_distillation_reward_by_hand() -> None:
    batch = TokenBatch(
        logp=torch.zeros(3, 3),
        old_logp=torch.tensor([[-1.0, 9.0, -2.0], [-1.0, -1.0, -1.0], [0.0, 0.0, 0.0]]),
        other_logp=torch.tensor([[-0.5, 0.0, -2.1], [-1.0, -1.0, -4.0], [1.0, 1.0, 1.0]]),
        mask=torch.tensor([[1, 0, 1], [1, 1, 1], [0, 0, 0]]).bool(),
        rewards=torch.tensor([1.0, float("nan"), 0.5]),
    )
    view = batch.replace(
        old_logp=batch.old_logp.where(batch.mask, 0) if batch.old_logp is not None else None,
        other_logp=batch.other_logp.where(batch.mask, 0) if batch.other_logp is not None else None,
    )
    shaped = DistillationReward(0.5)(view).rewards
    assert shaped is not None
    assert shaped.tolist() == pytest.approx([1.0 + 0.5 * (0.5 - 0.1) / 2, float("nan"), 0.5], nan_ok=True)


def test_roles_and_needs() -> None:
    small = tepo.objective("codistill-grpo", entropy_coef=0.01, truncated="drop")
    large = small.partner
    assert large is not None
    assert large.partner is None
    assert small.needs.batch == {"rewards", "group", "old_logp", "other_logp", "truncated", "entropy"}
    assert large.needs.batch == {"rewards", "group", "rollout_logp", "truncated", "entropy"}
    assert large.name == "codistill-grpo/partner"
    alone = dataclasses.replace(small, name=large.name, shaping=(), partner=None, weight=large.weight)
    assert alone == large
