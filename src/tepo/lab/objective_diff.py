"""One frozen batch put through every objective: which tokens each pushes, clips, masks and leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tepo.core.errors import InputError
from tepo.lab.tokens import CLIP_DUAL, CLIP_HIGH, CLIP_LOW, HELD, LEFT_OUT, Inspection, read_step, token_batch
from tepo.lab.view import Choice, attempt, everything, kept_steps, own_objective, view_data
from tepo.objectives import TokenBatch

MOST_RESPONSES = 32
MOST_TOKENS = 12_000


@dataclass(frozen=True)
class Row:
    """What a method does to the batch; numbers are None where `why` says that they cannot be said."""

    label: str
    why: str = ""
    clipped: float | None = None
    masked: float | None = None
    left_out: float | None = None
    up: float | None = None
    down: float | None = None
    right: float | None = None
    agreement: float | None = None
    through_entropy: float | None = None


@dataclass(frozen=True)
class Diff:
    """`where`: the batch, in words; `index` and `responses`: the batch as the token pages read it."""

    where: str
    rows: tuple[Row, ...]
    index: dict[str, Any]
    responses: list[dict[str, Any]]


def objective_diff(runs: Sequence[Path], labels: Sequence[str]) -> Diff | None:
    """Return the diff on kept responses of the first run that has some; None where no run has.

    The runs' own objectives come first, under `labels`, then the whole catalogue.
    """
    found = next((frozen for run in runs if (frozen := frozen_batch(run)) is not None), None)
    if found is None:
        return None
    where, step, records = found
    try:
        batch = token_batch(records)
    except InputError:
        return None
    own = [
        Choice(f"run {label}", f"{label} (as run)", method.objective)
        for run, label in zip(runs, labels, strict=True)
        if (method := own_objective(run)) is not None
    ]
    methods = [*own, *everything()]
    seen = {method.name: attempt(method, batch) for method in methods}
    base = next((inspection for inspection, _ in seen.values() if inspection is not None), None)
    rows = tuple(row(method.label, *seen[method.name], batch, base) for method in methods)
    index, chunks = view_data([(step, records)], methods)
    return Diff(where, rows, index, [one for chunk in chunks for one in chunk])


def frozen_batch(run: Path) -> tuple[str, int, list[dict[str, Any]]] | None:
    """Return the last kept step of a run that has right and wrong responses (or the last one), in words and whole."""
    try:
        steps = kept_steps(run)
    except InputError:
        return None
    fallback = None
    for step, path in reversed(steps):
        records = _few(read_step(path))
        if not records:
            continue
        fallback = fallback or (step, records)
        if len({bool(record.get("passed")) for record in records}) == 2:
            fallback = (step, records)
            break
    if fallback is None:
        return None
    step, records = fallback
    words = f"{len(records)} responses of {run.resolve().name}, step {step}, as one mini-batch"
    return words, step, records


def row(label: str, inspection: Inspection | None, why: str, batch: TokenBatch, base: Inspection | None) -> Row:
    """Return one method's line of the table."""
    if inspection is None:
        return Row(label, why)
    mask = batch.mask
    flags = inspection.flags[mask]
    entropy = inspection.entropy_credit
    through = float(entropy[mask].abs().sum()) if entropy is not None else None
    shares = Row(
        label,
        clipped=_share(flags, CLIP_LOW | CLIP_HIGH | CLIP_DUAL),
        masked=_share(flags, HELD),
        left_out=_share(flags, LEFT_OUT),
        through_entropy=through,
    )
    if inspection.credit is None:
        return replace(shares, why="acts through the entropy alone: no credit by log-prob")
    credit = inspection.credit[mask]
    size = float(credit.abs().sum())
    right = float(inspection.credit[batch.correct].abs().sum()) if batch.correct is not None else 0.0
    return replace(
        shares,
        up=float(credit.clamp_min(0).sum()),
        down=float(credit.clamp_max(0).sum()),
        right=right / size if size else None,
        agreement=None if base is None or base.credit is None else _correlation(credit, base.credit[mask]),
    )


def _few(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first responses, as many as a report can hold, whole groups where possible."""
    kept: list[dict[str, Any]] = []
    tokens = 0
    for record in records[:MOST_RESPONSES]:
        tokens += len(record["token_ids"])
        if kept and tokens > MOST_TOKENS:
            break
        kept.append(record)
    return kept


def _share(flags: Tensor, bits: int) -> float:
    return float(((flags & bits) > 0).double().mean()) if flags.numel() else 0.0


def _correlation(one: Tensor, other: Tensor) -> float | None:
    pair = torch.stack([one, other])
    if one.numel() < 2 or bool((pair.std(dim=1) < 1e-15).any()):
        return None
    return float(torch.corrcoef(pair)[0, 1])
