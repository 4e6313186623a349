"""One frozen batch put through every objective: which tokens each pushes, clips, masks and leaves out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
MOST_TELLING = 3
MOVED = 1e-3
"""Change of a log-prob from which on an update counts as seen."""


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
    """`where`: the batch, in words; `own` and `catalogue`: a row for each of the runs' objectives and for every method;
    `index` and `responses`: the batch as the token pages read it."""

    where: str
    own: tuple[Row, ...]
    catalogue: tuple[Row, ...]
    index: dict[str, Any]
    responses: list[dict[str, Any]]


def objective_diff(runs: Sequence[Path], labels: Sequence[str]) -> Diff | None:
    """Return the diff on the most telling kept step of the runs; None where none has kept any.

    The runs' own objectives come first, under `labels`, then the whole catalogue.
    """
    batches = [frozen for run in runs if (frozen := frozen_batch(run)) is not None]
    if not batches:
        return None
    where, step, records = max(batches, key=lambda one: telling(one[2]))
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
    return Diff(where, rows[: len(own)], rows[len(own) :], index, [one for chunk in chunks for one in chunk])


def frozen_batch(run: Path) -> tuple[str, int, list[dict[str, Any]]] | None:
    """Return the last of the most telling kept steps of a run, in words and whole; None where it has kept none."""
    try:
        steps = kept_steps(run)
    except InputError:
        return None
    best: tuple[int, list[dict[str, Any]]] | None = None
    for step, path in reversed(steps):
        records = _few(read_step(path))
        if records and (best is None or telling(records) > telling(best[1])):
            best = step, records
        if best is not None and telling(best[1]) == MOST_TELLING:
            break
    if best is None:
        return None
    step, records = best
    words = f"{len(records)} responses of {run.resolve().name}, step {step}, as one mini-batch"
    if not _moved(records):
        words += "; they met the first update after sampling, where all ratios are 1 and nothing can be clipped"
    return words, step, records


def telling(records: Sequence[Mapping[str, Any]]) -> int:
    """Return how much responses can say of objectives: 2 for right and wrong ones, 1 more for ratios that moved."""
    mixed = len({bool(record.get("passed")) for record in records}) == 2
    return 2 * mixed + _moved(records)


def _moved(records: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the policy has changed since it sampled any of the tokens, beyond rounding."""
    return any(
        abs(now - before) > MOVED
        for record in records
        for now, before in zip(record.get("logp", ()), record.get("old_logp", ()), strict=False)
    )


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
