"""What the pages show of a token is what the objective does to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from central import central_differences
from synthetic import make_run

import tepo
from tepo.lab.tokens import CLIP_HIGH, CLIP_LOW, HELD, LEFT_OUT, inspect, read_step, token_batch
from tepo.objectives import TokenBatch
from tepo.testing import steady_batch

METHODS = [entry.name for entry in tepo.objectives()]


@pytest.mark.parametrize("name", METHODS)
def test_credit_and_entropy_credit_are_central_differences(name: str) -> None:
    objective = tepo.objective(name)
    batch = steady_batch(objective, 0, rounded=None)
    seen = inspect(objective, batch)
    shown = {"logp": seen.credit, "entropy": seen.entropy_credit}
    if batch.entropy is None or "entropy_grad" not in objective.needs.scores:
        assert shown.pop("entropy") is None
    for field, credit in shown.items():
        slopes = central_differences(objective, batch, field)
        # Where it is said to be not applicable, nothing depends on it.
        expected = torch.zeros_like(slopes) if credit is None else -credit
        torch.testing.assert_close(slopes, expected, atol=2e-9, rtol=1e-6)
    assert seen.loss == pytest.approx(float(objective(batch).loss))


def test_a_loss_of_entropy_alone_has_no_credit_and_an_entropy_credit() -> None:
    objective = tepo.objective("em-ft")
    seen = inspect(objective, steady_batch(objective, 0, rounded=None))
    assert seen.credit is None
    assert seen.entropy_credit is not None
    assert float(seen.entropy_credit.abs().max()) > 0


@pytest.fixture
def batch(tmp_path: Path) -> TokenBatch:
    run = make_run(tmp_path / "run", steps=1)
    return token_batch(read_step(run / "rollouts" / "step-000001.jsonl"))


def test_clipped_tokens_are_those_beyond_the_bounds_on_the_side_that_gains(batch: TokenBatch) -> None:
    seen = inspect(tepo.objective("dapo"), batch)
    ratio = (batch.logp - batch.old_logp).exp()
    high = batch.mask & (ratio > 1.28) & (seen.advantage > 0)
    low = batch.mask & (ratio < 0.8) & (seen.advantage < 0)
    assert torch.equal((seen.flags & CLIP_HIGH) > 0, high)
    assert torch.equal((seen.flags & CLIP_LOW) > 0, low)
    assert seen.credit is not None
    assert float(seen.credit[high | low].abs().sum()) == 0
    assert bool((high | low).any())


def test_tepos_mask_is_where_the_advantage_is_positive_and_entropy_falls(batch: TokenBatch) -> None:
    seen = inspect(tepo.objective("tepo"), batch)
    held = batch.mask & (seen.advantage > 0) & (batch.entropy < batch.old_entropy - 1e-3)
    assert torch.equal((seen.flags & HELD) > 0, held)
    assert bool(held.any())


def test_tokens_that_are_not_chosen_have_no_weight(batch: TokenBatch) -> None:
    seen = inspect(tepo.objective("high-entropy"), batch)
    out = batch.mask & (seen.weight == 0)
    assert torch.equal((seen.flags & LEFT_OUT) > 0, out)
    assert bool(out.any())
    assert float(seen.weight.sum()) == pytest.approx(1.0)


def test_a_record_with_columns_of_two_lengths_is_refused(tmp_path: Path) -> None:
    records = read_step(make_run(tmp_path / "run", steps=1) / "rollouts" / "step-000001.jsonl")
    records[0]["logp"] = [*records[0]["logp"], 0.0]
    with pytest.raises(tepo.InputError, match="logp for"):
        token_batch(records)


def test_without_old_log_probs_it_is_the_first_update(tmp_path: Path) -> None:
    records = read_step(make_run(tmp_path / "run", steps=1) / "rollouts" / "step-000001.jsonl")
    for record in records:
        del record["old_logp"], record["old_entropy"]
    seen = inspect(tepo.objective("tepo"), token_batch(records))
    assert float((seen.ratio - 1).abs().max()) == 0
    assert int((seen.flags & HELD).sum()) == 0


def test_a_response_without_reward_has_no_advantage(tmp_path: Path) -> None:
    records = read_step(make_run(tmp_path / "run", steps=1) / "rollouts" / "step-000001.jsonl")
    records[0]["reward"] = None
    seen = inspect(tepo.objective("dapo"), token_batch(records))
    assert float(seen.advantage[0].abs().max()) == 0
