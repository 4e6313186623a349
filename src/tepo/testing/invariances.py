"""The invariance matrix: what must not change the loss, the gradients and the metrics of an objective.

Each invariance takes an objective, a batch and what the objective makes of it, and yields every difference.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tepo.core.seeds import stream
from tepo.objectives import Objective, TokenBatch
from tepo.objectives.batch import TOKEN_FIELDS
from tepo.testing.outcomes import (
    CURRENT,
    Difference,
    Outcome,
    constants_that_move,
    detached,
    differences,
    evaluate,
    metric_differences,
    outside,
)

Invariance = Callable[[Objective, TokenBatch, Outcome], Iterator[Difference]]

# In float64 only the order of summation may show.
EXACT = 1e-10
# float32 arithmetic on the same inputs; a bfloat16 leaf rounds its gradient to 8 bits.
SINGLE = 2e-5
HALF_GRADIENT = 2**-7

GARBAGE = {"nan": float("nan"), "+inf": float("inf"), "-inf": float("-inf"), "1e10": 1e10}


def contract(objective: Objective, batch: TokenBatch, expected: Outcome) -> Iterator[Difference]:
    """Everything is finite; nothing leaks outside the mask; constants stay constant; needs are declared."""
    for name, value in [("loss", expected.loss), *expected.gradients.items()]:
        bad = ~torch.isfinite(value)
        if bool(bad.any()):
            yield Difference(f"{name if name == 'loss' else 'gradient of ' + name} (not finite)", float("inf"), 0.0)
    for metric, number in expected.metrics.items():
        if not abs(number) < float("inf"):
            yield Difference(f"metric {metric!r} (not finite)", number, 0.0)
    yield from outside(expected, batch)
    yield from constants_that_move(objective, batch)
    for name, statistic in CURRENT.items():
        gradient = expected.gradients.get(name)
        if statistic is None or gradient is None or statistic in objective.needs.scores:
            continue
        size = float(gradient.abs().max()) if gradient.numel() else 0.0
        if size > 0:
            yield Difference(f"gradient of {name} (needs.scores lacks {statistic!r})", size, 0.0)


def repeatable(objective: Objective, batch: TokenBatch, expected: Outcome) -> Iterator[Difference]:
    """The same call gives the same bits, whatever the global generator holds, and leaves its inputs alone."""
    before = {name: value.clone() for name, value in batch.present()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20260414)
        yield from differences(expected, evaluate(objective, batch), rtol=0.0)
    for name, value in batch.present():
        if not torch.equal(value.nan_to_num(), before[name].nan_to_num()):
            yield Difference(f"input {name} (changed in place)", float("inf"), 0.0)


def padding(left: int, right: int) -> Invariance:
    """Return the invariance under extra columns on either side."""

    def check(objective: Objective, batch: TokenBatch, expected: Outcome) -> Iterator[Difference]:
        width = batch.mask.shape[1]
        wider = {name: torch.nn.functional.pad(value, (left, right)) for name, value in token_fields(batch)}
        padded = batch.replace(**wider)
        outcome = evaluate(objective, padded)
        yield from outside(outcome, padded)
        yield from differences(expected, outcome.map(lambda value: value[:, left : left + width]), EXACT)

    return check


def permutation(objective: Objective, batch: TokenBatch, expected: Outcome) -> Iterator[Difference]:
    """The order of the rows does not matter."""
    rows = batch.mask.shape[0]
    order = list(range(rows))
    _draw(batch).shuffle(order)
    for shuffled in (order, list(reversed(range(rows)))):
        index = torch.tensor(shuffled, dtype=torch.long)
        back = torch.argsort(index)
        outcome = evaluate(objective, batch.take(index))
        yield from differences(expected, outcome.map(lambda value, back=back: value[back]), EXACT)  # type: ignore[misc]


def splits(objective: Objective, batch: TokenBatch, expected: Outcome) -> Iterator[Difference]:
    """Micro-batches add up to the whole, however the rows are dealt: all, one each, in halves, unevenly."""
    rows = list(range(batch.mask.shape[0]))
    draw = _draw(batch)
    shuffled = draw.sample(rows, len(rows))
    cuts = sorted(draw.sample(range(1, len(rows)), min(2, len(rows) - 1)))
    bounds = [0, *cuts, len(rows)]
    uneven = [shuffled[start:end] for start, end in itertools.pairwise(bounds)]
    by_length = sorted(rows, key=lambda row: int(batch.mask[row].sum()))
    half = len(rows) // 2
    for split in ([rows], [[row] for row in rows], [by_length[:half], by_length[half:]], uneven):
        yield from differences(expected, evaluate(objective, batch, split), EXACT)


def garbage(value: float) -> Invariance:
    """Return the invariance under a value outside the mask, in every floating-point token field."""

    def fill(batch: TokenBatch, names: list[str]) -> TokenBatch:
        filled = {
            name: torch.where(batch.mask, field, torch.full_like(field, value))
            for name, field in token_fields(batch)
            if name in names
        }
        return batch.replace(**filled)

    def check(objective: Objective, batch: TokenBatch, expected: Outcome) -> Iterator[Difference]:
        names = [name for name, field in token_fields(batch) if field.is_floating_point()]
        if not list(_found(objective, fill(batch, names), expected)):
            return
        for name in names:  # which field lets it through?
            for found in _found(objective, fill(batch, [name]), expected):
                yield Difference(f"{found.field}, with {name} alone filled", found.size, found.allowed, found.where)

    def _found(objective: Objective, dirty: TokenBatch, expected: Outcome) -> Iterator[Difference]:
        outcome = evaluate(objective, dirty)
        yield from outside(outcome, dirty)
        yield from differences(expected, outcome, EXACT)

    return check


def precision(dtype: torch.dtype, gradient_rtol: float) -> Invariance:
    """Return the agreement of narrower inputs with float64 arithmetic on the same, rounded, inputs."""

    def check(objective: Objective, batch: TokenBatch, expected: Outcome) -> Iterator[Difference]:
        narrow = {name: value.to(dtype) for name, value in batch.present() if value.is_floating_point()}
        outcome = evaluate(objective, batch.replace(**narrow))
        yield from differences(expected, outcome, SINGLE, gradient_rtol)

    return check


def extra_empty_row(objective: Objective, batch: TokenBatch, expected: Outcome) -> Iterator[Difference]:
    """A response without tokens, of a prompt of its own, moves nothing but (at most) the scale of the loss."""
    rows = batch.mask.shape[0]
    longer = {}
    for name, value in batch.present():
        row = torch.zeros_like(value[:1])
        if name == "group":
            row = row + value.max() + 1
        elif name in TOKEN_FIELDS and value.is_floating_point():
            row = torch.full_like(row, float("nan"))
        longer[name] = torch.cat([value, row])
    bigger = TokenBatch(**longer)
    outcome = evaluate(objective, bigger)
    yield from outside(outcome, bigger)
    kept = outcome.map(lambda value: value[:rows])
    scale = _common_scale(expected, kept)
    scaled = Outcome(
        expected.loss * scale, {name: value * scale for name, value in expected.gradients.items()}, kept.metrics
    )
    yield from differences(scaled, kept, EXACT)
    if abs(scale - 1) < EXACT:
        yield from metric_differences(_of_tokens(expected.metrics), _of_tokens(outcome.metrics), EXACT)


def _of_tokens(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("group/")}


def _common_scale(expected: Outcome, got: Outcome) -> float:
    """Return got / expected of the gradients, or of the loss where all gradients are 0 (everything is clipped)."""
    wanted, found = (torch.cat([value.flatten() for value in each.gradients.values()]) for each in (expected, got))
    norm = float((wanted**2).sum())
    if norm > 0:
        return float((wanted * found).sum()) / norm
    return float(got.loss) / float(expected.loss) if float(expected.loss) != 0 else 1.0


def all_masked(objective: Objective, batch: TokenBatch, expected: Outcome) -> Iterator[Difference]:
    """A batch without a single response token has loss 0 and gradient 0."""
    empty = batch.replace(mask=torch.zeros_like(batch.mask))
    rows = list(range(batch.mask.shape[0]))
    for split in (None, [rows[:1], rows[1:]]):
        outcome = evaluate(objective, empty, split)
        zeros = {name: torch.zeros_like(value) for name, value in expected.gradients.items()}
        nothing = Outcome(torch.zeros_like(expected.loss), zeros, outcome.metrics)
        yield from differences(nothing, outcome, 0.0)
        yield from (
            Difference(f"metric {name!r} (not finite)", value, 0.0)
            for name, value in outcome.metrics.items()
            if not abs(value) < float("inf")
        )


def equal_rewards(objective: Objective, batch: TokenBatch, expected: Outcome) -> Iterator[Difference]:
    """Where equal rewards of 1 give advantage 0, so do equal rewards that binary fractions cannot hold."""

    def largest(value: float, dtype: torch.dtype) -> float:
        narrow = {name: field.to(dtype) for name, field in batch.present() if field.is_floating_point()}
        narrow["rewards"] = torch.full(batch.mask.shape[:1], value, dtype=dtype)
        prepared = objective.prepare(batch.replace(**narrow).replace(advantage=None)).batch
        return 0.0 if prepared.advantage is None else float(prepared.advantage.abs().max())

    if largest(1.0, torch.float64) != 0:
        return
    for dtype in (torch.float32, torch.float64):
        for value in (0.1, 0.3, -1 / 3, 1e4 / 3):
            size = largest(value, dtype)
            if size != 0:
                yield Difference(f"advantage of rewards all {value:.4g} in {dtype}", size, 0.0)


def idle_rows(objective: Objective, batch: TokenBatch, expected: Outcome) -> Iterator[Difference]:
    """Rows that the objective calls idle have no gradient, and without computing them nothing is missing."""
    prepared = objective.prepare(detached(batch)).batch
    idle = objective.idle(objective.statistics(prepared))
    if not bool(idle.any()):
        return
    for name, gradient in expected.gradients.items():
        size = float(gradient[idle].abs().max()) if gradient.dim() == 2 and gradient.numel() else 0.0
        if size != 0:
            yield Difference(f"gradient of {name} in an idle row", size, 0.0)
    computed = (~idle).nonzero()[:, 0].tolist()
    outcome = evaluate(objective, batch, [computed] if computed else [idle.nonzero()[0].tolist()])
    yield from differences(Outcome(expected.loss, expected.gradients, outcome.metrics), outcome, EXACT)


def token_fields(batch: TokenBatch) -> list[tuple[str, Tensor]]:
    """Return the fields `[B, T]` that are set, advantages among them."""
    names = (*TOKEN_FIELDS, "advantage")
    return [(name, value) for name, value in batch.present() if name in names and value.shape == batch.mask.shape]


def _draw(batch: TokenBatch) -> random.Random:
    return stream(int(batch.mask.sum()), "testing/invariances")


INVARIANCES: dict[str, Invariance] = {
    "contract": contract,
    "repeatable": repeatable,
    "padding-left": padding(2, 0),
    "padding-right": padding(0, 3),
    "padding-both": padding(1, 2),
    "permutation": permutation,
    "splits": splits,
    **{f"garbage {name}": garbage(value) for name, value in GARBAGE.items()},
    "float32": precision(torch.float32, SINGLE),
    "bfloat16": precision(torch.bfloat16, HALF_GRADIENT),
    "extra-empty-row": extra_empty_row,
    "all-masked": all_masked,
    "equal-rewards": equal_rewards,
    "idle-rows": idle_rows,
}

# Invariances that make their own batch out of the given one: one kind is enough.
OF_PLAIN = frozenset({"all-masked", "equal-rewards"})
