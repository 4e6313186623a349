"""Checkpoints: whole or absent, verified when read, the last few and the best kept."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tepo.core.errors import InputError, WorkError
from tepo.core.files import new_directory, write_json
from tepo.core.text import quoted
from tepo.training.rundir import RunFolder, step_name

FORMAT = 1
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Counters:
    """Everything a run continues from that is not a tensor."""

    step: int = 0
    """Steps done."""
    draws: int = 0
    """Problems drawn from the stream, dropped ones included: the position of the next."""
    updates: int = 0
    """Optimizer updates done; the schedule's clock."""
    micro_tokens: int = 0
    """Token budget in force, lower than configured after the device ran out of memory."""
    rows: int = 0
    """Responses sampled at once, lower than configured after the device ran out of memory."""
    response_tokens: int = 0
    """Response tokens sampled so far."""


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by file (`policy`, `policy-optimizer`, ...) and the counters."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    counters: Counters


def save_checkpoint(folder: RunFolder, checkpoint: Checkpoint) -> Path:
    """Write `checkpoints/step-NNNNNN`; a failure leaves the earlier checkpoints and raises `WorkError` naming them.

    Weights that are not finite are such a failure: a run could not go on from them.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    target = folder.checkpoints / step_name(checkpoint.counters.step)
    for name, tensors in checkpoint.tensors.items():
        if bad := non_finite(tensors):
            raise WorkError(f"checkpoint {target.name} was not saved: in {name} {bad}. {what_is_safe(folder)}")
    try:
        with new_directory(target) as aside:
            for name, tensors in checkpoint.tensors.items():
                plain = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
                save_file(plain, aside / f"{name}.safetensors")
            write_json(aside / "counters.json", asdict(checkpoint.counters))
            files = {file.name: _fingerprint(file) for file in sorted(aside.iterdir())}
            write_json(aside / "manifest.json", {"format": FORMAT, "files": files})
    except (OSError, SafetensorError) as error:
        raise WorkError(f"saving checkpoint {target.name} failed: {error}. {what_is_safe(folder)}") from error
    return target


def non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return, in words, the first of the tensors that holds NaN or an infinity; None where all are finite.

    What an objective keeps on the way (`state/*`) may be infinite: nothing measured yet.
    """
    for name, value in tensors.items():
        if not name.startswith("state/") and not bool(torch.isfinite(value).all()):
            return (
                f"{name} holds values that are not finite: training diverged. A lower optim.lr, a longer "
                "optim.warmup_steps or a smaller optim.grad_clip may help"
            )
    return None


def load_checkpoint(path: Path) -> Checkpoint:
    """Read and verify a checkpoint; damage is an `InputError` that names the file."""
    from safetensors.torch import load_file

    problem = damage(path)
    if problem:
        raise InputError(f"checkpoint {path}: {problem}")
    values: dict[str, Any] = json.loads((path / "counters.json").read_text(encoding="utf-8"))
    tensors = {file.stem: load_file(file) for file in sorted(path.glob("*.safetensors"))}
    return Checkpoint(tensors, Counters(**values))


def damage(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None: files missing, or not the bytes that were written."""
    if not path.is_dir():
        return "no such folder"
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        manifest = None
    if not isinstance(manifest, dict):
        return "manifest.json is missing or unreadable"
    if manifest.get("format") != FORMAT:
        return f"format {manifest.get('format')}, this version reads {FORMAT}"
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if _fingerprint(file) != expected:
            return f"{name} is not the file that was saved (size or checksum differs)"
    return None


def checkpoint_steps(folder: RunFolder) -> list[int]:
    """Return the steps that have a checkpoint, ascending."""
    if not folder.checkpoints.is_dir():
        return []
    names = (re.fullmatch(r"step-(\d{6,})", entry.name) for entry in folder.checkpoints.iterdir() if entry.is_dir())
    return sorted(int(match[1]) for match in names if match)


def best_step(folder: RunFolder, steps: Sequence[int], metric: str, mode: str) -> int | None:
    """Return the checkpointed step with the best value of a metric in metrics.jsonl, the earliest of equals."""
    sign = 1 if mode == "max" else -1
    present = set(steps)
    scored = [
        (sign * line[metric], -line["step"])
        for line in folder.read_metrics()
        if line["step"] in present and isinstance(line.get(metric), (int, float))
    ]
    return -max(scored)[1] if scored else None


def prune_checkpoints(folder: RunFolder, *, keep_last: int, best: str | None, mode: str) -> list[int]:
    """Remove all but the newest `keep_last` checkpoints and the best by a metric; return the steps removed.

    Where the metric exists, `checkpoints/best.json` names the best step and its value.
    """
    steps = checkpoint_steps(folder)
    kept = set(steps[-keep_last:])
    if best is not None:
        step = best_step(folder, steps, best, mode)
        if step is not None:
            kept.add(step)
            value = next(line[best] for line in folder.read_metrics() if line["step"] == step)
            write_json(folder.checkpoints / "best.json", {"step": step, "metric": best, "value": value})
    removed = [step for step in steps if step not in kept]
    for step in removed:
        shutil.rmtree(folder.checkpoints / step_name(step))
    return removed


def what_is_safe(folder: RunFolder) -> str:
    """Return, for an error message, which checkpoint is safe on disk and how to go on from it."""
    steps = checkpoint_steps(folder)
    if not steps:
        return f"Safe on disk: metrics and evaluations in {folder.path}; no checkpoint was made yet."
    return (
        f"Safe on disk: {folder.checkpoints / step_name(steps[-1])}. "
        f"Continue with `tepo train --resume {quoted(folder.path)}`"
    )


def _fingerprint(file: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            digest.update(chunk)
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}
