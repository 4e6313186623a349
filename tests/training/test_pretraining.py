"""Pre-training text in the updates (PPO-ptx): its gradient, its windows, and a run that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tepo.core.errors import InputError
from tepo.policy import PolicyConfig, load_policy
from tepo.training.pretraining import PretrainingText
from tepo.training.trainer import train

from .conftest import MakeConfig
from .test_trainer import assert_goes_on_as_if_nothing_happened

QUIET: dict[str, Any] = {"eval": {"at_start": False, "at_end": False}}


def text() -> PretrainingText:
    return PretrainingText(tuple(4 + (7 * index) % 80 for index in range(200)), length=12, windows=5, seed=3)


def test_windows_depend_on_seed_and_update_alone() -> None:
    one = text().sequences(4)
    assert one == text().sequences(4) != text().sequences(5)
    assert [len(row.response) for row in one] == [12] * 5
    for row in one:
        window = [*row.prompt, *row.response]
        assert any(window == list(text().ids[start : start + 13]) for start in range(188))


def test_the_gradient_is_that_of_minus_the_mean_log_likelihood_however_it_is_cut() -> None:
    policy = load_policy(PolicyConfig(path="builtin:tiny", device="cpu", dtype="float64"))
    rows = text().sequences(0)
    wanted_loss = torch.zeros((), dtype=torch.float64)
    for row in rows:
        logits = policy.model(input_ids=torch.tensor([[*row.prompt, *row.response]])).logits[0, :-1]
        targets = torch.tensor(row.response)
        wanted_loss = wanted_loss + 0.5 * torch.nn.functional.cross_entropy(logits, targets) / len(rows)
    wanted = torch.autograd.grad(wanted_loss, policy.trainable_parameters())
    for tokens in (0, 30, 1):
        for parameter in policy.trainable_parameters():
            parameter.grad = None
        parts = text().accumulate(policy, 0.5, update=0, tokens=tokens)
        assert parts.metrics() == pytest.approx(dict.fromkeys(("loss", "loss/ptx"), float(wanted_loss.detach())))
        for parameter, gradient in zip(policy.trainable_parameters(), wanted, strict=True):
            assert parameter.grad is not None
            assert torch.allclose(parameter.grad, gradient, atol=1e-10)


@pytest.mark.slow
def test_a_run_with_text_learns_it_and_goes_on_as_if_nothing_happened(tiny_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    changes: dict[str, Any] = {
        "objective": {"name": "instructgpt", "ptx_coef": 1.0},
        "pretraining": {"path": str(path), "windows": 4, "length": 32},
        "train": {"steps": 4, "preflight": 2},
        **QUIET,
    }
    folder = assert_goes_on_as_if_nothing_happened(tiny_config, **changes)
    losses = [line["loss/ptx"] for line in folder.read_metrics()]
    assert losses[-1] < losses[0] - 0.3


def test_a_text_without_a_term_and_a_term_without_a_text_are_refused(tiny_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("x")
    given = {"path": str(path)}
    with pytest.raises(InputError, match="the objective has no pre-training term"):
        train(tiny_config(pretraining=given))
    term = {"name": "instructgpt", "ptx_coef": 1.0}
    with pytest.raises(InputError, match=r"name the text file in pretraining\.path"):
        train(tiny_config(objective=term))
    with pytest.raises(InputError, match="has 1 tokens: expected 2 at least"):
        train(tiny_config(objective=term, pretraining=given))
    with pytest.raises(InputError, match="cannot be read as UTF-8 text"):
        train(tiny_config(objective=term, pretraining={"path": str(tmp_path / "none")}))
