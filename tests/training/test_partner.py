"""Two policies trained together: the small one samples for both, the large one is its teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tepo.core.errors import InputError
from tepo.policy import PolicyConfig, load_policy
from tepo.training.checkpoint import load_checkpoint
from tepo.training.rundir import RunFolder, step_name
from tepo.training.trainer import train

from .conftest import MakeConfig
from .test_trainer import Recorder, assert_goes_on_as_if_nothing_happened, metrics_of

REWARD = """
def parity(problems, responses):
    return [float(sum(map(ord, response)) % 2) for response in responses]
"""
TWO: dict[str, Any] = {"objective": {"name": "codistill-grpo"}, "eval": {"at_start": False, "at_end": False}}


@pytest.fixture
def parity(tmp_path: Path) -> dict[str, str]:
    """A reward that half of all responses get."""
    path = tmp_path / "parity.py"
    path.write_text(REWARD)
    return {"kind": f"{path}:parity"}


def large(folder: Path, vocabulary: int | None = None) -> Path:
    """Write a model of another size with the tiny one's tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny = load_policy(PolicyConfig(path="builtin:tiny", device="cpu"))
    config = LlamaConfig(
        vocab_size=vocabulary or tiny.vocabulary,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return folder


def test_two_policies_train_and_both_are_saved(tiny_config: MakeConfig, tmp_path: Path, parity: dict[str, str]) -> None:
    path = large(tmp_path / "large")
    config = tiny_config(partner={"path": str(path), "lr": 2e-3}, reward=parity, train={"preflight": 2}, **TWO)
    folder = RunFolder(train(config).folder)
    lines = metrics_of(folder.path)
    assert len(lines) == 3
    for line in lines:
        assert line["partner/lr"] == 2e-3
        assert line["lr"] == 1e-3
        assert line["partner/grad/norm"] > 0
        # The small policy's own responses are less likely to the large one: the weights are not 1.
        assert line["partner/mismatch/kl"] > 1e-3
    start = load_policy(PolicyConfig(path=str(path), device="cpu")).state_tensors()
    final = load_policy(PolicyConfig(path=str(folder.partner), device="cpu")).state_tensors()
    assert final.keys() == start.keys()
    assert any(not torch.equal(value, start[name]) for name, value in final.items())
    assert load_policy(PolicyConfig(path=str(folder.model), device="cpu")).model.config.hidden_size == 192
    saved = load_checkpoint(folder.checkpoints / step_name(3)).tensors
    assert set(saved) == {"policy", "policy-optimizer", "partner", "partner-optimizer"}
    assert all(torch.equal(value, final[name]) for name, value in saved["partner"].items())


def test_without_a_name_the_partner_is_the_model_once_more(tiny_config: MakeConfig, parity: dict[str, str]) -> None:
    """At the first update both are the same policy: no distillation reward, weights of 1, the same gradient."""
    config = tiny_config(reward=parity, train={"steps": 1, "mini_batches": 1}, **TWO)
    (line,) = metrics_of(train(config).folder)
    assert line["partner/mismatch/max"] < 1e-4
    assert line["grad/norm"] > 0
    assert line["partner/grad/norm"] == pytest.approx(line["grad/norm"], rel=1e-3)


def test_a_run_of_two_goes_on_as_if_nothing_happened(
    tiny_config: MakeConfig, tmp_path: Path, parity: dict[str, str]
) -> None:
    changes = {"partner": {"path": str(large(tmp_path / "large"))}, "reward": parity, "train": {"steps": 4}, **TWO}
    assert_goes_on_as_if_nothing_happened(tiny_config, **changes)


def test_a_partner_with_other_tokens_is_refused(tiny_config: MakeConfig, tmp_path: Path) -> None:
    path = large(tmp_path / "other", vocabulary=300)
    recorder = Recorder()
    with pytest.raises(InputError, match="they must share a tokenizer"):
        train(tiny_config(partner={"path": str(path)}, **TWO), callbacks=[recorder])
