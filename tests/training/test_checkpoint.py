"""Checkpoints: whole or absent, verified, pruned to the last few and the best."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tepo.core.errors import InputError, WorkError
from tepo.training.checkpoint import (
    Checkpoint,
    Counters,
    best_step,
    checkpoint_steps,
    damage,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from tepo.training.resume import latest_checkpoint
from tepo.training.rundir import RunFolder


def checkpoint(step: int, size: int = 16) -> Checkpoint:
    weights = torch.arange(size, dtype=torch.float32) + step
    tensors = {
        "policy": {"w": weights},
        "policy-optimizer": {"exp_avg/w": -weights, "state/kl_coef": torch.tensor(0.5)},
    }
    return Checkpoint(tensors, Counters(step=step, draws=8 * step, updates=4 * step, micro_tokens=64, rows=8))


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let no file grow beyond `size` bytes, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_round_trip(tmp_path: Path) -> None:
    saved = checkpoint(5)
    loaded = load_checkpoint(save_checkpoint(RunFolder(tmp_path), saved))
    assert loaded.counters == saved.counters
    assert loaded.tensors.keys() == saved.tensors.keys()
    for file, tensors in saved.tensors.items():
        assert loaded.tensors[file].keys() == tensors.keys()
        assert all(torch.equal(loaded.tensors[file][name], value) for name, value in tensors.items())


def test_full_disk_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    save_checkpoint(folder, checkpoint(1))
    with files_of_at_most(100_000), pytest.raises(WorkError) as caught:
        save_checkpoint(folder, checkpoint(2, size=100_000))
    assert "step-000001" in str(caught.value)
    assert "--resume" in str(caught.value)
    assert checkpoint_steps(folder) == [1]
    assert [entry.name for entry in folder.checkpoints.iterdir()] == ["step-000001"]
    assert load_checkpoint(folder.checkpoints / "step-000001").counters.step == 1


def test_full_disk_before_the_first_checkpoint(tmp_path: Path) -> None:
    with files_of_at_most(100_000), pytest.raises(WorkError, match="no checkpoint"):
        save_checkpoint(RunFolder(tmp_path), checkpoint(2, size=100_000))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_not_saved_and_the_one_before_is_safe(tmp_path: Path, bad: float) -> None:
    folder = RunFolder(tmp_path)
    save_checkpoint(folder, checkpoint(1))
    diverged = checkpoint(2)
    diverged.tensors["policy"]["w"][3] = bad
    with pytest.raises(WorkError, match=r"step-000002 was not saved: in policy w .*not finite.*step-000001"):
        save_checkpoint(folder, diverged)
    assert checkpoint_steps(folder) == [1]
    endless = Checkpoint({"policy-optimizer": {"state/last_entropy": torch.tensor(torch.inf)}}, Counters(step=3))
    save_checkpoint(folder, endless)
    assert checkpoint_steps(folder) == [1, 3]


@pytest.mark.parametrize("kind", ["changed", "missing", "manifest", "list"])
def test_damage_is_named_and_passed_over(tmp_path: Path, kind: str) -> None:
    folder = RunFolder(tmp_path)
    save_checkpoint(folder, checkpoint(1))
    path = save_checkpoint(folder, checkpoint(2))
    if kind == "changed":
        data = bytearray((path / "policy.safetensors").read_bytes())
        data[-1] ^= 1
        (path / "policy.safetensors").write_bytes(data)
    elif kind == "missing":
        (path / "counters.json").unlink()
    else:
        (path / "manifest.json").write_text({"manifest": "{", "list": "[]"}[kind])
    assert damage(path) is not None
    with pytest.raises(InputError, match="step-000002"):
        load_checkpoint(path)
    said: list[str] = []
    latest = latest_checkpoint(folder, said.append)
    assert latest is not None
    assert latest.counters.step == 1
    assert "step-000002" in said[0]


def test_last_and_best_are_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    scores = {1: 0.2, 2: 0.9, 3: None, 4: 0.9, 5: 0.1, 6: 0.3}
    for step, score in scores.items():
        folder.append_metrics(step, {"eval/avg": score} if score is not None else {})
        save_checkpoint(folder, checkpoint(step))
        prune_checkpoints(folder, keep_last=2, best="eval/avg", mode="max")
    assert checkpoint_steps(folder) == [2, 5, 6]
    record = json.loads((folder.checkpoints / "best.json").read_text())
    assert record == {"step": 2, "metric": "eval/avg", "value": 0.9}
    assert best_step(folder, [1, 5, 6], "eval/avg", "min") == 5
    assert best_step(folder, [3], "eval/avg", "max") is None


def test_only_the_last_without_a_metric(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3):
        save_checkpoint(folder, checkpoint(step))
    assert prune_checkpoints(folder, keep_last=1, best=None, mode="max") == [1, 2]
    assert checkpoint_steps(folder) == [3]


def test_cut_back_removes_what_came_after(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (0, 1, 2, 3):
        folder.append_metrics(step, {"loss": float("nan") if step == 2 else 0.5})
    for part in ("rollouts", "eval", "checkpoints"):
        (tmp_path / part).mkdir(exist_ok=True)
    for step in (1, 2, 3):
        (folder.rollouts / f"step-{step:06d}.jsonl").write_text("")
        (folder.eval / f"step-{step:06d}.summary.json").write_text("")
    (folder.checkpoints / ".step-000003.x").mkdir()
    (folder.path / ".model.y").mkdir()
    with folder.metrics.open("a") as file:
        file.write('{"step": 4, "lo')
    folder.cut_back(2)
    assert [line["step"] for line in folder.read_metrics()] == [0, 1, 2]
    assert folder.read_metrics()[2]["loss"] is None
    assert sorted(file.name for file in folder.rollouts.iterdir()) == ["step-000001.jsonl", "step-000002.jsonl"]
    assert sorted(file.name for file in folder.eval.iterdir()) == [
        "step-000001.summary.json",
        "step-000002.summary.json",
    ]
    assert list(folder.checkpoints.iterdir()) == []
    assert not (folder.path / ".model.y").exists()
